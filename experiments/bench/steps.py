"""Benchmarks of steps of layers, beside BF16, the device's measured limits, and torch.

The layers of a model run forward and backward, without an optimizer: `accumulate` of
lm/training/step.py on our own Transformer, which quantizes float32 weights in every step. A delayed
policy starts from the amax histories that its seeding step leaves: with empty histories, gradients
would be flushed to zeros, which draw less power. The limit of a row is the time of the step's
matmuls at the measured rate of their precision, plus the measured time of attention.
experiments/bench/training_steps.py measures whole training steps.

The figures are for the shape d4096 unless their name has another shape:

    step_speedup/POLICY    speed of a step over bf16's
    step_memory/POLICY     temporaries of a step over bf16's, with the same rematerialization
    bf16_vs_torch          speed of our bf16 step over that of torch.compile
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import torch_peers
from experiments.bench.operators import (
    Limits,
    attend,
    compiled,
    documents,
    policy_and_backend,
    sizes,
)
from experiments.bench.report import Report, Row
from experiments.bench.timing import Program, Timer, Timing
from fp8jax.device import xla
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.data.loader import Batch
from fp8jax.lm.model.config import ModelConfig, flops_per_token
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.lm.training.step import TrainState, accumulate
from fp8jax.numerics.names import as_policy


def _layers(d_model: int, n_layers: int, heads: int, kv: int, d_ff: int, size: int = 128):
    return ModelConfig(
        vocab_size=256,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=kv,
        d_ff=d_ff,
        head_dim=size,
    )


# name -> (model, rows, length of a row), with layers of Llama-3-8B, Qwen2.5-1.5B, a Llama of 1B and
# Llama-2-70B. The vocabulary is small, so that almost all time is spent in the layers.
STEPS = {
    "d4096": (_layers(4096, 4, 32, 8, 14_336), 4, 4096),
    "d1536": (_layers(1536, 8, 12, 2, 8960), 2, 8192),
    "d2048": (_layers(2048, 8, 16, 8, 8192), 8, 2048),
    "d8192": (_layers(8192, 2, 64, 8, 28_672), 4, 4096),
    "tiny": (_layers(128, 1, 4, 2, 256, 32), 2, 64),
}


def step_shape(name: str) -> tuple[ModelConfig, int, int]:
    """Returns (model, rows, length) of a shape: a key of `STEPS`, or KEY_ROWSxLENGTH.

    Raises:
      ValueError: an unknown key, or a wrong size.
    """
    key, _, size = name.partition("_")
    if key not in STEPS:
        raise ValueError(
            f"unknown shape {name!r}: use one of {', '.join(STEPS)}, or KEY_ROWSxLENGTH"
        )
    model, rows, length = STEPS[key]
    if size:
        rows, length = sizes(size, "ROWSxLENGTH")
    return model, rows, length


def random_batch(
    dims: ModelConfig, rows: int, length: int, count: int = 1
) -> dict[str, np.ndarray]:
    """Returns rows of random tokens, in `count` documents of random lengths each."""
    tokens = np.random.default_rng(0).integers(dims.vocab_size, size=(2, rows, length))
    segments, places = np.asarray(documents(rows, length, count)), np.arange(length)
    begins = np.diff(segments, axis=1, prepend=0) > 0
    return {
        "tokens": tokens[0].astype(np.int32),
        "targets": tokens[1].astype(np.int32),
        "segments": segments,
        "positions": (places - np.maximum.accumulate(begins * places, axis=1)).astype(np.int32),
        "weights": np.ones((rows, length), np.float32),
    }


def _init_params(dims: ModelConfig) -> Any:
    ids, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    init = lambda: Transformer(dims).init(key, ids, ids, ids, key)["params"]  # noqa: E731
    return linen.meta.unbox(jax.jit(init)())


def _seeded(model: Transformer, params: Any, batch: Batch) -> TrainState:
    """Returns the state after the seeding step. Its layers are not unrolled: it compiles faster."""
    shapes = abstract_variables(model)
    histories = shapes[HISTORIES] if HISTORIES in shapes else {}
    histories = jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), linen.meta.unbox(histories))
    state = TrainState(
        step=jnp.int32(0), params=params, histories=histories, opt_state=(), key=jax.random.key(1)
    )
    if histories:
        seeding = model.clone(seeded=False, unroll=1)
        program = jax.jit(
            lambda state, batch: accumulate(seeding, state, batch, 1)[2],
            compiler_options=xla.compiler_options(),
        )
        state = dataclasses.replace(state, histories=program(state, batch))
    return state


def by_layer(tree: Any, count: int) -> Any:
    """Returns parameters or histories with a tuple of `count` layers in the place of their stack.

    Their gradients are arrays of one layer, as torch's are. Those of a stack are copied together at
    the end of a step without an optimizer; in training the optimizer reads the parts instead.
    """

    def layer(i: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[i], tree["layers"])

    return {**tree, "layers": tuple(map(layer, range(count)))} if tree else tree


def _step(model: Transformer, params: Any, layers: Any, batch: Batch) -> Callable[[], Program]:
    """Returns a function that prepares a training step without its optimizer.

    Args:
      params: for the seeding step, whose layers are a loop.
      layers: the same by layer, for the step that is timed.
    """

    def prepare() -> Program:
        state = _seeded(model, params, batch)
        histories = by_layer(state.histories, model.config.n_layers)
        state = dataclasses.replace(state, params=layers, histories=histories)
        step = lambda s, b: accumulate(model, s, b, 1)  # noqa: E731
        return compiled(step, state, batch, layer_loop=model.has_layer_loop)()

    return prepare


def step_floor(
    dims: ModelConfig,
    rows: int,
    length: int,
    attention: str,
    timed: Timer,
    limits: Limits,
    count: int = 1,
) -> dict[bool, dict[str, float]]:
    """Returns the least seconds of a step's matmuls and attention, by whether it quantizes.

    Rows hold `count` documents; the matmuls are those of one.
    """
    shape = (rows, length, dims.n_heads, dims.n_kv_heads, dims.head_dim, count)
    core = timed({attention: attend(attention, *shape)})[attention].seconds
    flops = flops_per_token(dims, length) * rows * length
    flops -= 6 * dims.n_layers * rows * length * length * dims.n_heads * dims.head_dim
    return {
        q: {"matmuls": flops / limits.matrix(q), "attention": dims.n_layers * core}
        for q in (False, True)
    }


def quantizes(policy: str) -> bool:
    return any(recipe.casts for _, recipe in as_policy(policy_and_backend(policy)[0]).rules)


def measure_step(
    shapes: Sequence[str],
    policies: Sequence[str],
    timed: Timer,
    limits: Limits,
    *,
    attention: str,
    remat: str = "none",
    peers: bool,
) -> Report:
    """Measures forward and backward of a few unrolled layers under each policy.

    Args:
      shapes: as for `step_shape`.
      policies: POLICY or POLICY@BACKEND.
      timed: times contestants.
      limits: the device's.
      attention, remat: as for `Transformer`.
      peers: whether torch's contestants take part; only without rematerialization.

    Returns:
      The report. The memory of a row is that of its temporaries.
    """
    rows: list[Row] = []
    figures: dict[str, float] = {}
    quantized = {policy for policy in policies if quantizes(policy)}
    quantized |= {f"torchao {recipe}" for recipe in torch_peers.TORCHAO}
    for shape in shapes:
        dims, size, length = step_shape(shape)
        floor = step_floor(dims, size, length, attention, timed, limits)
        contestants = _step_contestants(shape, policies, attention, remat)
        if peers and remat == "none":
            contestants |= torch_peers.steps(dims, size, length)
        found = timed(contestants)
        del contestants  # the parameters go before the next shape's are initialized
        flops = flops_per_token(dims, length) * size * length
        rows += [
            Row(
                case=shape,
                name=name,
                timing=timing,
                work=flops,
                limit=sum(floor[name in quantized].values()),
                parts=floor[name in quantized],
                baseline=found["bf16"].seconds if "bf16" in found else math.nan,
            )
            for name, timing in found.items()
        ]
        suffix = "" if shape == "d4096" else f"_{shape}"
        suffix += "" if remat == "none" else f"_{remat}"
        figures |= _step_figures(suffix, policies, found)
    notes = [limits.note(), f"Attention {attention}, rematerialization {remat}; GiB: temporaries."]
    return Report(
        title="Steps without an optimizer",
        rate="TFLOP/s",
        rows=rows,
        figures=figures,
        notes=notes,
        limits=limits.by_name(),
    )


def _step_contestants(
    shape: str, policies: Sequence[str], attention: str, remat: str
) -> dict[str, Callable[[], Program]]:
    """Returns the step under each policy; all have the same parameters and batch."""
    dims, size, length = step_shape(shape)
    params = _init_params(dims)
    layers = by_layer(params, dims.n_layers)
    batch = jax.tree.map(jnp.asarray, random_batch(dims, size, length))
    contestants = {}
    for policy in policies:
        name, backend = policy_and_backend(policy)
        model = Transformer(dims, name, backend, attention, remat, dims.n_layers)
        contestants[policy] = _step(model, params, layers, batch)
    return contestants


def _step_figures(
    suffix: str, policies: Sequence[str], found: Mapping[str, Timing]
) -> dict[str, float]:
    """Returns the figures of one shape; none without bf16."""
    if "bf16" not in found:
        return {}
    figures = {}
    base = found["bf16"]
    if (torch := "torch.compile bf16") in found:
        figures[f"bf16_vs_torch{suffix}"] = found[torch].seconds / base.seconds
    for policy in policies:
        if policy != "bf16":
            figures[f"step_speedup{suffix}/{policy}"] = base.seconds / found[policy].seconds
            figures[f"step_memory{suffix}/{policy}"] = ratio(found[policy].bytes, base.bytes)
    return figures


def ratio(size: int | None, baseline: int | None) -> float:
    """Returns size / baseline in bytes; NaN if one is unknown, or the baseline is zero."""
    return math.nan if size is None or not baseline else size / baseline
