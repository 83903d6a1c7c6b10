"""Backends: how operands are quantized and multiplied, and which backend runs where.

A backend has two functions. `quantize` turns one array into the operands that its GEMMs need, one
for each `CastRequest`. `matmul` multiplies two operands. One with kernels for a gated MLP has a
third, `quantize_swiglu`.

    emulated   emulated.py: quantizes, dequantizes and multiplies exactly, on every device and for
               every recipe
    xla        xla.py: XLA's FP8 GEMMs; on Blackwell also its block-scaled MXFP8 and NVFP4 GEMMs
    pallas     pallas.py: the Hopper kernels of kernels/
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import logging

from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.gemm.backends.emulated import matmul_emulated, quantize_each
from fp8jax.gemm.backends.operands import CastRequest, Operand, QuantizedOperand, Quantizer
from fp8jax.gemm.backends.refusals import emulated_refuses, pallas_refuses, xla_refuses
from fp8jax.gemm.backends.xla import matmul_xla
from fp8jax.kernels import requirements
from fp8jax.kernels.swiglu import Producer
from fp8jax.lookup import lookup
from fp8jax.numerics.recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How operands are quantized and multiplied.

    Attributes:
      name: the backend's key in `BACKENDS`.
      quantize: (array [..., rows, columns], requests) -> one operand per request, and the array's
        float32 amax if a kernel computed it, else None.
      matmul: (a, b, dtype, accumulation) -> [..., M, N]; at least one operand is a
        `QuantizedOperand`, and accumulation is an entry of `ACCUMULATIONS`.
      refuses: (recipe, device) -> why the backend cannot run the recipe there, or None.
      batches: whether its GEMMs accept a batch axis and empty operands.
      dequantizes: whether they multiply codes times scales, which are wider than codes.
      quantize_swiglu: (producer, its sources, requests for each result) -> what `quantize` returns
        for each result of the producer, without storing the results; None if the backend has no
        such kernel.
      missing: () -> why this process cannot use the backend on any device, or None.
    """

    name: str
    quantize: Quantizer
    matmul: Callable[[Operand, Operand, jnp.dtype, str], jax.Array]
    refuses: Callable[[Recipe, Device], str | None]
    batches: bool = True
    dequantizes: bool = False
    quantize_swiglu: (
        Callable[..., tuple[tuple[tuple[QuantizedOperand, ...], jax.Array | None], ...]] | None
    ) = None
    missing: Callable[[], str | None] = lambda: None


# Importing Pallas is slow, so these functions import it when a program first uses a kernel.


def _pallas_quantize(
    x: jax.Array, requests: tuple[CastRequest, ...]
) -> tuple[tuple[QuantizedOperand, ...], jax.Array | None]:
    from fp8jax.gemm.backends import pallas

    return pallas.quantize_fused(x, requests)


def _pallas_matmul(a: Operand, b: Operand, dtype: jnp.dtype, accumulation: str) -> jax.Array:
    from fp8jax.gemm.backends import pallas

    return pallas.matmul_pallas(a, b, dtype, accumulation)


def _pallas_quantize_swiglu(
    producer: Producer,
    sources: tuple[jax.Array, ...],
    each: tuple[tuple[CastRequest, ...], ...],
) -> tuple[tuple[tuple[QuantizedOperand, ...], jax.Array | None], ...]:
    from fp8jax.gemm.backends import pallas

    return pallas.quantize_swiglu(producer, sources, each)


BACKENDS: dict[str, Backend] = {
    "emulated": Backend(
        name="emulated",
        quantize=quantize_each,
        matmul=matmul_emulated,
        refuses=emulated_refuses,
        dequantizes=True,
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
    ),
}


def choose_backend(
    backend: str | None, recipe: Recipe, device: Device | None = None, *, whole: bool = True
) -> Backend:
    """Returns the backend of that name, or for None the fastest that can run the recipe.

    Args:
      backend: a key of `BACKENDS`, or None.
      device: where the recipe will run; None for this process's default device.
      whole: whether each GEMM multiplies two non-empty matrices without a batch axis.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: if the named backend cannot run the recipe; the message says why.
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
        return BACKENDS["emulated"]  # nothing to quantize: all backends are the same
    choice, why = _fastest(recipe, device, whole)
    if device == here:
        _log_choice(recipe.name, choice, why)
        missing = BACKENDS["pallas"].missing()
        if choice == "emulated" and missing and pallas_refuses(recipe, device) is None:
            _warn_slow(recipe.name, device.kind, missing)
    return BACKENDS[choice]


def _fastest(recipe: Recipe, device: Device, whole: bool) -> tuple[str, str]:
    """Returns the name of the fastest backend that can run the recipe, and why it is chosen."""
    if not device.fp8:
        return "emulated", f"{device.kind} has no FP8 matrix unit"
    for name in ("pallas", "xla"):
        reason = _reason_against(BACKENDS[name], recipe, device, whole)
        if reason is None:
            return name, "the matrix unit multiplies the quantized values"
    return "emulated", f"xla cannot run it: {reason}"


def _reason_against(backend: Backend, recipe: Recipe, device: Device, whole: bool) -> str | None:
    """Returns why the backend cannot run the recipe on the device, or None if it can."""
    reason = backend.refuses(recipe, device)
    if reason is None and recipe.casts and device == hardware.device():
        reason = backend.missing()
    if reason is None and recipe.casts and not (whole or backend.batches):
        return "its kernels multiply two non-empty matrices and have no batch axis"
    return reason


@functools.cache  # one warning per recipe
def _warn_slow(recipe: str, device: str, missing: str) -> None:
    logging.warning(
        "recipe %s runs EMULATED on this %s, slower than BF16, though it has kernels for it: %s."
        " JAX 0.11 needs Python 3.12 or later.",
        recipe,
        device,
        missing,
    )


@functools.cache  # one line per recipe and backend, however many GEMMs use it
def _log_choice(recipe: str, backend: str, why: str) -> None:
    logging.debug("recipe %s: backend %s (%s)", recipe, backend, why)
