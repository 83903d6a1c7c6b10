"""Studies of precision: the tables of docs/recipes.md, loss curves, the sweep of a bias.

    fill_page(...)     what each recipe does, its noise, where it runs natively, what it would cost
    loss_curves(...)   one config trained under each policy, and how far its loss lies from BF16's
    sweep_bias(...)    FP8-CSCALE (arXiv 2309.17224): for which constant bias training and
                       inference work, at several widths of a model

The tables hold nothing that depends on the machine: a test makes them anew and compares. The other
two write Markdown and a figure into their workdir.
"""

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from experiments.study import plots
from experiments.study.cost_model import Speeds, relative_cost
from fp8jax.data.loader import Corpus, build_corpus, train_batches
from fp8jax.data.tokenizers import tokenizer
from fp8jax.device import hardware
from fp8jax.device.hardware import DEVICES, Device
from fp8jax.linear.backends import BACKENDS, choose_backend
from fp8jax.linear.dot import KEY_ORDER, dot_general, init_state
from fp8jax.model.config import MODELS
from fp8jax.model.transformer import count_params
from fp8jax.numerics.policy import OPTIONS, POLICIES, Option, Policy, as_policy
from fp8jax.numerics.recipe import RECIPES, Cast, Recipe
from fp8jax.numerics.scaling import ROW, SCALES, TENSOR, Constant
from fp8jax.records.metrics import read_jsonl
from fp8jax.training.loop import NonFiniteError, train_and_evaluate
from fp8jax.training.run import Run, build, to_devices, validate
from fp8jax.training.step import TrainState

# The tables of docs/recipes.md --------------------------------------------------------------------

PAPERS = {  # recipe -> arXiv number of the paper that it follows most closely; the page has titles
    "bf16": "1905.12322", "fp8_delayed": "2209.05433", "fp8_current": "2507.16099",
    "fp8_amax": "2309.17224", "fp8_cscale": "2309.17224", "fp8_rowwise": "2507.16099",
    "fp8_rowwise_wgrad_bf16": "2507.16099", "fp8_block": "2412.19437",
    "fp8_block_ue8m0": "2509.22536", "mxfp8": "2506.08027", "fp4_block": "2502.11458",
    "fp4_naive": "2502.11458", "nvfp4": "2509.25149", "mxfp4": "2509.25149",
}  # fmt: skip


SPEEDS = (Speeds(), Speeds(fp8=1.4, fp4=2.0))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, with a newline at the end."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _codes(cast: Cast | None) -> str:
    if cast is None:
        return "BF16"
    size = {cast.tile: f"{cast.tile.free}x{cast.tile.contract}"} | {TENSOR: "tensor", ROW: "row"}
    marks = [f"H{cast.hadamard}"] * (cast.hadamard > 1) + ["sr"] * (cast.rounding == "stochastic")
    return ", ".join([f"{cast.format.name} {size[cast.tile]}", *marks])


def _scale(cast: Cast) -> str:
    if isinstance(cast.scale, Constant):
        return f"2^{math.log2(cast.scale.value):g}"
    named = (f"`{name}`" for name, rule in SCALES.items() if rule == cast.scale)
    return next(named, repr(cast.scale))


def _amax(cast: Cast) -> str:
    own = {"current": "its own", "constant": "–"}
    return f"{cast.amax} of {cast.history} steps" if cast.delayed else own[cast.timing]


def _cast_row(name: str, recipe: Recipe) -> list[str]:
    casts = [_codes(getattr(recipe, operand)) for operand in KEY_ORDER]
    shared = [", ".join(dict.fromkeys(map(cell, recipe.casts))) or "–" for cell in (_scale, _amax)]
    return [f"`{name}`", *casts, *shared, f"[{PAPERS[name]}](https://arxiv.org/abs/{PAPERS[name]})"]


