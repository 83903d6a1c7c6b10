"""Studies of precision:

    python -m experiments.study recipes --output=docs/recipes.md
    python -m experiments.study curves --config=configs/smoke.py --workdir=runs/curves
    python -m experiments.study sweep --config=configs/cscale_sweep.py --workdir=runs/cscale
    python -m experiments.study inference --workdir=runs/lm_125m
    python -m experiments.study ties
    python -m experiments.study kv_cache --workdir=runs/smoke --precisions=bf16,fp8_rowwise
    python -m experiments.study intervals --numbers=docs/infir2.json --run=three_pretrained
    python -m experiments.study corpus --output=runs/corpus --manifest=docs/parity_corpus.json
    python -m experiments.study parity --plan=screen --ledger=docs/parity_ledger.jsonl \\
        --workdir=runs/parity --corpus=runs/corpus --commit=HASH --budget=570 --machine=1500
    python -m experiments.study parity_table --ledger=docs/parity_ledger.jsonl \\
        --manifest=docs/parity_corpus.json --output=docs/parity.json
    python -m experiments.study parity_figure --numbers=docs/parity.json \\
        --output=docs/figures/parity.png
    python -m experiments.study proving --plan=recipes --ledger=docs/proving_ledger.jsonl \\
        --workdir=runs/proving --commit=HASH --budget=570 --runs_per_gpu=6
    python -m experiments.study proving_table --ledger=docs/proving_ledger.jsonl \\
        --output=docs/results/recipes_loss.md
    python -m experiments.study proving_figure --ledger=docs/late_ledger.jsonl \\
        --output=docs/figures/late.png
    python -m experiments.study proving_curves --ledger=docs/growth_ledger.jsonl \\
        --output=docs/figures/late_growth.png
    python -m experiments.study parity_curves --plan=branches --ledger=docs/branches_ledger.jsonl \\
        --manifest=docs/parity_corpus.json --output=docs/figures/branches.png
    python -m experiments.study parity_casts --ledger=docs/branches_75m_ledger.jsonl \\
        --manifest=docs/parity_corpus.json --output=docs/figures/branches_casts.png
    python -m experiments.study parity_endings --plan=branches_recipes \\
        --ledger=docs/branches_75m_ledger.jsonl --manifest=docs/parity_corpus.json \\
        --output=docs/figures/branches_recipes.png

`python -m experiments.study NAME --help` says what one does and has its flags.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from experiments import subcommands
from experiments.config_keys import RUN_KEYS
from experiments.study import (
    attention_ties,
    bias_sweep,
    cast_effects,
    corpus,
    corpus_files,
    endings,
    growth,
    inference,
    intervals,
    kv_cache,
    loss_curves,
    parity_analysis,
    parity_facts,
    parity_ledger,
    parity_parts,
    parity_plan,
    parity_runner,
    plots,
    proving_analysis,
    proving_plan,
    recipe_page,
)
from experiments.study.parity_plan import Chain, Plan
from fp8jax.device import xla
from fp8jax.lm.cli import command
from fp8jax.lm.records.checkpoint import DamagedError
from fp8jax.lm.training.recovery import StoppedError
from fp8jax.lookup import lookup, unknown
from fp8jax.numerics.policy import POLICIES

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.", lock_config=True)

_WORKDIR = flags.DEFINE_string("workdir", "", "Folder of the runs, tables and figures.")

_OUTPUT = flags.DEFINE_string(
    "output",
    "",
    "The page whose tables `recipes` or `proving_table` rewrites; the figure that `intervals`"
    ", `parity_figure`, `parity_curves`, `parity_casts`, `parity_endings`, `proving_figure` or"
    " `proving_curves` draws; the folder of `corpus`; the JSON of `parity_table`.",
)

_PRECISIONS = flags.DEFINE_string("precisions", ",".join(POLICIES), "Policies, besides bf16.")

_SEEDS = flags.DEFINE_list(
    "seeds",
    None,
    "Of `curves`, by default the config's own; of `parity` and `proving`, by default the plan's.",
)

_WIDTHS = flags.DEFINE_list("widths", ["48", "128"], "Values of d_model that `sweep` tries.")

_BIASES = flags.DEFINE_string("biases", "-6:10", "First and last bias that `sweep` tries.")

_TOLERANCE = flags.DEFINE_float(
    "tolerance",
    0.01,
    "A bias works if its loss is at most this fraction above BF16's; its perplexity in `inference`,"
    " by default 0.005.",
)

_NUMBERS = flags.DEFINE_string(
    "numbers",
    "",
    "A pipeline's figures.json, for `intervals`; the JSON of `parity_table`, for `parity_figure`.",
)

_RUN = flags.DEFINE_string("run", "", "What stands in front of the names of --numbers.")

_ROWS = flags.DEFINE_integer(
    "rows", 64, "Validation rows: of each source, for `inference`; of the first, for `kv_cache`.", 1
)

_BATCH = flags.DEFINE_integer("batch_size", 8, "Rows that `inference` scores at once.", 1)

_PLAN = flags.DEFINE_string(
    "plan",
    "",
    f"What `parity` runs: {', '.join(parity_plan.PLANS)}; of `parity_table`, whose runs it judges.",
)

_ARMS = flags.DEFINE_string(
    "arms", "", "Arms of the plan that `parity` and `proving` run; by default all."
)

_RUNS_PER_GPU = flags.DEFINE_integer(
    "runs_per_gpu", 1, "That `parity` and `proving` train at a time: more fill a GPU better.", 1
)

_LEDGER = flags.DEFINE_string("ledger", "", "The file with a line for each fork that is done.")

_CORPUS = flags.DEFINE_string("corpus", "", "The folder that `corpus` has written.")

_MANIFEST = flags.DEFINE_string("manifest", "", "The committed manifest of the corpus.")

_SETTING = flags.DEFINE_string(
    "setting",
    "",
    "The digest of the setting whose lines a table judges; by default that of the config as it is.",
)

_COMMIT = flags.DEFINE_string("commit", "", "The commit of the code, for the ledger.")

_BUDGET = flags.DEFINE_float("budget", 0.0, "Seconds after which `parity` must have ended.")

_MACHINE = flags.DEFINE_float(
    "machine", 0.0, "Seconds after which the machine goes away; by default the budget."
)


def _recipes() -> None:
    logging.set_verbosity(logging.WARNING)  # hides the chosen backends: the page shows them
    page = Path(_OUTPUT.value)
    page.write_text(recipe_page.fill_page(page.read_text(encoding="utf-8")), encoding="utf-8")


def _curves() -> None:
    xla.set_compilation_cache()
    seeds = _parse_integers("seeds", _SEEDS.value or [_CONFIG.value.seed])
    precisions = command.split_specs(_PRECISIONS.value)
    print(loss_curves.loss_curves(_CONFIG.value, Path(_WORKDIR.value), precisions, seeds))


def _kv_cache() -> None:
    xla.set_compilation_cache()
    precisions = command.split_specs(_PRECISIONS.value)
    print(kv_cache.kv_cache_tables(Path(_WORKDIR.value), precisions, _ROWS.value))


def _sweep() -> None:
    xla.set_compilation_cache()
    biases, widths = _parse_biases(), _parse_integers("widths", _WIDTHS.value)
    workdir = Path(_WORKDIR.value)
    print(bias_sweep.sweep_bias(_CONFIG.value, workdir, widths, biases, _TOLERANCE.value))


def _inference() -> None:
    xla.set_compilation_cache()
    precisions = inference.PRECISIONS
    if _PRECISIONS.present:
        precisions = tuple(command.split_specs(_PRECISIONS.value))
    text = inference.inference_tables(
        _WORKDIR.value,
        precisions,
        _parse_biases(),
        rows=_ROWS.value,
        batch_size=_BATCH.value,
        tolerance=_TOLERANCE.value if _TOLERANCE.present else 0.005,
    )
    (Path(_WORKDIR.value) / "inference.md").write_text(text, encoding="utf-8")
    print(text)


def _parse_biases() -> range:
    ends = _parse_integers("biases", _BIASES.value.split(":"))
    if len(ends) != 2:
        raise ValueError(f"--biases={_BIASES.value}: expected FIRST:LAST")
    return range(ends[0], ends[1] + 1)


def _intervals() -> None:
    numbers = intervals.read_numbers(Path(_NUMBERS.value))
    differences = intervals.seed_differences(numbers, _RUN.value)
    print(intervals.interval_table(differences))
    if _OUTPUT.value:
        losses = {
            name.removeprefix("loss_gap/"): values
            for name, values in differences.items()
            if name.startswith("loss_gap/")
        }
        plots.seed_intervals(losses).savefig(_OUTPUT.value, dpi=200)


def _ties() -> None:
    print(attention_ties.ties_table())


def _corpus() -> None:
    output = Path(_OUTPUT.value)
    differences = corpus.make_corpus(
        corpus_files.machine_roots(), output, Path(_MANIFEST.value), corpus.VOCAB_SIZE
    )
    if differences:
        more = f"; and {len(differences) - 20} more" if len(differences) > 20 else ""
        raise ValueError(
            f"this machine has other text than {_MANIFEST.value}: "
            f"{'; '.join(differences[:20])}{more}"
        )
    print(corpus.tokenize(output))


def _gpus() -> list[parity_runner.Gpu]:
    """Returns each GPU as often as it is to train at a time; first each of them once."""
    return parity_runner.find_gpus() * _RUNS_PER_GPU.value


def _chains(plan: Plan) -> list[Chain]:
    """Returns the chains of a plan, of the arms and seeds of --arms and --seeds where given."""
    arms = command.split_specs(_ARMS.value) if _ARMS.present else None
    seeds = None if _SEEDS.value is None else _parse_integers("seeds", _SEEDS.value)
    return plan.chains(arms, seeds)


def _parity() -> None:
    text, ledger = Path(_CORPUS.value), Path(_LEDGER.value)
    plan = lookup("plan", _PLAN.value, parity_plan.PLANS)
    given = parity_runner.Run(
        chains=_chains(plan),
        parts=lambda chain, fork, folder: parity_parts.parts(chain, fork, folder, text),
        gpus=_gpus(),
        workdir=Path(_WORKDIR.value),
        ledger=ledger,
        budget=_BUDGET.value,
        machine=_MACHINE.value or _BUDGET.value,
        facts=parity_facts.facts(
            plan.setting(), corpus.digest_of(text / corpus.MANIFEST), _COMMIT.value
        ),
    )
    try:
        parity_runner.run(given)
    finally:
        print(parity_ledger.summary(parity_ledger.read(ledger)))


def _proving() -> None:
    ledger = Path(_LEDGER.value)
    given = parity_runner.Run(
        chains=_chains(lookup("plan", _PLAN.value, proving_plan.PLANS)),
        parts=proving_plan.parts,
        gpus=_gpus(),
        workdir=Path(_WORKDIR.value),
        ledger=ledger,
        budget=_BUDGET.value,
        machine=_MACHINE.value or _BUDGET.value,
        facts=parity_facts.facts(proving_plan.setting(), proving_plan.text_digest(), _COMMIT.value),
    )
    try:
        parity_runner.run(given)
    finally:
        print(parity_ledger.summary(parity_ledger.read(ledger)))


def _lines() -> list[parity_ledger.Line]:
    """Returns the lines of --ledger, of which there must be some."""
    if not (lines := parity_ledger.read(Path(_LEDGER.value))):
        there = "has no lines" if Path(_LEDGER.value).exists() else "does not exist"
        raise ValueError(f"the ledger {_LEDGER.value} {there}")
    return lines


def _save(figure: Any) -> None:
    path = Path(_OUTPUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    print(f"{path} is written")


def _proving_table() -> None:
    setting, page = _SETTING.value or proving_plan.setting(), Path(_OUTPUT.value)
    lines = proving_analysis.lines_of(_lines(), setting)
    text = proving_analysis.fill_page(page.read_text(encoding="utf-8"), lines)
    page.write_text(text, encoding="utf-8")
    print(f"{page} has the tables of {_LEDGER.value}")
    if failures := proving_analysis.control_failures(lines):
        raise ValueError("; ".join(failures))


def _proving_figure() -> None:
    setting = _SETTING.value or proving_plan.setting()
    lines = proving_analysis.lines_of(_lines(), setting)
    gaps = proving_analysis.late_gaps(lines)
    _save(plots.seed_intervals(gaps))


def _proving_curves() -> None:
    setting = _SETTING.value or proving_plan.setting()
    lines = proving_analysis.lines_of(_lines(), setting)
    _save(plots.gap_curves(growth.by_steps(lines), over="last steps that are in the policy"))


def _parity_lines(plan: Plan) -> list[parity_ledger.Line]:
    """Returns the lines of --ledger that are of --manifest and of --setting, or the plan's."""
    lines = _lines()
    data = corpus.digest_of(Path(_MANIFEST.value))
    setting = _SETTING.value or plan.setting()
    if setting not in (settings := dict.fromkeys(line.setting for line in lines)):
        raise unknown("setting", setting, settings)
    return parity_ledger.comparable(lines, setting, data)


