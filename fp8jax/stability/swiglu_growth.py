"""TODO docstring."""

from collections.abc import Sequence

# What grows for long ------------------------------------------------------------------------------

GROWTHS = 5  # validations in a row


_FACTOR = 4.0  # two binades


def growing(amaxes: Sequence[Sequence[float]]) -> list[int]:
    """Layers whose SwiGLU output grew at each of the last `GROWTHS` validations, and fourfold.

    Such growth precedes the divergence that FP8 training shows after 200 billion tokens, where two
    columns of gate and up align and a few channels become outliers (arXiv 2409.12517). Validation
    sees the same text each time, so that one value a layer and validation says it without noise.

    Args:
      amaxes: [validations, layers], the largest magnitudes, the oldest first.
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
