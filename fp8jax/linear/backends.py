"""How an operand is quantized and how two quantized operands are multiplied, on which device.

A backend has two functions. `quantize` turns one array into the codes that its products ask for,
each a `CastRequest`: a cast, and the axis that will be contracted. `matmul` multiplies two
operands.

    emulated   quantizes, dequantizes and multiplies exactly, on every device and for every recipe:
               it defines what a recipe means
    xla        float8 codes into `lax.dot_general`, scales multiplied afterwards; on Blackwell,
               MXFP8 and NVFP4 codes with their scales into `jax.nn.scaled_matmul`
    pallas     Hopper: the kernels of kernels/ quantize for both products of an operand in one pass,
               codes with the contracted axis last. Scales of the whole tensor are multiplied as in
               `xla`, those of rows and of 128 elements inside kernels/row_gemm.py and block_gemm.py

The spelling that suggests itself, dequantize and then multiply, was rejected for `xla`: where XLA
does not recognize the pattern it runs a BF16 GEMM, and on a GPU even drops the rounding, without a
word.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import logging

from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.kernels import requirements
from fp8jax.kernels.swiglu import Producer
from fp8jax.linear.emulated import matmul_emulated, quantize_each
from fp8jax.linear.operands import CastRequest, Operand, QuantizedOperand, Quantizer
from fp8jax.linear.refusals import emulated_refuses, pallas_refuses, xla_refuses
from fp8jax.linear.xla import matmul_xla
from fp8jax.lookup import lookup
from fp8jax.numerics.recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How operands are quantized and multiplied.

    Attributes:
      name: key in `BACKENDS`.
      quantize: (array [..., rows, columns], requests) -> what each asks for, and the array's
        float32 amax where it came for free.
      matmul: (a, b, dtype) -> [..., M, N]; at least one operand is a `QuantizedOperand`.
      refuses: (recipe, device) -> why this backend cannot run it there, or None.
      batches: whether its products take a batch axis, and operands without elements.
      quantize_swiglu: (producer, its sources, requests for each result) -> what `quantize` returns
        for each result, without storing the results; None where a backend has no kernel for it.
      missing: () -> why this process cannot use it on any device, or None.
    """

    name: str
    quantize: Quantizer
    matmul: Callable[[Operand, Operand, jnp.dtype], jax.Array]
    refuses: Callable[[Recipe, Device], str | None]
    batches: bool = True
    quantize_swiglu: (
        Callable[..., tuple[tuple[tuple[QuantizedOperand, ...], jax.Array | None], ...]] | None
    ) = None
    missing: Callable[[], str | None] = lambda: None


# Pallas is slow to import: these import it when a program first uses a kernel.


def _pallas_quantize(
    x: jax.Array, requests: tuple[CastRequest, ...]
) -> tuple[tuple[QuantizedOperand, ...], jax.Array | None]:
    from fp8jax.linear import pallas

    return pallas.quantize_fused(x, requests)


def _pallas_matmul(a: Operand, b: Operand, dtype: jnp.dtype) -> jax.Array:
    from fp8jax.linear import pallas

    return pallas.matmul_pallas(a, b, dtype)


def _pallas_quantize_swiglu(
    producer: Producer,
    sources: tuple[jax.Array, ...],
    each: tuple[tuple[CastRequest, ...], ...],
) -> tuple[tuple[tuple[QuantizedOperand, ...], jax.Array | None], ...]:
    from fp8jax.linear import pallas

    return pallas.quantize_swiglu(producer, sources, each)


BACKENDS: dict[str, Backend] = {
    "emulated": Backend(
        name="emulated", quantize=quantize_each, matmul=matmul_emulated, refuses=emulated_refuses
    ),
    "xla": Backend(name="xla", quantize=quantize_each, matmul=matmul_xla, refuses=xla_refuses),
    "pallas": Backend(
        name="pallas",
        quantize=_pallas_quantize,
        matmul=_pallas_matmul,
        refuses=pallas_refuses,
        batches=False,
        quantize_swiglu=_pallas_quantize_swiglu,
        missing=requirements.jax_too_old,
    ),  # fmt: skip
}


@functools.cache  # once a recipe and backend: the log says what runs, not how often
def _log_choice(recipe: str, backend: str, why: str) -> None:
    logging.info("recipe %s: backend %s (%s)", recipe, backend, why)


def choose_backend(
    backend: str | None, recipe: Recipe, device: Device | None = None, *, whole: bool = True
) -> Backend:
    """The backend of that name, or for None the fastest that can run `recipe` on `device` (None:
    the default one of this process).

    Args:
      whole: whether a product is of two matrices, none of them empty: no batch axis.

    Raises:
      ValueError: unknown name.
      NotImplementedError: a named backend that cannot run the recipe; says why.
    """
    here = hardware.device()
    device = here if device is None else device
    if backend is not None:
        chosen = lookup("backend", backend, BACKENDS)
        reason = _reason_against(chosen, recipe, device, whole)
        if reason is not None:
            raise NotImplementedError(
                f"backend {backend!r} cannot run recipe {recipe.name!r} here ({device.kind}): "
                + reason
            )
        return chosen
    if not recipe.casts:
        return BACKENDS["emulated"]  # nothing to quantize: every backend is the same
    if not device.fp8:
        choice, why = "emulated", f"{device.kind} has no FP8 matrix unit"
    else:
        reasons = {
            name: _reason_against(BACKENDS[name], recipe, device, whole)
            for name in ("pallas", "xla")
        }
        able = [name for name, reason in reasons.items() if reason is None]
        choice = [*able, "emulated"][0]
        why = "codes into the matrix unit" if able else str(reasons["xla"])
    if device == here:
        _log_choice(recipe.name, choice, why)
    return BACKENDS[choice]


def _reason_against(backend: Backend, recipe: Recipe, device: Device, whole: bool) -> str | None:
    reason = backend.refuses(recipe, device)
    if reason is None and recipe.casts and device == hardware.device():
        reason = backend.missing()
    if reason is None and recipe.casts and not (whole or backend.batches):
        return "its kernels multiply two matrices, none of them empty: no batch axis"
    return reason
