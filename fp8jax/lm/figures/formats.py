"""What the number formats can represent, and what rounding to them costs."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fp8jax.lm.figures.style import panels, style
from fp8jax.numerics.formats import FORMATS, Format, FormatLike, as_format, cast

_FP8_AND_FP4 = ("e4m3", "e5m2", "e2m1")
_IN_A_BINADE = 32  # samples of the rounding error


def positive_values(fmt: FormatLike) -> np.ndarray:
    """Returns all positive finite numbers of a format, ascending, in float64 [count]."""
    known = as_format(fmt)
    steps = 2**known.mantissa  # in a binade
    significands = 1 + np.arange(steps) / steps
    largest = int(np.log2(known.max))
    normal = significands * 2.0 ** np.arange(known.min_exponent, largest + 1)[:, None]
    return np.append(np.arange(1, steps) * known.tiny, normal[normal <= known.max])


def number_formats(formats: Sequence[FormatLike] = tuple(FORMATS), *, dark: bool = False) -> Any:
    """Returns the positive numbers of each format as ticks: on a logarithmic line, then near 1.

    Short ticks are subnormal numbers, whose spacing no longer shrinks. e8m0, a format of scales,
    has all powers of two from 2^-127 to 2^127; the line shows a part of them.

    Args:
      formats: names such as "e4m3", or formats; by default all.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      ValueError: an unknown format.
      ImportError: matplotlib is not installed.

    Example:
      >>> figure = fp8jax.figures.number_formats(["e4m3", "e2m1"])
      >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
      ['e4m3', 'e2m1']
    """
    chosen = [as_format(fmt) for fmt in formats]
    with style(dark=dark) as look:
        figure, grid = panels(2, 1, height=1.4 + 0.5 * len(chosen))
        wide, near = grid[:, 0]
        signed = [fmt for fmt in chosen if fmt.signed]
        low = min((np.log2(fmt.tiny) for fmt in signed), default=-4.0) - 1
        high = max((np.log2(fmt.max) for fmt in signed), default=4.0) + 3
        for i, fmt in enumerate(chosen):
            values = positive_values(fmt)
            normal = values >= 2.0**fmt.min_exponent
            color = look.colors[i % len(look.colors)]
            exponents = np.log2(values)
            shown = (exponents >= low) & (exponents <= high)
            _ticks(wide, exponents[shown & normal], i, 0.36, color)
            _ticks(wide, exponents[shown & ~normal], i, 0.18, color)
            _ticks(near, values[values <= 4], i, 0.36, color)
            if exponents[-1] <= high:
                wide.text(exponents[-1] + 0.3, i, f"{fmt.max:g}", va="center", fontsize=7)
        wide.set_xlim(low, high)
        wide.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")
        wide.set_xlabel("magnitude, logarithmic; the number is the largest, short ticks subnormal")
        near.set_xlim(0, 4.05)
        near.set_xlabel("magnitude, linear, up to 4")
        for axis in (wide, near):
            axis.set_yticks(range(len(chosen)), [fmt.name for fmt in chosen])
            axis.set_ylim(len(chosen) - 0.5, -0.5)
            axis.tick_params(left=False)
            axis.spines["left"].set_visible(False)
        figure.suptitle("Positive numbers of each format", x=0.01, ha="left")
    return figure


def _ticks(axis: Any, places: np.ndarray, row: int, half: float, color: str) -> None:
    axis.vlines(places, row - half, row + half, color=color, linewidth=0.8)


def relative_error(formats: Sequence[FormatLike] = _FP8_AND_FP4, *, dark: bool = False) -> Any:
    """Returns the relative error of rounding to the nearest number, over the magnitude.

    One panel for each format, of `fp8jax.cast` with a scale of 1. The dashed line is the largest
    error in the normal range, 2^-(m+1) with m mantissa bits. Below that range the error grows, up
    to 100% where numbers become zero; above it numbers are clipped.

    Args:
      formats: names such as "e4m3", or formats.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      ValueError: an unknown format, or one of scales.
      ImportError: matplotlib is not installed.

    Example:
      >>> figure = fp8jax.figures.relative_error(["e4m3", "e5m2"])
      >>> len(figure.axes)
      2
    """
    chosen = [as_format(fmt) for fmt in formats]
    if scales := [fmt.name for fmt in chosen if not fmt.signed]:
        raise ValueError(f"{', '.join(scales)} holds scales: it has no rounding error of values")
    low = int(min(np.log2(fmt.tiny) for fmt in chosen)) - 2
    high = int(max(np.log2(fmt.max) for fmt in chosen)) + 3
    with style(dark=dark) as look:
        figure, grid = panels(
            len(chosen), 1, height=0.8 + 1.3 * len(chosen), sharex=True, sharey=True
        )
        for i, (fmt, axis) in enumerate(zip(chosen, grid[:, 0], strict=True)):
            exponents = np.arange(low * _IN_A_BINADE, high * _IN_A_BINADE + 1) / _IN_A_BINADE
            error = rounding_error(2.0**exponents, fmt)
            # A representable number has no error, which a logarithmic axis cannot show.
            shown = np.where(error > 0, 100 * error, np.nan)
            axis.plot(exponents, shown, color=look.colors[i % len(look.colors)], linewidth=0.9)
            axis.axhline(100 * fmt.unit_roundoff, color=look.muted, linestyle="--", linewidth=0.8)
            for edge in (fmt.min_exponent, np.log2(fmt.max)):
                axis.axvline(edge, color=look.muted, linestyle=":", linewidth=0.8)
            axis.set_title(_normal_range(fmt))
            axis.set_ylabel("error, %")
        axis.set_yscale("log")
        axis.set_ylim(0.1, 150)
        axis.set_yticks([0.1, 1, 10, 100])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlim(low, high)
        axis.xaxis.set_major_formatter(lambda x, _: f"$2^{{{x:g}}}$")
        axis.set_xlabel("magnitude of the number; dotted: ends of the normal range")
        figure.suptitle(
            "Relative error of rounding to the nearest number, scale 1", x=0.01, ha="left"
        )
    return figure


def _normal_range(fmt: Format) -> str:
    return (
        f"{fmt.name}: at most {100 * fmt.unit_roundoff:g}% in the normal range, "
        f"2^{fmt.min_exponent} to {fmt.max:g}"
    )


def rounding_error(x: np.ndarray, fmt: FormatLike) -> np.ndarray:
    """Returns |cast(x) - x| / |x| of positive numbers in float64; 1 where they become zero."""
    x = np.asarray(x, np.float32).astype(np.float64)
    rounded = np.asarray(cast(jnp.asarray(x, jnp.float32), fmt)).astype(np.float64)
    return np.abs(rounded - x) / x
