"""Columns of text."""

from fp8jax.text_table import aligned


def test_columns_have_one_width_and_lines_no_spaces_at_their_ends():
    assert aligned([("a", "x"), ("bb", "")]) == ["a   x", "bb"]
    assert aligned([("a", "1", "."), ("b", "22")], right={1}) == ["a   1  .", "b  22"]
    assert aligned([]) == []
