"""Figures of number formats show what the formats are."""

import numpy as np
import pytest

from fp8jax import figures
from fp8jax.lm.figures.formats import positive_values, rounding_error
from fp8jax.numerics.formats import FORMATS
from tests.support.reference import finite_values


@pytest.mark.parametrize("name", FORMATS)
def test_positive_values_are_those_of_ml_dtypes(name):
    values = np.asarray(finite_values(name), np.float64)
    expected = np.unique(values[values > 0])
    np.testing.assert_array_equal(positive_values(name), expected)
    assert positive_values(name)[-1] == FORMATS[name].max


def test_number_lines():
    figure = figures.number_formats(["e4m3", "e2m1"])
    wide, near = figure.axes
    normal, subnormal, *_ = wide.collections
    segments = np.array(normal.get_segments())
    # 15 binades of 8 numbers, less NaN's code, from 2^-6 to 448; 7 subnormal numbers from 2^-9.
    assert len(segments) == 15 * 8 - 1 and len(subnormal.get_segments()) == 7
    assert segments[[0, -1], 0, 0].tolist() == [-6, np.log2(448)]
    assert subnormal.get_segments()[0][0, 0] == -9
    height = lambda lines: np.ptp(lines.get_segments()[0][:, 1])  # noqa: E731
    assert height(subnormal) < height(normal)
    last = near.collections[-1].get_segments()
    assert [segment[0, 0] for segment in last] == [0.5, 1, 1.5, 2, 3, 4]  # e2m1 but for its 6
    assert [text.get_text() for text in wide.get_yticklabels()] == ["e4m3", "e2m1"]
    assert [text.get_text() for text in wide.texts] == ["448", "6"]
    assert "logarithmic" in wide.get_xlabel() and "linear" in near.get_xlabel()


def test_relative_errors_by_hand():
    # Between 16 and 18 in e4m3; below half of 2^-9; above the largest number.
    error = rounding_error(np.array([16.0, 17.5, 2.0**-11, 896.0]), "e4m3")
    np.testing.assert_allclose(error, [0, 0.5 / 17.5, 1, 0.5], rtol=1e-12)


def test_relative_error_stays_below_the_dashed_line_in_the_normal_range():
    figure = figures.relative_error()
    assert len(figure.axes) == 3
    for axis, name in zip(figure.axes, ("e4m3", "e5m2", "e2m1"), strict=True):
        fmt = FORMATS[name]
        curve, bound, lower, upper = axis.get_lines()
        x, y = curve.get_xdata(), curve.get_ydata()
        inside = (x >= fmt.min_exponent) & (x <= np.log2(fmt.max))
        assert set(bound.get_ydata()) == {100 * fmt.unit_roundoff}
        assert np.nanmax(y[inside]) <= 100 * fmt.unit_roundoff < np.nanmax(y[~inside])
        assert (lower.get_xdata()[0], upper.get_xdata()[0]) == (fmt.min_exponent, np.log2(fmt.max))
        assert axis.get_title(loc="left").startswith(
            f"{name}: at most {100 * fmt.unit_roundoff:g}%"
        )
        assert axis.get_ylabel() == "error, %"
    assert "magnitude" in figure.axes[-1].get_xlabel()


def test_formats_that_are_refused():
    with pytest.raises(ValueError, match="e8m0 holds scales"):
        figures.relative_error(["e4m3", "e8m0"])
    with pytest.raises(ValueError, match="unknown format 'e3m4'"):
        figures.number_formats(["e3m4"])
