"""Benchmarks of GEMMs, quantizers and attention, beside BF16, the device's measured limits, and
other libraries where they are installed. experiments/bench/steps.py measures whole steps.

    measure_gemm        GEMMs of quantized operands; linears, forward and backward
    sweep_gemm          the block-scaled GEMMs under several tunings
    measure_quantize    the kernels that quantize, in bytes per second
    measure_attention   the attention core, forward and backward

Each takes `timed`, which times contestants (experiments/bench/timing.py), and returns a `Report`.
Data are random: zeros draw less power, so that the clock would be faster than in training. The
limit of a row is the time of its FLOPs at the best measured rate of plain matmuls in that precision
on this device, or the time of its bytes at the rate of a device copy. The figures:

    block_gemm_vs_cublas   speed of our 1x128 by 128x128 GEMM over that of torch._scaled_mm,
                           geometric mean over the shapes
    quantize_bandwidth     bytes per second of our quantizers over those of a copy, geometric mean
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops
from jax import lax
from jaxtyping import Array, Float, Int

from experiments.bench import torch_peers
from experiments.bench.report import Report, Row, mean_ratio
from experiments.bench.timing import Contestants, Program, Timer
from fp8jax.device import xla
from fp8jax.gemm.backends.choice import BACKENDS
from fp8jax.gemm.backends.operands import CastRequest
from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.kernels.block_gemm import TuningConfig, block_scaled_matmul
from fp8jax.kernels.row_gemm import row_scaled_matmul
from fp8jax.kernels.swiglu import SWIGLU, SWIGLU_GRAD, Producer
from fp8jax.kernels.swiglu_quantize import cast_produced
from fp8jax.lm.model.attention import dot_product_attention, fastest_attention
from fp8jax.numerics.formats import FORMATS, cast
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.recipes import RECIPES

MATMUL = (((1,), (0,)), ((), ()))


NT = (((1,), (1,)), ((), ()))  # both operands have the contracting axis last


def share_device() -> None:
    """Makes JAX leave device memory to other libraries in this process, such as torch.

    Must be called before JAX starts. A setting of the user's own takes precedence.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def compiled(
    f: Callable[..., Any], *arrays: Any, items: int = 1, layer_loop: bool = True
) -> Callable[[], Program]:
    """Returns a function that compiles `f` for these arrays; its row shows the temporaries.

    Args:
      items: how often `f` does what is timed.
      layer_loop: as in `xla.compiler_options`.
    """
    options = xla.compiler_options(layer_loop=layer_loop)

    def prepare() -> Program:
        program = jax.jit(f, compiler_options=options).lower(*arrays).compile()
        memory = program.memory_analysis()
        size = None if memory is None else memory.temp_size_in_bytes
        return Program(call=lambda: program(*arrays), items=items, bytes=size)

    return prepare


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.bfloat16) -> Float[Array, "..."]:
    """Returns standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), tuple(shape), dtype)


def policy_and_backend(policy: str) -> tuple[str, str | None]:
    """Returns (policy, backend) of POLICY@BACKEND; the backend of POLICY is None."""
    name, _, backend = policy.partition("@")
    return name, backend or None


def sizes(text: str, names: str) -> list[int]:
    """Returns the numbers in a shape such as "256x128".

    Args:
      text: the shape.
      names: the names of its sides, such as "MxK".

    Raises:
      ValueError: another number of sides, or a side that is not a positive integer.
    """
    parts = text.split("x")
    if len(parts) != len(names.split("x")) or not all(p.isdecimal() and int(p) for p in parts):
        raise ValueError(f"shape {text!r}: expected {names}, positive integers")
    return [int(part) for part in parts]


# The limits of the device -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Measured limits: FLOP/s of plain matmuls in bfloat16 and e4m3, and bytes/s of a copy.

    The bytes of a copy are those read and those written.
    """

    bf16: float
    fp8: float
    copy: float

    def matrix(self, quantized: bool) -> float:
        """Returns the FLOP/s in e4m3 if `quantized`, else in bfloat16."""
        return self.fp8 if quantized else self.bf16

    def by_name(self) -> dict[str, float]:
        return dataclasses.asdict(self)

    def note(self) -> str:
        return (
            f"Limits, measured in this process: BF16 {self.bf16 / 1e12:,.4g} and FP8 "
            f"{self.fp8 / 1e12:,.4g} TFLOP/s, copy {self.copy / 1e9:,.4g} GB/s (read and written)."
        )


