"""What a finished pipeline leaves: figures.json, report.md, report.html, and a page for each stage.

report.html has the tables of report.md and the losses of each training stage. The pages
report_cpt.html, report_sft_1.html and report_sft_2.html compare the runs of one stage in all that
experiments.report shows.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.markdown import markdown_table
from experiments.pipeline.figures import Figures, Results, figures
from experiments.pipeline.plan import TRAINING, Plan
from fp8jax.lm.cli import charts, compare
from fp8jax.lm.cli.page import page_template, report, signature
from fp8jax.lm.cli.tables import Table
from fp8jax.lm.figures.run_files import RunFiles, read_run

_STAGES = {
    "cpt": "Continual pre-training",
    "sft_1": "First fine-tuning",
    "sft_2": "Second fine-tuning",
}


def write(plan: Plan) -> list[Path]:
    """Writes figures and reports of a pipeline whose stages are done; returns their paths."""
    found = figures(Results.read(plan))
    made = tables(plan, found)
    runs = {stage: _runs(plan, stage) for stage in TRAINING}
    texts = {
        "figures.json": json.dumps(found, indent=2) + "\n",
        "report.md": _markdown(made),
        **{f"report_{stage}.html": report(each) for stage, each in runs.items()},
        "report.html": _page(plan, made, runs),
    }
    for name, text in texts.items():
        (plan.workdir / name).write_text(text, encoding="utf-8")
    return [plan.workdir / name for name in texts]


def _runs(plan: Plan, stage: str) -> list[RunFiles]:
    """The runs of a training stage, BF16's first."""
    folders = [
        plan.pre_trained(chain, seed) if stage == "cpt" else f"{chain.trained}/seed_{seed}"
        for chain in plan.chains
        for seed in plan.seeds
    ]
    return [read_run(plan.workdir / folder / stage) for folder in dict.fromkeys(folders)]


# Tables -------------------------------------------------------------------------------------------


def tables(plan: Plan, found: Figures) -> list[Table]:
    """Returns the tables of a pipeline: what FP8 costs in quality, and what it gains."""
    return [_quality(plan, found), _accuracy(plan, found), _costs(plan, found)]


def _quality(plan: Plan, found: Figures) -> Table:
    rows = []
    for chain in plan.chains:
        gaps = [
            _percent(found[key]) if (key := f"loss_gap/{chain.name}/{stage}") in found else "0"
            for stage in TRAINING
        ]
        kept = found[f"inference_kept/{chain.name}"]
        rows.append([chain.name, *gaps, _ratio(kept), _ratio(kept["text_of_cpt"])])
    return Table(
        "Loss and export",
        [
            "chain",
            *(f"{stage}: loss above BF16's" for stage in TRAINING),
            "perplexity kept",
            "on the text of cpt",
        ],
        rows,
        "Held-out loss of each training stage in the precision that trained, with the standard"
        " error of paired rows. Perplexity kept: of the exported and reloaded model, over that of"
        " the trained model in BF16, on the held-out conversations of sft_2 and on the text of cpt,"
        " which fine-tuning makes models forget."
        f" {len(plan.seeds)} seed(s) of fine-tuning, {len(plan.pre_training_seeds)} of"
        " pre-training; in brackets, the standard error of the mean over seeds, if there are some.",
    )


def _accuracy(plan: Plan, found: Figures) -> Table:
    rows = []
    for key, each in found.items():
        kind, _, rest = key.partition("/")
        if kind != "accuracy":
            continue
        task, _, name = rest.partition("/")
        behind = ["", ""]
        if "bf16_minus" in each:
            behind = [f"{100 * each['bf16_minus']:+.2f}", f"{100 * each['bf16_minus_upper']:+.2f}"]
        rows.append(
            [
                f"{task}: {name}",
                f"{100 * each['value']:.2f} ± {_error(each, 100, '.2f')}",
                *behind,
                f"{100 * each['exported']:.2f}",
                f"{100 * each['shuffled']:.2f}",
                f"{each['items']:,}",
            ]
        )
    header = [
        "problems: chain",
        "right, %",
        "BF16 minus it, points",
        "upper 95% bound",
        "exported, %",
        "shuffled answers, %",
        "problems",
    ]
    return Table("Accuracy after both stages of fine-tuning", header, rows)


def _costs(plan: Plan, found: Figures) -> Table:
    rows = []
    for key, each in found.items():
        kind, _, name = key.partition("/")
        if kind != "time":
            continue
        memory = found[f"memory/{name}"]
        rows.append(
            [
                name,
                f"{1e3 * each['value']:,.1f}",
                f"{each['ratio']:.3f}",
                f"{each['tokens_per_s']:,.0f}",
                f"{memory['value'] / 2**30:.3f}",
                f"{memory['ratio']:.3f}",
                each["devices"],
            ]
        )
    header = [
        "stage/chain",
        "step, ms",
        "of BF16's",
        "tokens/s",
        "memory, GiB",
        "of BF16's",
        "devices",
    ]
    note = (
        "Median step of the first seed; chains share what they have in common. Memory: what XLA"
        " allocates on a device for the step."
    )
    return Table("Time and memory of training", header, rows, note)


def _percent(gap: dict[str, Any]) -> str:
    text = f"{100 * gap['value']:+.3f}% ± {_error(gap, 100, '.3f')}%"
    seeds = gap["seeds_error"]
    return text if seeds is None else f"{text} ({100 * seeds:.3f}%)"


def _ratio(kept: dict[str, Any]) -> str:
    return f"{kept['value']:.4f} ± {_error(kept, 1, '.4f')}"


def _error(number: dict[str, Any], scale: float, pattern: str) -> str:
    error = number["error"]
    return "?" if error is None else format(scale * error, pattern)


# Texts --------------------------------------------------------------------------------------------


def _markdown(made: Sequence[Table]) -> str:
    parts = []
    for table in made:
        parts.append(f"## {table.name}\n\n{markdown_table(table.header, table.rows)}")
        parts += [f"{table.note}\n"] if table.note else []
    return "\n".join(parts)


def _page(plan: Plan, made: Sequence[Table], runs: dict[str, list[RunFiles]]) -> str:
    drawn = charts.have_matplotlib()
    named = {stage: compare.with_unique_names(each) for stage, each in runs.items()}
    return page_template(Path(__file__).with_name("page.html")).render(
        name=plan.workdir.name,
        tables=made,
        no_figures="" if drawn else charts.NO_MATPLOTLIB,
        sections=[
            (stage, title, charts.loss_charts(named[stage]) if drawn else [])
            for stage, title in _STAGES.items()
        ],
        **signature(),
    )