def sqnr(recipe: Recipe, seed: int = 0) -> dict[str, float]:
    """Signal to quantisation noise of y, dx and dw in dB, on normal data (docs/recipes.md)."""
    rng = np.random.default_rng(seed)
    x, w, g = (
        jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(sigma), dtype)
        for shape, sigma, dtype in (
            ((512, 1024), 1.0, jnp.bfloat16), ((1024, 1024), 0.02, jnp.float32),
            ((512, 1024), 1e-4, jnp.bfloat16),
        )
    )  # fmt: skip
    recipe = recipe.seeding()  # a history of such tensors holds about this amax

    dot = functools.partial(
        dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe=recipe, backend="emulated",
        state=init_state(recipe), key=jax.random.key(seed),
    )  # fmt: skip

    def products(x, w, g):
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(g)

    got = jax.jit(products, compiler_options=hardware.compiler_options())(x, w, g)
    x64, w64, g64 = (np.asarray(operand, np.float64) for operand in (x, w, g))
    exact, norm = (x64 @ w64, g64 @ w64.T, x64.T @ g64), np.linalg.norm
    return {
        name: float(20 * np.log10(norm(e) / norm(np.asarray(y, np.float64) - e)))
        for name, y, e in zip(("y", "dx", "dw"), got, exact, strict=True)
    }


def _noise_row(name: str, recipe: Recipe) -> list[str]:
    # Above 100 dB is the order of float32 sums, which another machine has otherwise.
    return [f"`{name}`", *("> 100" if v > 100 else f"{v:.1f}" for v in sqnr(recipe).values())]


