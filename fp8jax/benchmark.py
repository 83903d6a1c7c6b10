"""Measured tables: products, quantisers, training steps and attention, each beside BF16, the
device's measured limits, and what others make of the same where it is installed.

    measure_gemm        products of quantised operands; linears, forward and backward
    measure_quantize    the kernels that quantise, in bytes a second
    measure_step        layers of a model, forward and backward, without an optimizer
    measure_training    whole steps of a config, by the program that training runs
    measure_attention   the attention core, forward and backward

Each takes `timed`, a race with its settings (timing.py), and gives a `Report`. Data are random:
zeros draw less power, and the clock would be higher than in training. Weights are quantised from
float32 inside of a step, which is what training does (`step.accumulate`); histories of a delayed
policy are those that its seeding step leaves. The limit of a row is the time that its matrix
products take at the best rate of plain products of that precision on this device, plus attention's
own time in a step, or its bytes at the rate of a device copy.
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import fp8_ops
from jax import lax
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from fp8jax import runtime, torch_peers
from fp8jax.attention import dot_product_attention
from fp8jax.backends import BACKENDS, Request
from fp8jax.dot import dot_general, init_state
from fp8jax.formats import cast
from fp8jax.kernels.gemm import TuningConfig, block_scaled_matmul
from fp8jax.model import Transformer, abstract_variables
from fp8jax.model_config import ModelConfig, flops_per_token
from fp8jax.nn import HISTORIES
from fp8jax.optim import OptimizerConfig, make_optimizer
from fp8jax.policy import as_policy
from fp8jax.recipe import RECIPES
from fp8jax.stability import gate, is_finite
from fp8jax.step import Batch, TrainState, accumulate, enter
from fp8jax.timing import Entrants, Program, Race, Report, Row, Timing, mean_ratio
from fp8jax.train import Run, build, to_devices

MATMUL = (((1,), (0,)), ((), ()))
NT = (((1,), (1,)), ((), ()))  # the contracted axis last in both

# The figures, by their first words; a speed is the inverse of a time.
FIGURES = {
    "step_speedup": "speed of a step over bf16's, d4096 unless a shape is named",
    "step_memory": "temporaries of a step over bf16's, with the same rematerialisation",
    "bf16_vs_torch": "speed of our bf16 step over torch.compile's",
    "block_gemm_vs_cublas": "speed of the 1x128 by 128x128 product over torch._scaled_mm's, "
    "geometric mean over the shapes",
    "quantize_bandwidth": "bytes a second of our quantisers over a copy's, geometric mean",
    "infir2_time": "time of a training step in fp8_block over bf16's, Qwen2.5-1.5B, 2 x 8192",
    "infir2_memory": "all that XLA allocates for it, over bf16's",
    "train_vs_bench": "speed of training's own step over that of the benchmark's step followed by "
    "the optimizer, the lowest of the policies",
}


def share_device() -> None:
    """Has JAX leave memory to others in this process; call it before JAX starts. The user's own
    setting stays."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _compiled(f: Callable[..., Any], *arrays: Any, items: int = 1) -> Callable[[], Program]:
    """What compiles `f` for these arrays, and shows its temporaries."""

    def prepare() -> Program:
        program = jax.jit(f, compiler_options=runtime.compiler_options()).lower(*arrays).compile()
        size = program.memory_analysis().temp_size_in_bytes
        return Program(call=lambda: program(*arrays), items=items, bytes=size)

    return prepare


def _normal(seed: int, shape: Sequence[int], dtype: Any = jnp.bfloat16) -> Float[Array, "..."]:
    return jax.random.normal(jax.random.key(seed), tuple(shape), dtype)


def _name(policy: str) -> tuple[str, str | None]:
    """(policy, backend) of POLICY or POLICY@BACKEND."""
    name, _, backend = policy.partition("@")
    return name, backend or None


