"""TODO docstring."""

import copy
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments.markdown import markdown_table
from experiments.study import plots
from experiments.study.loss_curves import require_ungated
from fp8jax.data.corpus import Corpus, build_corpus
from fp8jax.data.loader import to_devices, train_batches
from fp8jax.data.tokenizers import tokenizer
from fp8jax.model.transformer import count_params
from fp8jax.numerics.policy_options import as_policy
from fp8jax.training.build import build
from fp8jax.training.recovery import NonFiniteError
from fp8jax.training.run import Run
from fp8jax.training.step import TrainState
from fp8jax.training.validate import validate

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
    state, finite = run.initialize(), True
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
    require_ungated(config)
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
        + markdown_table(["model", "BF16", "training works", "inference works"], rows)
        + "\nValidation loss above BF16's, %:\n\n"
        + markdown_table(
            ["b", *(f"{use}, {model.split(',')[0]}" for use, model in columns)], curves
        )
    )
    workdir.mkdir(parents=True, exist_ok=True)
    workdir.joinpath("sweep.md").write_text(text, encoding="utf-8")
    plots.bias_sweep(excess, biases, tolerance=100 * tolerance).savefig(workdir / "sweep.png")
    return text
