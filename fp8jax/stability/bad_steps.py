"""What keeps a bad step from doing harm.

On the device, inside the compiled step, pure functions:

    is_finite, gate    a step whose loss or gradients are not finite changes nothing
    judge              that, and whether the loss is a spike among the last accepted ones

On the host, `Ladder`: which rung is tried next on a step that was rejected; the loop applies it.
And `growing`, which warns of what no single step shows.

**Spikes.** With the median m of the last accepted losses and their median distance d from it (MAD),
a loss is a spike above

    m + max(deviations * 1.4826 d, m / 50)

1.4826 d estimates a normal distribution's standard deviation. Mean and standard deviation were
rejected: one outlier among 64 raises both, and hides the next. A rejected loss never enters the
window, finite or not, so neither a NaN nor a spike of many steps moves the threshold. The price: a
loss that rises for good (other data) is rejected until the ladder's budget ends, and the run says
so. A window that spans a fast decline is wide, which makes the detector slow to cry early in a run;
and nothing is judged before half a window was accepted. m / 50: losses that hardly differ have no
spikes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

ACCEPTED, SPIKE, NON_FINITE = range(3)  # verdicts


CAUSES = {SPIKE: "spike", NON_FINITE: "non_finite"}


def is_finite(loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a step may be applied. The norm is over all gradients: one NaN among them shows."""
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def select_if(accept: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` if accepted, else `old`, leaf by leaf and bit for bit.

    Selected, never multiplied: 0 * NaN is NaN.
    """
    return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)