def _native() -> str:
    """Recipes by devices, and what the numbers in the cells stand for."""
    reasons: dict[str | None, int] = {}

    def cell(recipe: Recipe, device: Device) -> str:
        if choose_backend(None, recipe, device).name != "emulated":
            return "yes"
        reason = BACKENDS["xla"].refuses(recipe, device) if device.fp8 else "no FP8 matrix unit"
        return str(reasons.setdefault(reason, len(reasons) + 1))

    rows = [[f"`{r.name}`", *(cell(r, d) for d in DEVICES)] for r in RECIPES.values() if r.casts]
    text = table(["recipe", *(device.kind for device in DEVICES)], rows)
    return "\n".join([text, *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def _recipe_name(recipe: Recipe) -> str:
    """The name of a table's recipe, or of the two that it is put together from."""
    if recipe.name in RECIPES:
        return f"`{recipe.name}`"
    fwd = next(r for r in RECIPES.values() if r.products["fwd"] == recipe.products["fwd"])
    bwd = next(r for r in RECIPES.values() if r.with_forward(fwd) == recipe)
    return f"`{fwd.name}` forward, `{bwd.name}` backward"


def _policy_row(name: str, policy: Policy) -> list[str]:
    rules = "; ".join(f"`{pattern}`: {_recipe_name(recipe)}" for pattern, recipe in policy.rules)
    ends = {"first": policy.bf16_first, "last": policy.bf16_last}
    exempt = [f"{end} {n:.0%}" if n < 1 else f"{end} {n}" for end, n in ends.items() if n]
    costs = [relative_cost(policy, MODELS["llama2_7b"], 4096, speeds) for speeds in SPEEDS]
    # Rounded first: the last bit of a sum differs between Python 3.11 and 3.12.
    printed = (f"{round(100 * cost, 9):.1f}%" for cost in costs)
    return [f"`{name}`", rules, ", ".join(exempt) or "–", *printed]


def _option_row(key: str, option: Option) -> list[str]:
    takes: dict[bool, list[str]] = {True: [], False: []}
    for recipe in RECIPES.values():
        casts = [(operand, getattr(recipe, operand)) for operand in KEY_ORDER]
        taken = any(cast is not None and option.takes(operand, cast) for operand, cast in casts)
        takes[taken].append(f"`{recipe.name}`")
    most = len(takes[True]) > len(takes[False])
    return [f"`{key}`", option.help, ("all but " if most else "") + ", ".join(takes[not most])]


def fill_page(page: str) -> str:
    """The page with its tables made anew, each between <!-- table: NAME --> and <!-- end -->.

    Raises ValueError where one has no place, or a recipe no paper.
    """
    if missing := RECIPES.keys() - PAPERS.keys():
        raise ValueError(f"PAPERS must say where these recipes come from: {sorted(missing)}")
    operands = [operand.replace("_", " ") for operand in KEY_ORDER]
    costs = [f"cost at 1 : {speeds.fp8:g} : {speeds.fp4:g}" for speeds in SPEEDS]
    rows: list[tuple[str, list[str], Callable[..., list[str]], Mapping[str, Any]]] = [
        ("casts", ["recipe", *operands, "scale", "amax", "paper"], _cast_row, RECIPES),
        ("noise", ["recipe", "y", "dx", "dw"], _noise_row, RECIPES),
        ("policies", ["policy", "rules", "BF16 layers", *costs], _policy_row, POLICIES),
        ("options", ["option", "what it says", "taken by"], _option_row, OPTIONS),
    ]
    tables = {
        name: table(header, itertools.starmap(row, entries.items()))
        for name, header, row, entries in rows
    }
    tables["native"] = _native()
    for name, text in tables.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->\n"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no place for a table: {begin.strip()} … {end.strip()}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


# Loss curves --------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """What a run left: training and validation loss by step, and the step that was not finite."""

    loss: dict[int, float]
    valid: dict[int, float]
    failed: int | None


def _read_curve(workdir: Path) -> Curve:
    rows, events = (read_jsonl(workdir / f"{name}.jsonl") for name in ("metrics", "events"))
    loss = {row["step"]: row["loss"] for row in rows}
    valid = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    # Events outlive their run: that of an older one does not come right after these metrics.
    step = max(loss, default=0) + 1
    failed = any((e["kind"], e["step"]) == ("non_finite", step) for e in events[-1:])
    return Curve(loss, valid, step if failed else None)


def train_once(config: ConfigDict, workdir: Path) -> Curve:
    """Trains, or goes on, or reads what a finished run of this config left in `workdir`."""
    path, settings = workdir / "config.json", json.loads(config.to_json())
    if path.exists() and json.loads(path.read_text()) == settings:
        curve = _read_curve(workdir)
        if curve.failed is not None or config.num_steps in curve.valid:
            return curve
    try:
        train_and_evaluate(config, str(workdir))
    except NonFiniteError as error:
        logging.warning("%s: %s", workdir, error)
    curve = _read_curve(workdir)
    if curve.failed is None and config.num_steps not in curve.valid:
        raise InterruptedError(f"{workdir}: stopped early; the same command goes on from there")
    return curve


def _smooth(loss: Mapping[int, float], window: int) -> dict[int, float]:
    """step -> mean over the last `window` steps."""
    windows = ((last, range(last - window + 1, last + 1)) for last in loss if last >= window)
    return {last: fmean(loss[step] for step in steps) for last, steps in windows}


def _excess(losses: Sequence[Mapping], baselines: Sequence[Mapping]) -> dict[int, list[float]]:
    """step -> how far each seed's loss lies above its baseline's, in per cent."""
    pairs = list(zip(losses, baselines, strict=True))
    steps = set.intersection(*(set(a) & set(b) for a, b in pairs))
    return {step: [100 * (a[step] / b[step] - 1) for a, b in pairs] for step in sorted(steps)}


def _panel(name: str, curves: Sequence[Curve], bases: Sequence[Curve], window: int) -> plots.Panel:
    bits = [cast.format.bits for _, recipe in as_policy(name).rules for cast in recipe.casts]
    training = _excess(*([_smooth(c.loss, window) for c in side] for side in (curves, bases)))
    valid = _excess(*([c.valid for c in side] for side in (curves, bases)))
    failed = [curve.failed for curve in curves if curve.failed is not None]
    return plots.Panel(
        name, f"FP{min(bits)}" if bits else "BF16", list(training),
        list(map(fmean, training.values())), list(valid), list(map(fmean, valid.values())),
        f"non-finite at step {min(failed)}" if failed else "",
    )  # fmt: skip


def _require_ungated(config: ConfigDict) -> None:
    """Raises ValueError where linears of a compared policy would be left in BF16 by their size."""
    if config.size_gate:
        raise ValueError(
            "size_gate=True: a study compares precisions, and what the gate leaves in BF16 would be"
            " compared with itself; leave it False"
        )


def loss_curves(
    config: ConfigDict, workdir: Path, precisions: Sequence[str], seeds: Sequence[int]
) -> str:
    """Trains `config` in BF16 and each precision into WORKDIR/NAME (NAME-seedN for other seeds than
    the config's), writes curves.md and curves.png, and returns the text.

    What is finished is not trained again. A run that was not finite is reported, and is no error.
    """
    plots.require_matplotlib()
    _require_ungated(config)
    names = [as_policy(name).name for name in dict.fromkeys(["bf16", *precisions])]
    if len(names) == 1:
        raise ValueError("no precision to compare with bf16")
    runs: dict[str, list[Curve]] = {}
    for name, seed in itertools.product(names, seeds):
        one = copy.deepcopy(config)
        one.precision, one.seed = name, seed
        folder = name if seed == config.seed else f"{name}-seed{seed}"
        logging.info("study: %s", folder)
        runs.setdefault(name, []).append(train_once(one, workdir / folder))
    bases, window = runs["bf16"], max(1, config.num_steps // 10)
    steps = sorted(bases[0].valid)
    rows, panels = [], []
    for name, curves in runs.items():
        panels.append(_panel(name, curves, bases, window))
        valid = _excess([c.valid for c in curves], [c.valid for c in bases])
        end = panels[-1].note
        if config.num_steps in valid:
            last = valid[config.num_steps]
            spread = f" ({min(last):+.2f} to {max(last):+.2f})" if len(last) > 1 else ""
            end = f"{fmean(last):+.2f}%{spread}"
        means = [f"{fmean(c.valid[s] for c in curves):.4f}" if s in valid else "–" for s in steps]
        rows.append([f"`{name}`", *means, end])
    text = f"Validation loss in nats a token, mean of the seeds {', '.join(map(str, seeds))}.\n\n"
    text += table(["precision", *(f"step {step}" for step in steps), "against BF16"], rows)
    workdir.joinpath("curves.md").write_text(text, encoding="utf-8")
    title = f"Loss above BF16's. Line: training, window of {window}; dots, number: validation"
    figure = plots.loss_differences(panels[1:], baseline="BF16", title=title)
    figure.savefig(workdir / "curves.png")
    return text


# The sweep of a constant bias ---------------------------------------------------------------------


def _with_width(config: ConfigDict, width: int) -> ConfigDict:
    """The config with another d_model: as many heads, MLPs in proportion."""
    shape, sized = build(config).model.config, copy.deepcopy(config)
    if width < 1 or width % shape.n_heads:
        raise ValueError(f"{width=} must be a multiple of n_heads={shape.n_heads}")
    head_dim, d_ff = width // shape.n_heads, width * shape.d_ff // shape.d_model
    sized.model_overrides.update(d_model=width, head_dim=head_dim, d_ff=d_ff)
    return sized


def _train(run: Run, config: ConfigDict, corpus: Corpus) -> TrainState | None:
    """The state after all steps, kept in memory; None where a loss was not finite."""
    state, finite = run.initialise(), True
    batches = train_batches(corpus.train, seed=config.seed, batch_size=config.batch_size)
    for _ in range(config.num_steps):
        state, out = run.step(state, to_devices(next(batches), run.batch_sharding))
        finite = finite and math.isfinite(float(out["loss"]))
    batches.close()
    return state if finite else None


def _sweep_model(config: ConfigDict, biases: Sequence[int]) -> tuple[str, dict[str, list[float]]]:
    """One model: its name, and use -> validation losses in BF16 and then with each bias."""
    one, state = copy.deepcopy(config), None
    precision = config.precision + ("," if ":" in config.precision else ":")
    names = ["bf16", *(as_policy(f"{precision}bias={bias}").name for bias in biases)]
    losses: dict[str, list[float]] = {"training": [], "inference": []}
    corpus = build_corpus(
        one.data, tokenizer(one.tokenizer), seq_len=one.seq_len, cache_dir=one.cache_dir,
        valid_fraction=one.valid_fraction,
    )  # fmt: skip
    for precision in names:
        one.precision = precision
        run = build(one)
        if run.seeds or run.later:
            raise ValueError(f"a sweep has no histories and no schedule: {run.policies}")
        with jax.set_mesh(run.mesh):
            trained = _train(run, one, corpus)
            state = trained if precision == "bf16" else state
            for use, weights in (("training", trained), ("inference", state)):
                valid = (
                    validate(run, weights, corpus, one)[0]["valid_loss"] if weights else math.inf
                )
                losses[use].append(valid if math.isfinite(valid) else math.inf)
        if not math.isfinite(losses["training"][0]):
            raise NonFiniteError(f"d_model={run.model.config.d_model}: not finite in BF16 either")
        said = {use: round(values[-1], 4) for use, values in losses.items()}
        logging.info("study: d_model %d, %s: %s", run.model.config.d_model, precision, said)
    size = count_params(run.model.config)
    return f"width {run.model.config.d_model}, {size:,} parameters", losses


def intervals(biases: Sequence[int], works: Sequence[bool]) -> str:
    """Which biases work, such as "4 to 7"; says so where the sweep ends inside an interval."""
    parts, ends = [], {biases[0], biases[-1]}
    for ok, group in itertools.groupby(zip(biases, works, strict=True), key=lambda pair: pair[1]):
        first, *_, last = [bias for bias, _ in group] * 2
        if ok:
            text = f"{first} to {last}" if last > first else str(first)
            parts.append(text + " (the sweep ends there)" * bool(ends & {first, last}))
    return ", ".join(parts) or "none: the interval is empty"


def sweep_bias(
    config: ConfigDict,
    workdir: Path,
    widths: Sequence[int],
    biases: Sequence[int],
    tolerance: float,
) -> str:
    """Trains the model at each width in BF16 and with each bias, evaluates the BF16 weights with
    each bias too, writes sweep.md and sweep.png into WORKDIR and returns the text.

    A bias works where the validation loss is at most (1 + tolerance) times BF16's.
    """
    plots.require_matplotlib()
    _require_ungated(config)
    excess: dict[str, dict[str, list[float]]] = {"training": {}, "inference": {}}
    works = {use: [True] * len(biases) for use in excess}
    if not (biases and widths and tolerance > 0):
        raise ValueError(f"nothing to sweep, or {tolerance=} is not positive: {widths=}, {biases=}")
    rows = []
    for sized in [_with_width(config, width) for width in widths]:
        model, losses = _sweep_model(sized, biases)
        base = losses["training"][0]
        for use, values in losses.items():
            excess[use][model] = [100 * (value / base - 1) for value in values[1:]]
        good = {use: [e <= 100 * tolerance for e in by[model]] for use, by in excess.items()}
        works = {use: [a and b for a, b in zip(works[use], good[use], strict=True)] for use in good}
        rows.append([model, f"{base:.4f}", *(intervals(biases, good[use]) for use in good)])
    rows.append(["all of them", "", *(intervals(biases, works[use]) for use in works)])
    columns = [(use, model) for use, by in excess.items() for model in by]
    points = zip(*(excess[use][model] for use, model in columns), strict=True)
    curves = [[str(b), *(f"{y:+.2f}" for y in ys)] for b, ys in zip(biases, points, strict=True)]
    text = (
        f"`{config.precision}` with one scale 2^-b for all: {config.num_steps} steps of "
        f"{config.batch_size * config.seq_len} tokens. A bias b works where the validation loss is "
        f"at most {tolerance:.2%} above BF16's.\n\n"
        + table(["model", "BF16", "training works", "inference works"], rows)
        + "\nValidation loss above BF16's, %:\n\n"
        + table(["b", *(f"{use}, {model.split(',')[0]}" for use, model in columns)], curves)
    )
    workdir.mkdir(parents=True, exist_ok=True)
    workdir.joinpath("sweep.md").write_text(text, encoding="utf-8")
    plots.bias_sweep(excess, biases, tolerance=100 * tolerance).savefig(workdir / "sweep.png")
    return text
