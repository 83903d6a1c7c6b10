"""Which consecutive layers have the same recipes."""

from typing import NamedTuple

from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipes import HIGH_PRECISION


class Stretch(NamedTuple):
    """Consecutive layers with the same recipes: layers `begin` to `end` - 1 run in `policy`."""

    begin: int
    end: int
    policy: Policy


def is_exact(policy: Policy) -> bool:
    """Whether the policy casts nothing, so that a promotion would change nothing."""
    return all(not policy.recipe(path).casts for path in MODULES)


def stretches(policy: Policy, n_layers: int) -> list[Stretch]:
    """Splits the layers into stretches with the same recipes, in order; none is empty."""
    exempt = Policy((("layers/*", HIGH_PRECISION),), name="bf16")
    first, last = policy.exempt(n_layers)
    last = n_layers - last
    parts = (
        Stretch(0, first, exempt),
        Stretch(first, last, policy.without_exemptions()),
        Stretch(last, n_layers, exempt),
    )
    return [stretch for stretch in parts if stretch.begin < stretch.end]