def _verdicts() -> list[parity_analysis.Verdict]:
    plan = lookup("plan", _PLAN.value or "headline", parity_plan.PLANS)
    lines = _parity_lines(plan)
    if _PLAN.present:
        names = {arm.name for arm in plan.arms}
        lines = [line for line in lines if line.arm in names]
    return parity_analysis.verdicts(lines)


def _parity_curves() -> None:
    curves = growth.by_tokens(_verdicts())
    endings = {fork.tokens: f"{fork.steps} steps" for fork in parity_plan.ALL_FORKS}
    _save(plots.gap_curves(curves, over="tokens; steps of the decay", notes=endings))


def _parity_casts() -> None:
    lines = _parity_lines(parity_plan.PLANS["branches_casts"])
    print(cast_effects.table(lines))
    if _OUTPUT.value:
        _save(plots.seed_intervals(cast_effects.by_cast(lines)))


def _parity_endings() -> None:
    gaps, left_out = endings.by_recipe(_verdicts())
    print(f"not drawn: {', '.join(left_out) or 'none'}")
    _save(plots.seed_intervals(gaps))


def _parity_table() -> None:
    found = _verdicts()
    print(parity_analysis.table(found))
    if _OUTPUT.value:
        parity_analysis.write_json(Path(_OUTPUT.value), found)
    if failures := parity_analysis.control_failures(found):
        raise ValueError("; ".join(failures))


