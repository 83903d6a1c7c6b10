"""The sweep of FP8-CSCALE's constant bias (arXiv 2309.17224).

FP8-CSCALE scales all tensors by one constant 2^-b. The sweep searches for the biases b with which
training and inference work, at several widths of a model. "Inference" evaluates the weights that
were trained in BF16. The results are written as Markdown tables and a figure.
"""

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments.markdown import markdown_table
from experiments.study import plots
from fp8jax.lm.corpus import Corpus
from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.figures.style import require_matplotlib
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.training.build import build
from fp8jax.lm.training.epochs import read_corpus, tokenizer_of_run
from fp8jax.lm.training.recovery import NonFiniteError
from fp8jax.lm.training.run import Run
from fp8jax.lm.training.settings import Settings
from fp8jax.lm.training.step import TrainState
from fp8jax.lm.training.validate import validate
from fp8jax.numerics.names import as_policy


def sweep_bias(
    config: ConfigDict,
    workdir: Path,
    widths: Sequence[int],
    biases: Sequence[int],
    tolerance: float,
) -> str:
    """Trains and evaluates the model at each width and bias, and says which biases work.

    A bias works if the validation loss is at most (1 + tolerance) times that in BF16. Writes
    sweep.md and sweep.png into `workdir`.

    Args:
      config: its precision must have a recipe with a constant scale, such as fp8_cscale.
      workdir: created if missing.
      widths: values of d_model.
      biases: exponents b of the scale 2^-b, ascending.
      tolerance: relative, such as 0.01.

    Returns:
      The text of sweep.md.

    Raises:
      ValueError: nothing to sweep, a width that the heads do not divide, a precision without a
        constant scale or with histories, or a schedule.
      NonFiniteError: a loss was not finite in BF16.
    """
    require_matplotlib()
    if not (biases and widths and tolerance > 0):
        raise ValueError(f"nothing to sweep, or {tolerance=} is not positive: {widths=}, {biases=}")
    if config.num_epochs is not None:
        raise ValueError(f"a sweep trains num_steps: {config.num_epochs=} must be None")
    excess: dict[str, dict[str, list[float]]] = {"training": {}, "inference": {}}
    works = {use: [True] * len(biases) for use in excess}  # at all widths
    rows = []
    for sized in [_with_width(config, width) for width in widths]:
        model, losses = _sweep_model(sized, biases)
        base = losses["training"][0]
        row = [model, f"{base:.4f}"]
        for use, values in losses.items():
            excess[use][model] = [100 * (value / base - 1) for value in values[1:]]
            good = [e <= 100 * tolerance for e in excess[use][model]]
            works[use] = [a and b for a, b in zip(works[use], good, strict=True)]
            row.append(intervals(biases, good))
        rows.append(row)
    rows.append(["all of them", "", *(intervals(biases, works[use]) for use in works)])
    text = (
        f"`{config.precision}` with one scale 2^-b for all: {config.num_steps} steps of "
        f"{config.batch_size * config.seq_len} tokens. A bias b works where the validation loss is "
        f"at most {tolerance:.2%} above BF16's.\n\n"
        + markdown_table(["model", "BF16", "training works", "inference works"], rows)
        + "\nValidation loss above BF16's, %:\n\n"
        + _excess_table(excess, biases)
    )
    workdir.mkdir(parents=True, exist_ok=True)
    workdir.joinpath("sweep.md").write_text(text, encoding="utf-8")
    plots.bias_sweep(excess, biases, tolerance=100 * tolerance).savefig(workdir / "sweep.png")
    return text


def _excess_table(
    excess: Mapping[str, Mapping[str, Sequence[float]]], biases: Sequence[int]
) -> str:
    """Returns the Markdown table of losses above BF16's: a row a bias, a column a use and model."""
    columns = [(use, model) for use, by_model in excess.items() for model in by_model]
    rows = []
    for index, bias in enumerate(biases):
        rows.append([str(bias), *(f"{excess[use][model][index]:+.2f}" for use, model in columns)])
    return markdown_table(["b", *(f"{use}, {model.split(',')[0]}" for use, model in columns)], rows)


