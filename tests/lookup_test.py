"""Names to objects at the door: what is found, and what an error says."""

import pytest

from fp8jax.lookup import lookup, unknown

TABLE = {"fp8_block": 1, "fp8_current": 2, "bf16": 3}


def test_lookup_finds_what_there_is():
    assert [lookup("recipe", name, TABLE) for name in TABLE] == [1, 2, 3]


def test_a_falsy_entry_is_an_entry():
    assert lookup("remat policy", "none", {"none": None}) is None


def test_an_unknown_name_says_its_kind_the_near_ones_and_all_there_are():
    with pytest.raises(ValueError) as error:
        lookup("recipe", "fp8_blok", TABLE)
    message = str(error.value)
    assert message == (
        "unknown recipe 'fp8_blok'; did you mean 'fp8_block'? There are: fp8_block, fp8_current,"
        " bf16"
    )


def test_several_near_names_are_joined_nearest_first():
    message = str(unknown("recipe", "fp8_bloc", ["fp8_block", "fp8_block_ue8m0", "bf16"]))
    assert "did you mean 'fp8_block' or 'fp8_block_ue8m0'?" in message


def test_names_that_go_on_come_before_those_that_are_near():
    message = str(unknown("policy", "fp8", ["mxfp8", "fp8_delayed", "fp8_current", "fp8_amax"]))
    assert "did you mean 'fp8_delayed' or 'fp8_current' or 'fp8_amax'?" in message
    assert "unknown policy ''. There" in str(unknown("policy", "", ["mxfp8", "fp8_delayed"]))


def test_nothing_near_lists_all_without_a_guess():
    message = str(unknown("recipe", "zzz", TABLE))
    assert message == "unknown recipe 'zzz'. There are: fp8_block, fp8_current, bf16"


def test_the_error_is_returned_for_the_caller_to_raise_and_takes_any_object():
    assert isinstance(unknown("timing", 3, ("a", "b")), ValueError)
    assert "unknown timing 3." in str(unknown("timing", 3, ("a", "b")))