def _plain(a: Float[Array, "M K"], b: Float[Array, "N K"]) -> Float[Array, "M N"]:
    return lax.dot_general(a, b, NT, preferred_element_type=jnp.bfloat16)


def measure_limits(timed: Timer, size: int = 8192) -> Limits:
    """Measures the best of two matmuls with sides around `size`, and a copy of [2 * size, size]."""
    contestants: dict[str, Callable[[], Program]] = {}
    work = {}
    for m, k, n in ((size, size, size), (size, size // 2, 7 * size // 4)):
        a, b = normal(0, (m, k)), normal(1, (n, k))
        codes = cast(a, "e4m3"), cast(b, "e4m3")
        for kind, operands in (("bf16", (a, b)), ("fp8", codes)):
            contestants[f"{kind} {n}"] = compiled(_plain, *operands)
            work[f"{kind} {n}"] = 2 * m * k * n
    pages = [normal(seed, (2 * size, size)) for seed in range(2)]
    contestants["copy"] = compiled(lambda *xs: [jnp.copy(x) for x in xs], *pages, items=2)
    work["copy"] = 2 * pages[0].nbytes
    found = timed(contestants)
    best = {
        kind: max(
            (work[k] / t.seconds for k, t in found.items() if k.startswith(kind) and not t.reason),
            default=math.nan,
        )
        for kind in ("bf16", "fp8", "copy")
    }
    return Limits(**best)


# GEMMs and linears --------------------------------------------------------------------------------


def linear(
    policy: str, *, seeded: bool = True
) -> tuple[Callable[..., Any], Callable[..., dict[str, Array]]]:
    """Returns two functions of a linear under a policy, with x [M, K], w [K, N] and g [M, N].

    The first runs the linear forward and backward: (x, w, g, histories) -> y, dx, dw and the new
    histories. The second returns histories that are filled with the operands' amaxes: (x, w, g).

    Args:
      seeded: as for `dot_general`.
    """
    name, backend = policy_and_backend(policy)
    recipe, key = as_policy(name).recipe("layers/mlp/up"), jax.random.key(0)

    def products(x, w, g, state):
        dot = functools.partial(
            dot_general,
            dimension_numbers=MATMUL,
            recipe=recipe,
            key=key,
            backend=backend,
            seeded=seeded,
        )
        y, vjp = jax.vjp(lambda x, w, state: dot(x, w, state=state), x, w, state)
        return y, *vjp(g)

    def histories(x, w, g):
        amaxes = {"x": x, "w": w, "g": g}
        empty = init_state(recipe)
        return {k: jnp.full_like(h, jnp.max(jnp.abs(amaxes[k]))) for k, h in empty.items()}

    return products, histories


def _linear(policy: str, x, w, g, *, seeded: bool = True) -> Callable[[], Program]:
    """Returns a function that prepares a linear under a policy, forward and backward."""

    def prepare() -> Program:
        products, histories = linear(policy, seeded=seeded)
        return compiled(products, x, w, g, histories(x, w, g))()

    return prepare


def _flax_linear(operator: Any, x, w, g) -> Callable[[], Program]:
    """Returns a function that prepares the same linear as a module of flax.

    Its scales are 1 in the first step, which fits normal data.
    """

    def prepare() -> Program:
        module = operator()
        narrow = w.astype(x.dtype)
        variables = jax.jit(lambda: module.init(jax.random.key(0), x, narrow, MATMUL))()

        def products(x, w, g, variables):
            dot = lambda x, w, v: module.apply(v, x, w.astype(x.dtype), MATMUL)  # noqa: E731
            y, vjp = jax.vjp(dot, x, w, variables)
            return y, *vjp(g)

        return compiled(products, x, w, g, variables)()

    return prepare


def _gemm_contestants(m: int, k: int, n: int, policies: Sequence[str], peers: bool) -> Contestants:
    x, w, g = normal(0, (m, k)), normal(1, (k, n), jnp.float32), normal(2, (m, n))
    a, b, blocks = cast(x, "e4m3"), cast(w.T, "e4m3"), -(-k // 128)
    scales = functools.partial(jax.random.uniform, jax.random.key(3), minval=0.5, maxval=2.0)
    sa, of_blocks, of_rows = (scales((blocks, size)) for size in (m, -(-n // 128), n))
    scale = scales(())
    found = {
        "JAX bf16": compiled(_plain, x, w.T.astype(x.dtype)),
        "JAX f8, one scale": compiled(
            lambda a, b, scale: _plain(a, b) * scale.astype(jnp.bfloat16), a, b, scale
        ),
        "ours 1x128 by 128x128": compiled(block_scaled_matmul, a, b, sa, of_blocks),
        "ours rows by columns": compiled(row_scaled_matmul, a, b, scales((m,)), scales((n,))),
        "ours 1x128 by 1x128, float32": compiled(
            lambda a, b, sa, sb: block_scaled_matmul(a, b, sa, sb, jnp.float32), a, b, sa, of_rows
        ),
    }
    if peers:
        found |= torch_peers.gemms(m, k, n)
    found |= {f"linear {policy}": _linear(policy, x, w, g) for policy in policies}
    found |= {
        f"linear {policy}, seeding itself": _linear(policy, x, w, g, seeded=False)
        for policy in policies
        if as_policy(policy_and_backend(policy)[0]).delayed
    }
    if peers:
        for operator in (fp8_ops.Fp8DotGeneralOp, fp8_ops.Fp8DirectDotGeneralOp):
            found[f"linear flax {operator.__name__}"] = _flax_linear(operator, x, w, g)
    return found


def product_bytes(m: int, k: int, n: int, narrow: bool) -> int:
    """Returns bytes of the operands of a GEMM, FP8 if `narrow`, and of its result in bfloat16.

    Scales are left out: at most a thirty-second of the FP8 operands.
    """
    return (1 if narrow else 2) * (m * k + k * n) + 2 * m * n


def linear_bytes(m: int, k: int, n: int) -> int:
    """Returns bytes of x, g, y and dx in bfloat16, and of w and dw in float32, each once."""
    return 4 * (m * k + m * n + 2 * k * n)


def measure_gemm(
    shapes: Sequence[str], policies: Sequence[str], timed: Timer, limits: Limits, *, peers: bool
) -> Report:
    """Measures GEMMs of quantized operands, and linears (three GEMMs with quantization).

    Args:
      shapes: such as "8192x4096x14336", M x K x N.
      policies: POLICY or POLICY@BACKEND, of the linears.
      timed: times contestants.
      limits: the device's.
      peers: whether GEMMs of torch and linears of flax take part.
    """
    for policy in policies:
        as_policy(policy_and_backend(policy)[0])  # raises for a wrong name before the long work
    rows, pairs = [], []
    for shape in shapes:
        m, k, n = sizes(shape, "MxKxN")
        found = timed(_gemm_contestants(m, k, n, policies, peers))
        for name, timing in found.items():
            of_linear = name.startswith("linear")
            work = (6 if of_linear else 2) * m * k * n
            base = "linear bf16" if of_linear else "JAX bf16"
            narrow = name not in ("JAX bf16", "torch bf16", "linear bf16")
            moved = linear_bytes(m, k, n) if of_linear else product_bytes(m, k, n, narrow)
            rows.append(
                Row(
                    case=shape,
                    name=name,
                    timing=timing,
                    work=work,
                    limit=work / limits.matrix(narrow),
                    moved=moved,
                    baseline=found[base].seconds if base in found else math.nan,
                )
            )
        if peers:
            theirs = found["torch._scaled_mm 1x128 by 128x128"].seconds
            pairs.append((theirs, found["ours 1x128 by 128x128"].seconds))
    figures = {"block_gemm_vs_cublas": mean_ratio(pairs)}
    return Report(
        title="Products and linears",
        rate="TFLOP/s",
        rows=rows,
        figures=figures,
        notes=[limits.note()],
        limits=limits.by_name(),
    )


# The tunings of a sweep, by whether b has scales of 1x128 (True) or of 128x128 (False). Pairs are
# numbers of warpgroups and columns of a tile.
TUNINGS = {
    by_row: [
        TuningConfig(
            warpgroups=warpgroups,
            tile_n=tile_n,
            along_n=band > 8,
            band=band,
            cluster=cluster,
            copy_registers=24 if warpgroups == 3 else 40,
        )
        for warpgroups, tile_n in cuts
        for band in (8, 16)
        for cluster in (1, 2)
    ]
    for by_row, cuts in {
        False: ((3, 128), (2, 128), (2, 192)),
        True: ((2, 160), (2, 128), (3, 96)),
    }.items()
}


def sweep_gemm(shapes: Sequence[str], timed: Timer, limits: Limits) -> Report:
    """Measures the block-scaled GEMMs M x K x N under each of `TUNINGS`."""
    rows = []
    for shape in shapes:
        m, k, n = sizes(shape, "MxKxN")
        a, b = cast(normal(0, (m, k)), "e4m3"), cast(normal(1, (n, k)), "e4m3")
        contestants = {}
        for by_row, tunings in TUNINGS.items():
            out = jnp.float32 if by_row else jnp.bfloat16
            columns = n if by_row else -(-n // 128)
            sa, sb = (
                jax.random.uniform(jax.random.key(2), (-(-k // 128), size), minval=0.5)
                for size in (m, columns)
            )
            for t in tunings:
                changed = ", ".join(
                    f"{field.name}={getattr(t, field.name)}" for field in dataclasses.fields(t)
                )
                f = functools.partial(block_scaled_matmul, out_dtype=out, tuning=t)
                kind = "1x128 by 1x128" if by_row else "1x128 by 128x128"
                contestants[f"{kind}: {changed}"] = compiled(f, a, b, sa, sb)
        for name, timing in timed(contestants).items():
            work = 2 * m * k * n
            rows.append(
                Row(case=shape, name=name, timing=timing, work=work, limit=work / limits.fp8)
            )
    return Report(
        title="Block-scaled products, tuned",
        rate="TFLOP/s",
        rows=rows,
        figures={},
        notes=[limits.note()],
    )


# Quantizers ---------------------------------------------------------------------------------------

# The quantizations of a training step: (recipe, cast, dtype of the source, contracting axes). Each
# contracting axis needs codes of its own.
QUANTIZED = {
    "one scale, both": ("fp8_delayed", "fwd_x", jnp.bfloat16, (-1, -2)),
    "one scale, float32": ("fp8_delayed", "fwd_w", jnp.float32, (-1,)),
    "one scale, float32, transposed": ("fp8_delayed", "fwd_w", jnp.float32, (-2,)),
    "1x128, both": ("fp8_block", "fwd_x", jnp.bfloat16, (-1, -2)),
    "128x128, float32": ("fp8_block", "fwd_w", jnp.float32, (-1,)),
    "128x128, float32, transposed": ("fp8_block", "fwd_w", jnp.float32, (-2,)),
}


def _quantize(backend: str, kind: str, arrays: Sequence[Array]) -> Callable[[], Program]:
    """Returns a function that prepares a quantization of several arrays.

    For each array it returns codes with the contracting axis last, scales, and the amax if the
    scale is delayed.
    """
    recipe, operand, _, axes = QUANTIZED[kind]
    how = getattr(RECIPES[recipe], operand)

    def one(x):
        given = jnp.float32(5.0) if how.delayed else None
        requests = tuple(CastRequest(how, axis, given, None) for axis in axes)
        coded, amax = BACKENDS[backend].quantize(x, requests)
        if how.delayed and amax is None:
            amax = jnp.max(jnp.abs(x))
        return [(c.q.values if c.axis == -1 else c.q.values.T, c.q.scale) for c in coded], amax

    return compiled(lambda *xs: [one(x) for x in xs], *arrays, items=len(arrays))


def _produced(producer: Producer, *sources: Array) -> Callable[[], Program]:
    """Returns a function that prepares the kernel that gemm/fused_mlp.py uses.

    In one pass, it computes SwiGLU or its gradients, and quantizes the results.
    """
    formats = (FORMATS["e5m2"], FORMATS["e5m2"], FORMATS["e4m3"])[-producer.results :]
    axes = ((-1, -2), (-1, -2), (-2,)) if producer.results == 3 else ((-1,),)
    scales = jnp.full(producer.results, 0.01)
    return compiled(lambda *xs: cast_produced(producer, xs, scales, formats, axes), *sources)


def _quantize_contestants(m: int, k: int) -> tuple[Contestants, dict[str, float]]:
    """Returns the contestants, and by their names the bytes that each has to read and write."""
    contestants: dict[str, Callable[[], Program]] = {}
    work: dict[str, float] = {}
    # A call quantizes several arrays: a single one may take less time than its dispatch.
    arrays = {
        t: [normal(seed, (m, k), t) for seed in range(3)] for t in (jnp.bfloat16, jnp.float32)
    }
    for kind, (recipe, operand, dtype, axes) in QUANTIZED.items():
        tile = getattr(RECIPES[recipe], operand).tile
        area = math.prod(m * k if side is None else side for side in (tile.free, tile.contract))
        scales = 4 * m * k / min(area, m * k)
        for backend in ("pallas", "xla"):
            name = f"{kind}: {backend}"
            contestants[name] = _quantize(backend, kind, arrays[dtype][:2])
            work[name] = arrays[dtype][0].nbytes + len(axes) * (m * k + scales)
    for producer, codes in ((SWIGLU, 1), (SWIGLU_GRAD, 5)):
        name = f"{producer.name}, one scale: pallas"
        contestants[name] = _produced(producer, *arrays[jnp.bfloat16][: producer.sources])
        work[name] = (2 * producer.sources + codes) * m * k
    return contestants, work


def measure_quantize(shapes: Sequence[str], timed: Timer, limits: Limits) -> Report:
    """Measures our quantizers of M x K numbers and XLA's, by the bytes read and written."""
    rows, pairs = [], []
    for shape in shapes:
        contestants, work = _quantize_contestants(*sizes(shape, "MxK"))
        for name, timing in timed(contestants).items():
            limit = work[name] / limits.copy
            rows.append(Row(case=shape, name=name, timing=timing, work=work[name], limit=limit))
            pairs += [(limit, timing.seconds)] if name.endswith("pallas") else []
    figures = {"quantize_bandwidth": mean_ratio(pairs)}
    return Report(
        title="Quantizers", rate="GB/s", rows=rows, figures=figures, notes=[limits.note()]
    )


# Attention ----------------------------------------------------------------------------------------


def default_attention() -> str:
    """Returns the attention that training takes without a choice, for heads of the usual sizes."""
    return fastest_attention(jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16))


def documents(rows: int, length: int, count: int) -> Int[Array, "rows length"]:
    """Returns the segments of rows that hold `count` documents of random lengths each."""
    rng = np.random.default_rng(0)
    begins = np.zeros((rows, length), np.int32)
    begins[:, 0] = 1
    for row in begins:
        row[rng.choice(np.arange(1, length), count - 1, replace=False)] = 1
    return jnp.asarray(np.cumsum(begins, axis=1, dtype=np.int32))


def attend(
    name: str, b: int, length: int, n: int, k: int, h: int, count: int = 1
) -> Callable[[], Program]:
    """Returns a function that prepares an attention implementation, forward and backward.

    Args:
      name: a key of `ATTENTIONS`.
      b, length, n, k, h: rows, positions, query heads, key heads, head size.
      count: documents in a row.
    """
    q, key, v, g = (normal(i, (b, length, heads, h)) for i, heads in enumerate((n, k, k, n)))
    segments = documents(b, length, count)

    def both(q, key, v, g, segments):
        f = functools.partial(dot_product_attention, segments_BT=segments, implementation=name)
        y, vjp = jax.vjp(f, q, key, v)
        return y, *vjp(g)

    return compiled(both, q, key, v, g, segments)


def measure_attention(
    shapes: Sequence[str],
    names: Sequence[str],
    timed: Timer,
    limits: Limits,
    *,
    counts: Sequence[int] = (1,),
    peers: bool,
) -> Report:
    """Measures forward and backward of attention implementations.

    The FLOPs of a row are the model's with one document, not those that a kernel executes: three
    times the FLOPs of the forward, and only half of the L x L square.

    Args:
      shapes: B x L x N x K x H: batch, length, query heads, key heads, head size.
      names: keys of ATTENTIONS.
      timed: times contestants.
      limits: the device's.
      counts: documents in a row, of random lengths.
      peers: whether torch takes part, which knows no documents.

    Returns:
      The report; its figures are the times of `flash` over those of `cudnn_causal`, which skips
      nothing.
    """
    rows, figures = [], {}
    for shape, count in itertools.product(shapes, counts):
        b, length, n, k, h = sizes(shape, "BxLxNxKxH")
        contestants = {name: attend(name, b, length, n, k, h, count) for name in names}
        if peers:
            contestants |= torch_peers.attention(b, length, n, k, h)
        work = 6 * b * length * length * n * h
        found = timed(contestants)
        case = f"{shape}, {count} documents a row"
        rows += [
            Row(case=case, name=name, timing=timing, work=work, limit=work / limits.bf16)
            for name, timing in found.items()
        ]
        if {"flash", "cudnn_causal"} <= set(names):
            ratio = found["flash"].seconds / found["cudnn_causal"].seconds
            figures[f"packed_attention/{shape}/{count}"] = ratio
    return Report(
        title="Attention", rate="TFLOP/s", rows=rows, figures=figures, notes=[limits.note()]
    )
