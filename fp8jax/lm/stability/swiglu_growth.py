"""Warns of SwiGLU outputs that grow over many validations, which no single step shows.

Such growth precedes the divergence of FP8 training after 200 billion tokens: two columns of the
gate and up projections align, and a few channels become outliers (arXiv 2409.12517).
"""

from collections.abc import Sequence

GROWTHS = 5  # so many validations in a row must grow
_FACTOR = 4.0  # over all of them: two binades


def growing(amaxes: Sequence[Sequence[float]]) -> list[int]:
    """Returns the layers whose SwiGLU output grew at each of the last `GROWTHS` validations.

    It must also have grown more than fourfold over them. Every validation uses the same text, so
    one amax per layer and validation shows growth without noise.

    Args:
      amaxes: [validations, layers], the amax of each layer's SwiGLU output, oldest first.

    Returns:
      Indices of layers; [] with too few validations.
    """
    last = amaxes[-GROWTHS - 1 :]
    if len(last) <= GROWTHS:
        return []
    layers = zip(*last, strict=True)
    return [
        layer
        for layer, seen in enumerate(layers)
        if all(a < b for a, b in zip(seen, seen[1:], strict=False)) and seen[-1] > _FACTOR * seen[0]
    ]