def _sizes(text: str, names: str) -> list[int]:
    """The numbers of such a shape as "256x128"; `names` says what they are, such as "MxK"."""
    parts = text.split("x")
    if len(parts) != len(names.split("x")) or not all(p.isdecimal() and int(p) for p in parts):
        raise ValueError(f"shape {text!r}: expected {names}, positive whole numbers")
    return [int(part) for part in parts]


def _speed(timings: Mapping[str, Timing], name: str, other: str) -> float:
    """The speed of `name` over that of `other`; NaN where one has no time."""
    if name not in timings or other not in timings:
        return math.nan
    return timings[other].seconds / timings[name].seconds


# The limits of the device -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """FLOP/s of plain products of bfloat16 and e4m3, and bytes/s of a copy, read and written."""

    bf16: float
    fp8: float
    copy: float

    def matrix(self, quantised: bool) -> float:
        return self.fp8 if quantised else self.bf16

    def note(self) -> str:
        return (
            f"Limits, measured in this process: BF16 {self.bf16 / 1e12:,.4g} and FP8 "
            f"{self.fp8 / 1e12:,.4g} TFLOP/s, copy {self.copy / 1e9:,.4g} GB/s (read and written)."
        )


def _plain(a: Float[Array, "M K"], b: Float[Array, "N K"]) -> Float[Array, "M N"]:
    return lax.dot_general(a, b, NT, preferred_element_type=jnp.bfloat16)