def _parity_figure() -> None:
    numbers = intervals.read_numbers(Path(_NUMBERS.value))
    arms = [name.removeprefix("gap/") for name in numbers if name.startswith("gap/")]
    # Controls are so far off that nothing else would be seen beside them.
    gaps = {
        arm: numbers[f"gap/{arm}"]["seeds"] for arm in arms if not parity_plan.ARMS[arm].control
    }
    _save(plots.seed_intervals(gaps))


def _parse_integers(flag: str, texts: Sequence[str]) -> list[int]:
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise ValueError(f"--{flag}: expected integers, got {list(texts)}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Study(subcommands.Command):
    """A command and what it runs."""

    run: Callable[[], None]


_COMMANDS = (
    _Study(
        name="recipes",
        about=(
            "Rewrites the tables of a page, which do not depend on the machine: a test rewrites "
            "them and compares."
        ),
        run=_recipes,
        needs=["output"],
    ),
    _Study(
        name="curves",
        about=(
            "Trains a config in each precision and compares the losses with those in BF16; "
            "writes Markdown and a figure into --workdir, and does not repeat finished runs."
        ),
        run=_curves,
        needs=["config", "workdir"],
        takes=["precisions", "seeds"],
    ),
    _Study(
        name="sweep",
        about=(
            "Searches for constant biases of fp8_cscale that work in training and in inference, "
            "at several widths of a model; writes Markdown and a figure into --workdir."
        ),
        run=_sweep,
        needs=["config", "workdir"],
        takes=["widths", "biases", "tolerance"],
    ),
    _Study(
        name="inference",
        about=(
            "Scores the held-out text of a run with weights that are quantized once, in each "
            "precision, with constant scales, and with scales that look at later tokens; writes "
            "inference.md into --workdir."
        ),
        run=_inference,
        needs=["workdir"],
        takes=["precisions", "biases", "tolerance", "rows", "batch_size"],
    ),
    _Study(
        name="intervals",
        about=(
            "Prints the mean over a pipeline's seeds of each difference to BF16, with its "
            "t-interval; --output draws those of the losses."
        ),
        run=_intervals,
        needs=["numbers"],
        takes=["run", "output"],
    ),
    _Study(
        name="ties",
        about=(
            "Prints how often rows of attention share their largest score, and the bias of each "
            "arithmetic of attention."
        ),
        run=_ties,
    ),
    _Study(
        name="corpus",
        about=(
            "Makes the shards of docs/parity.md from the Python and CUDA folders of this "
            "machine, and says where its text differs from the manifest's; without a manifest "
            "it writes one."
        ),
        run=_corpus,
        needs=["output", "manifest"],
    ),
    _Study(
        name="parity",
        about=(
            "Runs a plan of docs/parity.md, or some of its --arms and --seeds, on the GPUs "
            "there are, and appends each fork that is done to the ledger. The same command goes "
            "on where it ended."
        ),
        run=_parity,
        takes=["machine", "arms", "seeds", "runs_per_gpu"],
        needs=["plan", "ledger", "workdir", "corpus", "commit", "budget"],
    ),
    _Study(
        name="parity_table",
        about=(
            "Prints the verdicts of a ledger's runs, and writes them as JSON; fails if a "
            "control is not found to be worse."
        ),
        run=_parity_table,
        needs=["ledger", "manifest"],
        takes=["output", "plan", "setting"],
    ),
    _Study(
        name="parity_figure",
        about="Draws the gaps of each seed with their intervals, without the controls.",
        run=_parity_figure,
        needs=["numbers", "output"],
    ),
    _Study(
        name="parity_curves",
        about="Draws what the arms cost over the tokens of their forks.",
        run=_parity_curves,
        needs=["ledger", "manifest", "output"],
        takes=["plan", "setting"],
    ),
    _Study(
        name="parity_casts",
        about=(
            "Prints what each cast of a recipe costs (--plan=branches_casts), alone and beside "
            "the others; --output draws it."
        ),
        run=_parity_casts,
        needs=["ledger", "manifest"],
        takes=["output", "setting"],
    ),
    _Study(
        name="parity_endings",
        about=(
            "Draws what each arm costs that decays from the trunk of BF16, the least first "
            "(--plan=branches_recipes)."
        ),
        run=_parity_endings,
        needs=["plan", "ledger", "manifest", "output"],
        takes=["setting"],
    ),
    _Study(
        name="proving",
        about=(
            "Trains a plan of docs/results/recipes_loss.md on the proving ground, as `parity` does."
        ),
        run=_proving,
        takes=["machine", "arms", "seeds", "runs_per_gpu"],
        needs=["plan", "ledger", "workdir", "commit", "budget"],
    ),
    _Study(
        name="proving_table",
        about="Writes what the arms of a ledger lost into the tables of a page.",
        run=_proving_table,
        needs=["ledger", "output"],
        takes=["setting"],
    ),
    _Study(
        name="proving_figure",
        about="Draws what each policy costs in the last fifth of a BF16 run (--plan=late).",
        run=_proving_figure,
        needs=["ledger", "output"],
        takes=["setting"],
    ),
    _Study(
        name="proving_curves",
        about=(
            "Draws what policies cost in shorter and longer parts of a BF16 run "
            "(--plan=late_growth)."
        ),
        run=_proving_curves,
        needs=["ledger", "output"],
        takes=["setting"],
    ),
    _Study(
        name="kv_cache",
        about=(
            "Compares perplexities of a trained model with a cache in BF16 and in FP8, and "
            "requests in a batch with requests alone."
        ),
        run=_kv_cache,
        needs=["workdir"],
        takes=["precisions", "rows"],
    ),
)


def main(arguments: Sequence[str]) -> None:
    study = subcommands.choose(_COMMANDS, arguments)
    subcommands.check_flags(study, _COMMANDS)
    study.run()


if __name__ == "__main__":
    subcommands.show_help(_COMMANDS, "python -m experiments.study")
    command.run(
        main,
        errors=(*command.ERRORS, StoppedError, DamagedError, ImportError),
        verbosity=logging.INFO,
        config=RUN_KEYS,
        quiet=("jax", "matplotlib"),  # matplotlib logs when it builds its font cache
    )