def intervals(biases: Sequence[int], works: Sequence[bool]) -> str:
    """Returns the biases that work as text, such as "4 to 7, 9".

    An interval that contains the first or last bias of the sweep is marked: it may be larger.
    """
    parts, ends = [], {biases[0], biases[-1]}
    for ok, group in itertools.groupby(zip(biases, works, strict=True), key=lambda pair: pair[1]):
        if not ok:
            continue
        members = [bias for bias, _ in group]
        first, last = members[0], members[-1]
        text = f"{first} to {last}" if last > first else str(first)
        parts.append(f"{text} (the sweep ends there)" if ends & {first, last} else text)
    return ", ".join(parts) or "none: the interval is empty"


def _with_width(config: ConfigDict, width: int) -> ConfigDict:
    """Returns the config with another d_model: the same heads, and d_ff in proportion."""
    shape, sized = build(config).stages[0].model.config, copy.deepcopy(config)
    if width < 1 or width % shape.n_heads:
        raise ValueError(f"{width=} must be a multiple of n_heads={shape.n_heads}")
    head_dim, d_ff = width // shape.n_heads, width * shape.d_ff // shape.d_model
    sized.model_overrides.update(d_model=width, head_dim=head_dim, d_ff=d_ff)
    return sized


def _train(run: Run, config: ConfigDict, corpus: Corpus) -> TrainState | None:
    """Returns the state after all steps, or None if a loss was not finite. Saves no checkpoint."""
    programs = run.stages[0].programs
    state, finite = programs.initialize(), True
    batches = train_batches(corpus.train, seed=config.seed, batch_size=config.batch_size)
    for _ in range(config.num_steps):
        batch = to_devices(next(batches), run.batch_sharding)
        state, out = programs.step(state, batch, programs.numbers(state))
        finite = finite and math.isfinite(float(out["loss"]))
    batches.close()
    return state if finite else None


def _sweep_model(config: ConfigDict, biases: Sequence[int]) -> tuple[str, dict[str, list[float]]]:
    """Trains and evaluates one model in BF16 and with each bias.

    Returns:
      The model's name, and use ("training" or "inference") -> validation losses, first in BF16 and
      then with each bias. A loss that is not finite is infinity.
    """
    one, bf16_state = copy.deepcopy(config), None
    prefix = config.precision + ("," if ":" in config.precision else ":")
    names = ["bf16", *(as_policy(f"{prefix}bias={bias}").name for bias in biases)]
    losses: dict[str, list[float]] = {"training": [], "inference": []}
    settings = Settings.from_config(one, warmup_steps=0)  # which the data does not depend on
    corpus = read_corpus(settings, tokenizer_of_run(one))
    for precision in names:
        one.precision = precision
        run = build(one)
        stage, *later = run.stages
        if stage.seeds or later:
            raise ValueError(
                f"a sweep needs a precision without histories and no schedule: {run.policies}"
            )
        with jax.set_mesh(run.mesh):
            trained = _train(run, one, corpus)
            bf16_state = trained if precision == "bf16" else bf16_state
            for use, weights in (("training", trained), ("inference", bf16_state)):
                valid = math.inf
                if weights is not None:
                    valid = validate(run, stage, weights, corpus)[0]["valid_loss"]
                losses[use].append(valid if math.isfinite(valid) else math.inf)
        if not math.isfinite(losses["training"][0]):
            raise NonFiniteError(
                f"d_model={stage.model.config.d_model}: the loss is not finite in BF16"
            )
        latest = {use: round(values[-1], 4) for use, values in losses.items()}
        logging.info("study: d_model %d, %s: %s", stage.model.config.d_model, precision, latest)
    size = count_params(stage.model.config)
    return f"width {stage.model.config.d_model}, {size:,} parameters", losses