def measure_limits(timed: Race, size: int = 8192) -> Limits:
    """The best of two products with sides around `size`, and a copy of as many numbers."""
    entrants: dict[str, Callable[[], Program]] = {}
    work = {}
    for m, k, n in ((size, size, size), (size, size // 2, 7 * size // 4)):
        a, b = _normal(0, (m, k)), _normal(1, (n, k))
        codes = cast(a, "e4m3"), cast(b, "e4m3")
        for kind, operands in (("bf16", (a, b)), ("fp8", codes)):
            entrants[f"{kind} {n}"] = _compiled(_plain, *operands)
            work[f"{kind} {n}"] = 2 * m * k * n
    pages = [_normal(seed, (2 * size, size)) for seed in range(2)]
    entrants["copy"] = _compiled(lambda *xs: [jnp.copy(x) for x in xs], *pages, items=2)
    work["copy"] = 2 * pages[0].nbytes
    found = timed(entrants)
    best = {
        kind: max((work[k] / t.seconds for k, t in found.items()
                   if k.startswith(kind) and not t.reason), default=math.nan)
        for kind in ("bf16", "fp8", "copy")
    }  # fmt: skip
    return Limits(**best)


# Products -----------------------------------------------------------------------------------------


def _linear(policy: str, x, w, g) -> Callable[[], Program]:
    """y, dx, dw and the new histories of a linear under a policy."""

    def prepare() -> Program:
        name, backend = _name(policy)
        recipe = as_policy(name).recipe("layers/mlp/up")
        state = init_state(recipe)
        amaxes = {"x": x, "w": w, "g": g}
        state = {k: jnp.full_like(h, jnp.max(jnp.abs(amaxes[k]))) for k, h in state.items()}
        key = jax.random.key(0)

        def products(x, w, g, state):
            dot = functools.partial(
                dot_general, dimension_numbers=MATMUL, recipe=recipe, key=key, backend=backend
            )
            y, vjp = jax.vjp(lambda x, w, state: dot(x, w, state=state), x, w, state)
            return y, *vjp(g)

        return _compiled(products, x, w, g, state)()

    return prepare


def _flax_linear(operator: Any, x, w, g) -> Callable[[], Program]:
    """The same by flax's module, whose scales are 1 at its first step: data of that size fit."""

    def prepare() -> Program:
        module = operator()
        narrow = w.astype(x.dtype)
        variables = jax.jit(lambda: module.init(jax.random.key(0), x, narrow, MATMUL))()

        def products(x, w, g, variables):
            dot = lambda x, w, v: module.apply(v, x, w.astype(x.dtype), MATMUL)  # noqa: E731
            y, vjp = jax.vjp(dot, x, w, variables)
            return y, *vjp(g)

        return _compiled(products, x, w, g, variables)()

    return prepare


def _gemm_entrants(m: int, k: int, n: int, policies: Sequence[str], peers: bool) -> Entrants:
    x, w, g = _normal(0, (m, k)), _normal(1, (k, n), jnp.float32), _normal(2, (m, n))
    a, b, blocks = cast(x, "e4m3"), cast(w.T, "e4m3"), -(-k // 128)
    scales = functools.partial(jax.random.uniform, jax.random.key(3), minval=0.5, maxval=2.0)
    sa, of_blocks, of_rows = scales((blocks, m)), scales((blocks, -(-n // 128))), scales((blocks, n))
    scale = scales(())
    found = {
        "JAX bf16": _compiled(_plain, x, w.T.astype(x.dtype)),
        "JAX f8, one scale": _compiled(
            lambda a, b, scale: _plain(a, b) * scale.astype(jnp.bfloat16), a, b, scale
        ),
        "ours 1x128 by 128x128": _compiled(block_scaled_matmul, a, b, sa, of_blocks),
        "ours 1x128 by 1x128, float32": _compiled(
            lambda *operands: block_scaled_matmul(*operands, jnp.float32), a, b, sa, of_rows
        ),
    }
    if peers:
        found |= torch_peers.gemms(m, k, n)
    found |= {f"linear {policy}": _linear(policy, x, w, g) for policy in policies}
    if peers:
        for operator in (fp8_ops.Fp8DotGeneralOp, fp8_ops.Fp8DirectDotGeneralOp):
            found[f"linear flax {operator.__name__}"] = _flax_linear(operator, x, w, g)
    return found


def measure_gemm(
    shapes: Sequence[str], policies: Sequence[str], timed: Race, limits: Limits, *, peers: bool
) -> Report:
    """Products M x K x N, and linears (three products, quantisation included) under policies."""
    rows, pairs = [], []
    for shape in shapes:
        m, k, n = _sizes(shape, "MxKxN")
        found = timed(_gemm_entrants(m, k, n, policies, peers))
        for name, timing in found.items():
            of_linear = name.startswith("linear")
            work = (6 if of_linear else 2) * m * k * n
            base = found["linear bf16" if of_linear and "bf16" in policies else "JAX bf16"].seconds
            base = math.nan if of_linear and "bf16" not in policies else base
            limit = work / limits.matrix(not name.endswith("bf16"))
            rows.append(
                Row(case=shape, name=name, timing=timing, work=work, limit=limit, baseline=base)
            )
        if peers:
            theirs = found["torch._scaled_mm 1x128 by 128x128"].seconds
            pairs.append((theirs, found["ours 1x128 by 128x128"].seconds))
    figures = {"block_gemm_vs_cublas": mean_ratio(pairs)}
    return Report(
        title="Products and linears", rate="TFLOP/s", rows=rows, figures=figures,
        notes=[limits.note()],
    )  # fmt: skip


# What a sweep tries, by the kind of b's scales: `by_row` or not.
TUNINGS = {
    False: [TuningConfig(rounds=r, tile_n=n, band=b) for r, n, b in
            ((1, 128, 8), (2, 128, 8), (1, 96, 8), (1, 128, 16), (1, 160, 8), (1, 192, 8))],
    True: [TuningConfig(rounds=r, tile_n=n) for r, n in ((1, 128), (1, 96), (2, 96), (1, 64))],
}  # fmt: skip


def sweep_gemm(shapes: Sequence[str], timed: Race, limits: Limits) -> Report:
    """The block-scaled products under each of `TUNINGS`."""
    rows = []
    for shape in shapes:
        m, k, n = _sizes(shape, "MxKxN")
        a, b = cast(_normal(0, (m, k)), "e4m3"), cast(_normal(1, (n, k)), "e4m3")
        entrants = {}
        for by_row, tunings in TUNINGS.items():
            out = jnp.float32 if by_row else jnp.bfloat16
            columns = n if by_row else -(-n // 128)
            sa, sb = (jax.random.uniform(jax.random.key(2), (-(-k // 128), size), minval=0.5)
                      for size in (m, columns))  # fmt: skip
            for t in tunings:
                changed = ", ".join(
                    f"{field.name}={getattr(t, field.name)}" for field in dataclasses.fields(t)
                )
                f = lambda *x, out=out, t=t: block_scaled_matmul(*x, out, t)  # noqa: E731
                kind = "1x128 by 1x128" if by_row else "1x128 by 128x128"
                entrants[f"{kind}: {changed}"] = _compiled(f, a, b, sa, sb)
        for name, timing in timed(entrants).items():
            work = 2 * m * k * n
            rows.append(
                Row(case=shape, name=name, timing=timing, work=work, limit=work / limits.fp8)
            )
    return Report(
        title="Block-scaled products, tuned", rate="TFLOP/s", rows=rows, figures={},
        notes=[limits.note()],
    )  # fmt: skip


# Quantisers ---------------------------------------------------------------------------------------

# What a step asks for: (recipe, cast, source's dtype, contracted axes of the wanted codes).
QUANTISED = {
    "one scale, both": ("fp8_delayed", "fwd_x", jnp.bfloat16, (-1, -2)),
    "one scale, float32": ("fp8_delayed", "fwd_w", jnp.float32, (-1,)),
    "one scale, float32, transposed": ("fp8_delayed", "fwd_w", jnp.float32, (-2,)),
    "1x128, both": ("fp8_block", "fwd_x", jnp.bfloat16, (-1, -2)),
    "128x128, float32": ("fp8_block", "fwd_w", jnp.float32, (-1,)),
    "128x128, float32, transposed": ("fp8_block", "fwd_w", jnp.float32, (-2,)),
}


def _quantise(backend: str, kind: str, arrays: Sequence[Array]) -> Callable[[], Program]:
    """Codes with the contracted axis last, scales, and for a delayed scale the amax."""
    recipe, operand, _, axes = QUANTISED[kind]
    how = getattr(RECIPES[recipe], operand)

    def one(x):
        given = jnp.float32(5.0) if how.delayed else None
        requests = tuple(Request(how, axis, given, None) for axis in axes)
        coded, amax = BACKENDS[backend].quantize(x, requests)
        if how.delayed and amax is None:
            amax = jnp.max(jnp.abs(x))
        return [(c.q.values if c.axis == -1 else c.q.values.T, c.q.scale) for c in coded], amax

    return _compiled(lambda *xs: [one(x) for x in xs], *arrays, items=len(arrays))


def measure_quantize(shapes: Sequence[str], timed: Race, limits: Limits) -> Report:
    """Quantisers of M x K numbers: ours, and XLA's of the same, by bytes read and written."""
    rows, pairs = [], []
    for shape in shapes:
        m, k = _sizes(shape, "MxK")
        for kind, (recipe, operand, dtype, axes) in QUANTISED.items():
            # Several arrays a call: one may take no longer than its dispatch.
            arrays = [_normal(seed, (m, k), dtype) for seed in range(2)]
            tile = getattr(RECIPES[recipe], operand).tile
            area = math.prod(m * k if side is None else side for side in (tile.free, tile.contract))
            scales = 4 * m * k / min(area, m * k)
            work = arrays[0].nbytes + len(axes) * (m * k + scales)
            found = timed({name: _quantise(name, kind, arrays) for name in ("pallas", "xla")})
            for name, timing in found.items():
                rows.append(
                    Row(case=shape, name=f"{kind}: {name}", timing=timing, work=work,
                        limit=work / limits.copy)
                )  # fmt: skip
            pairs.append((work / limits.copy, found["pallas"].seconds))
    figures = {"quantize_bandwidth": mean_ratio(pairs)}
    return Report(
        title="Quantisers", rate="GB/s", rows=rows, figures=figures, notes=[limits.note()]
    )


# Attention ----------------------------------------------------------------------------------------


def default_attention() -> str:
    """The fastest core without a mask: cuDNN's where it runs."""
    capability = runtime.compute_capability()
    return "xla" if capability is None or capability < (8, 0) else "cudnn_causal"


def _attend(name: str, b: int, length: int, n: int, k: int, h: int) -> Callable[[], Program]:
    """dq, dk and dv of one attention implementation, and its result."""
    q, key, v, g = (_normal(i, (b, length, heads, h)) for i, heads in enumerate((n, k, k, n)))
    segments = jnp.ones((b, length), jnp.int32)

    def both(q, key, v, g, segments):
        f = functools.partial(dot_product_attention, segments_BT=segments, implementation=name)
        y, vjp = jax.vjp(f, q, key, v)
        return y, *vjp(g)

    return _compiled(both, q, key, v, g, segments)


def measure_attention(
    shapes: Sequence[str], names: Sequence[str], timed: Race, limits: Limits, *, peers: bool
) -> Report:
    """Forward and backward of B x L x query heads x key heads x head size. FLOPs are the model's:
    three times the forward's, half of the square."""
    rows = []
    for shape in shapes:
        b, length, n, k, h = _sizes(shape, "BxLxNxKxH")
        entrants = {name: _attend(name, b, length, n, k, h) for name in names}
        if peers:
            entrants |= torch_peers.attention(b, length, n, k, h)
        work = 6 * b * length * length * n * h
        rows += [
            Row(case=shape, name=name, timing=timing, work=work, limit=work / limits.bf16)
            for name, timing in timed(entrants).items()
        ]
    return Report(
        title="Attention", rate="TFLOP/s", rows=rows, figures={}, notes=[limits.note()]
    )


# Steps --------------------------------------------------------------------------------------------


def _layers(d_model: int, n_layers: int, heads: int, kv: int, d_ff: int, size: int = 128):
    return ModelConfig(
        vocab_size=256, d_model=d_model, n_layers=n_layers, n_heads=heads, n_kv_heads=kv,
        d_ff=d_ff, head_dim=size,
    )  # fmt: skip


# Layers of Llama-3-8B, Qwen2.5-1.5B, a Llama of 1B and Llama-2-70B, with rows and their length. The
# vocabulary is small, so that only layers count.
STEPS = {
    "d4096": (_layers(4096, 4, 32, 8, 14_336), 4, 4096),
    "d1536": (_layers(1536, 28, 12, 2, 8960), 2, 8192),
    "d2048": (_layers(2048, 8, 16, 8, 8192), 8, 2048),
    "d8192": (_layers(8192, 2, 64, 8, 28_672), 4, 4096),
    "tiny": (_layers(128, 2, 4, 2, 256, 32), 2, 64),
}


def step_shape(name: str) -> tuple[ModelConfig, int, int]:
    """(model, rows, length) of a key of `STEPS`, or of such a name as d4096_16x1024."""
    key, _, size = name.partition("_")
    if key not in STEPS:
        raise ValueError(f"unknown shape {name!r}: one of {', '.join(STEPS)}, or with _ROWSxLENGTH")
    model, rows, length = STEPS[key]
    return (model, *(_sizes(size, "ROWSxLENGTH") if size else (rows, length)))  # type: ignore


def _random_batch(config: ModelConfig, rows: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, rows, length))
    return {
        "tokens": tokens[0].astype(np.int32), "targets": tokens[1].astype(np.int32),
        "segments": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "weights": np.ones((rows, length), np.float32),
    }  # fmt: skip


def _init_params(config: ModelConfig) -> Any:
    ids, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    init = lambda: Transformer(config).init(key, ids, ids, ids, key)["params"]  # noqa: E731
    return linen.meta.unbox(jax.jit(init)())


def _seeded(model: Transformer, params: Any, batch: Batch) -> TrainState:
    """The state after the seeding step, whose program is a loop: it compiles faster."""
    shapes = abstract_variables(model)
    histories = shapes[HISTORIES] if HISTORIES in shapes else {}
    histories = jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), linen.meta.unbox(histories))
    state = TrainState(
        step=jnp.int32(0), params=params, histories=histories, opt_state=(), key=jax.random.key(1)
    )
    if histories:
        seeding = model.clone(policy=as_policy(model.policy).seeding(), unroll=1)
        program = jax.jit(
            lambda state, batch: accumulate(seeding, state, batch, 1)[2],
            compiler_options=runtime.compiler_options(),
        )
        state = dataclasses.replace(state, histories=program(state, batch))
    return state


def _step(model: Transformer, params: Any, batch: Batch) -> Callable[[], Program]:
    """Loss, gradients and histories: a training step without its optimizer."""

    def prepare() -> Program:
        state = _seeded(model, params, batch)
        return _compiled(lambda s, b: accumulate(model, s, b, 1), state, batch)()

    return prepare


def step_floor(
    config: ModelConfig, rows: int, length: int, attention: str, timed: Race, limits: Limits
) -> dict[bool, float]:
    """quantised or not -> seconds of a step's matrix products and attention, and nothing else."""
    shape = (rows, length, config.n_heads, config.n_kv_heads, config.head_dim)
    attend = timed({attention: _attend(attention, *shape)})[attention].seconds
    flops = flops_per_token(config, length) * rows * length
    flops -= 6 * config.n_layers * rows * length * length * config.n_heads * config.head_dim
    return {q: flops / limits.matrix(q) + config.n_layers * attend for q in (False, True)}


def _quantises(policy: str) -> bool:
    return any(recipe.casts for _, recipe in as_policy(_name(policy)[0]).rules)


def _step_rows(
    case: str, found: Mapping[str, Timing], flops: int, floor: Mapping[bool, float], base: str
) -> list[Row]:
    rows = []
    for name, timing in found.items():
        quantised = name.startswith("torchao") or ("torch" not in name and _quantises(name))
        baseline = found[base].seconds if base in found else math.nan
        rows.append(
            Row(case=case, name=name, timing=timing, work=flops, limit=floor[quantised],
                baseline=baseline)
        )  # fmt: skip
    return rows


def measure_step(
    shapes: Sequence[str],
    policies: Sequence[str],
    timed: Race,
    limits: Limits,
    *,
    attention: str,
    remat: str = "none",
    peers: bool,
) -> Report:
    """Forward and backward of a few layers under policies (POLICY or POLICY@BACKEND), the layers
    unrolled. The memory of a row is its temporaries."""
    rows: list[Row] = []
    figures: dict[str, float] = {}
    for shape in shapes:
        config, size, length = step_shape(shape)
        floor = step_floor(config, size, length, attention, timed, limits)
        params = _init_params(config)
        batch = jax.tree.map(jnp.asarray, _random_batch(config, size, length))
        entrants: dict[str, Callable[[], Program]] = {}
        for policy in policies:
            name, backend = _name(policy)
            model = Transformer(config, name, backend, attention, remat, config.n_layers)
            entrants[policy] = _step(model, params, batch)
        if peers and remat == "none":
            entrants |= torch_peers.steps(config, size, length)
        found = timed(entrants)
        del entrants, params
        flops = flops_per_token(config, length) * size * length
        rows += _step_rows(shape, found, flops, floor, "bf16")
        suffix = ("" if shape == "d4096" else f"_{shape}") + ("" if remat == "none" else f"_{remat}")
        figures[f"bf16_vs_torch{suffix}"] = _speed(found, "bf16", "torch.compile bf16")
        for policy in policies:
            if policy != "bf16" and "bf16" in found:
                figures[f"step_speedup{suffix}/{policy}"] = _speed(found, policy, "bf16")
                ours, theirs = found[policy].bytes, found["bf16"].bytes
                ratio = ours / theirs if ours is not None and theirs else math.nan
                figures[f"step_memory{suffix}/{policy}"] = ratio
    notes = [limits.note(), f"Attention {attention}, rematerialisation {remat}; GiB: temporaries."]
    return Report(
        title="Steps without an optimizer", rate="TFLOP/s", rows=rows, figures=figures, notes=notes
    )


# Whole training steps -----------------------------------------------------------------------------


class _Training:
    """The programs of a config, and one state for all of them: parameters and moments, which every
    call gives away and gets back. Each policy keeps histories of its own."""

    def __init__(self, config: ConfigDict, policies: Sequence[str]):
        self.config, self.runs = config, {}
        for policy in policies:
            one = config.copy_and_resolve_references()
            (one.precision, one.backend), one.precision_schedule = _name(policy), ()
            self.runs[policy] = build(one, jax.local_devices()[:1])
        self.first: Run = next(iter(self.runs.values()))
        self.model = self.first.model.config
        self.batch = _random_batch(self.model, config.batch_size, config.seq_len)
        self._state: TrainState | None = None
        self._histories: dict[str, Any] = {}

    def state(self, policy: str) -> TrainState:
        """For a call that takes it away; made anew where a failed call has lost it."""
        state, self._state = self._state, None
        leaves = jax.tree.leaves(state)
        if state is None or any(leaf.is_deleted() for leaf in leaves):
            state = dataclasses.replace(self.first.initialise(), histories={})
        if policy not in self._histories:
            return enter(state, self.runs[policy].state, frozenset())
        return dataclasses.replace(state, histories=self._histories[policy])

    def keep(self, policy: str, state: TrainState) -> None:
        self._histories[policy] = state.histories
        self._state = dataclasses.replace(state, histories={})

    def prepare(self, policy: str, inner: Callable[["_Training", str], Program]) -> Program:
        """`inner`, on the run's mesh, with seeded histories; its calls run on that mesh too."""
        run = self.runs[policy]
        with jax.set_mesh(run.mesh):
            if policy not in self._histories:
                state = self.state(policy)
                if run.seeds:
                    state, _ = run.seed_step(state, to_devices(self.batch, run.batch_sharding))
                self.keep(policy, state)
            program = inner(self, policy)

        def call() -> Any:
            with jax.set_mesh(run.mesh):
                return program.call()

        return dataclasses.replace(program, call=call)


def _train(training: _Training, policy: str) -> Program:
    """What the loop of train.py does a step: rows to the device, the step, the last metrics."""
    run = training.runs[policy]
    batch = to_devices(training.batch, run.batch_sharding)
    memory = run.step.lower(run.state, batch).compile().memory_analysis()  # type: ignore
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes
    size += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    last: list[Any] = []

    def call() -> Any:
        rows = to_devices(training.batch, run.batch_sharding)
        state, metrics = run.step(training.state(policy), rows)
        training.keep(policy, state)
        jax.device_get(last)
        last[:] = [metrics]
        return metrics

    return Program(call=call, bytes=size)


def _without_optimizer(training: _Training, policy: str) -> Program:
    """The step that `measure_step` times, on the config's model, from the same state."""
    run, state = training.runs[policy], training.state(policy)
    training.keep(policy, state)
    batch = to_devices(training.batch, run.batch_sharding)
    program = jax.jit(
        lambda state, batch: accumulate(run.model, state, batch, training.config.grad_accum),
        compiler_options=runtime.compiler_options(),
    )

    def call() -> Any:
        state = training.state(policy)
        training.keep(policy, state)
        return program(state, batch)

    return Program(call=call)


def _optimizer(training: _Training, policy: str) -> Program:
    """All that a step does after its gradients."""
    config = training.config
    fields = {f.name for f in dataclasses.fields(OptimizerConfig)} - {"name"}
    optimizer, _ = make_optimizer(
        OptimizerConfig(name=config.optimizer, **{name: config[name] for name in fields})
    )

    def update(state: TrainState, grads: Any) -> TrainState:
        norm = optax.tree.norm(grads)
        updates, moments = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=moments)
        return gate(is_finite(norm, norm), new, state)

    program = jax.jit(update, donate_argnums=0, compiler_options=runtime.compiler_options())
    grads = jax.tree.map(lambda leaf: _normal(0, leaf.shape, leaf.dtype), training.first.state.params)

    def call() -> Any:
        state = program(training.state(policy), grads)
        training.keep(policy, state)
        return state.step

    return Program(call=call)


def measure_training(
    config: ConfigDict, policies: Sequence[str], timed: Race, limits: Limits
) -> Report:
    """Whole steps of a config on one device and random tokens, by `train.build`; and, to compare,
    the benchmark's step and the optimizer alone. The memory of a row is all that XLA allocates."""
    training = _Training(config, policies)
    model, attention = training.model, config.attention or "xla"
    case = f"{config.model} {config.batch_size}x{config.seq_len}"
    parts = {"": _train, ", no optimizer": _without_optimizer}
    entrants = {
        f"{policy}{part}": functools.partial(training.prepare, policy, inner)
        for policy in policies
        for part, inner in parts.items()
    }
    entrants["optimizer"] = functools.partial(training.prepare, policies[0], _optimizer)
    found = timed(entrants)
    micro = config.batch_size // config.grad_accum
    with contextlib.suppress(NotImplementedError):
        floor = step_floor(model, micro, config.seq_len, attention, timed, limits)
    flops = flops_per_token(model, config.seq_len) * config.batch_size * config.seq_len
    rows = []
    for name, timing in found.items():
        policy, _, part = name.partition(", ")
        known = name != "optimizer"
        base = f"bf16, {part}" if part else "bf16"
        rows.append(
            Row(case=case, name=name, timing=timing, work=flops if known else math.nan,
                limit=config.grad_accum * floor[_quantises(policy)] if known else math.nan,
                baseline=found[base].seconds if known and base in found else math.nan)
        )  # fmt: skip
    notes = [limits.note(), "GiB: arguments, temporaries and results of the training step."]
    return Report(
        title=f"Training steps of {case}", rate="TFLOP/s", rows=rows,
        figures=_training_figures(config, policies, found), notes=notes,
    )  # fmt: skip


def _training_figures(
    config: ConfigDict, policies: Sequence[str], found: Mapping[str, Timing]
) -> dict[str, float]:
    """Whole steps against bf16's, and against the sum of their parts."""
    sums = [
        (found[f"{policy}, no optimizer"].seconds + found["optimizer"].seconds)
        / found[policy].seconds
        for policy in policies
    ]
    figures = {"train_vs_bench": min((s for s in sums if s > 0), default=math.nan)}
    infir2 = (config.model, config.batch_size // config.grad_accum, config.seq_len)
    for policy in policies:
        if policy == "bf16" or "bf16" not in policies:
            continue
        ours, theirs = found[policy], found["bf16"]
        paper = infir2 == ("qwen2.5_1.5b", 2, 8192) and policy == "fp8_block"
        end = "" if paper else f"/{config.model}/{policy}"
        figures[("infir2_time" if paper else "train_time") + end] = ours.seconds / theirs.seconds
        if ours.bytes is not None and theirs.bytes:
            figures[("infir2_memory" if paper else "train_memory") + end] = (
                ours.bytes / theirs.bytes
            )
    return figures
