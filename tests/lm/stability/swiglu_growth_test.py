"""When the outputs of SwiGLU are said to grow."""

from fp8jax.lm.stability.swiglu_growth import growing


def test_growth_is_five_rises_in_a_row_and_fourfold():
    slow, steady = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0], [7.0] * 6
    fast = [1.0, 1.5, 2.0, 3.0, 4.0, 4.5]
    dip = [1.0, 9.0, 8.0, 16.0, 32.0, 64.0]
    validations = list(zip(slow, fast, steady, dip, strict=True))
    assert growing(validations) == [1]
    assert growing([(4.0**i,) for i in range(5)]) == []  # too few
    assert growing([(4.0**i,) for i in range(6)]) == [0]
    assert growing([(0.1, 0.1, 0.1, 0.1), *validations]) == [1]  # only the last six count
    assert growing([(x,) for x in (1.0, 2.0, 4.0, float("nan"), 16.0, 32.0)]) == []
    assert growing([]) == []


def test_nothing_grows_before_there_can_have_been_five_rises():
    for count in range(6):
        assert growing([(4.0**i, 9.0**i) for i in range(count)]) == []
