"""A pytest plugin that adds one recipe to the tables, as a user would: recipe_test.py runs it."""

import pytest

NAME = "fp8_tile64"


def pytest_configure(config):
    """After conftest.py, which must see the library first."""
    from fp8jax.numerics.formats import FORMATS
    from fp8jax.numerics.policy import POLICIES, Policy
    from fp8jax.numerics.recipe import Cast, Recipe
    from fp8jax.numerics.recipes import RECIPES
    from fp8jax.numerics.scales import SCALES
    from fp8jax.numerics.tiles import Tile

    cast = Cast(format=FORMATS["e4m3"], tile=Tile(1, 64), scale=SCALES["pow2"])
    RECIPES[NAME] = Recipe(
        name=NAME, fwd_x=cast, fwd_w=cast, dgrad_g=cast, dgrad_w=cast, wgrad_x=cast, wgrad_g=cast
    )
    POLICIES[NAME] = Policy((("layers/*", RECIPES[NAME]),), name=NAME)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Lists all tests, also those that -k leaves out."""
    print("", *(item.nodeid for item in items), sep="\n")
