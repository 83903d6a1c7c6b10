"""When the outputs of SwiGLU are said to grow."""

import math

import numpy as np
import pytest

from fp8jax.lm.stability.swiglu_growth import FLOOR, GROWTHS, growing


def amaxes_of(sizes, aligned):
    """[validations, 1]: the amax of SwiGLU for kernels that grow, of a layer on normal inputs.

    x_BD is the normalized input, gate_DF and up_DF the kernels, with columns of unit norm times
    `size`. In an aligned layer one channel of `up` has become that of `gate`.
    """
    rng = np.random.default_rng(0)
    x_BD = rng.standard_normal((512, 64))
    gate_DF, up_DF = (rng.standard_normal((64, 128)) / 8 for _ in range(2))
    if aligned:
        up_DF[:, 3] = gate_DF[:, 3]
    gates, ups = x_BD @ gate_DF, x_BD @ up_DF
    return [(np.abs(s * gates / (1 + np.exp(-s * gates)) * s * ups).max(),) for s in sizes]


def test_growth_is_five_rises_in_a_row_and_fourfold():
    slow, steady = [40.0, 48.0, 56.0, 64.0, 72.0, 80.0], [7.0] * 6
    fast = [40.0, 60.0, 80.0, 120.0, 160.0, 180.0]
    dip = [40.0, 360.0, 320.0, 640.0, 1280.0, 2560.0]
    validations = list(zip(slow, fast, steady, dip, strict=True))
    assert growing(validations) == [1]
    assert growing([(4.0**i,) for i in range(5)]) == []  # too few
    assert growing([(4.0**i,) for i in range(6)]) == [0]
    assert growing([(0.1, 0.1, 0.1, 0.1), *validations]) == [1]  # only the last six count
    assert growing([(x,) for x in (40.0, 80.0, 160.0, math.nan, 640.0, 1280.0)]) == []
    assert growing([]) == []


def test_nothing_grows_before_there_can_have_been_five_rises():
    for count in range(6):
        assert growing([(4.0**i, 9.0**i) for i in range(count)]) == []


def test_growth_from_small_weights_to_their_scale_is_none():
    """Of 512 x 128 outputs one exceeds a = 17 with a probability below 2^16 exp(-17) = 0.003."""
    healthy = amaxes_of([0.23 * 1.35**i for i in range(GROWTHS)] + [1.0], aligned=False)
    assert healthy[0][0] < 1 and healthy[-1][0] < 17
    assert healthy == sorted(healthy) and healthy[-1][0] > 4 * healthy[0][0]
    assert growing(healthy) == []


def test_a_channel_whose_gate_and_up_align_is_said():
    outliers = amaxes_of([1.5 * 1.35**i for i in range(GROWTHS + 1)], aligned=True)
    assert growing(outliers) == [0]


@pytest.mark.parametrize("start", [1.0, FLOOR])
def test_growth_counts_from_the_floor(start):
    """Up to four floors nothing is said, wherever below the floor it began."""
    rises = [(start * (1 + i / 100),) for i in range(GROWTHS)]
    assert growing([*rises, (4 * FLOOR,)]) == []
    assert growing([*rises, (math.nextafter(4 * FLOOR, math.inf),)]) == [0]
