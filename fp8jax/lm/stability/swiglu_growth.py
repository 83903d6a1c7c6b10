"""Warns of SwiGLU outputs that grow into outliers over many validations, which no step shows.

Such growth precedes the divergence of FP8 training after 200 billion tokens: in a few channels the
columns of gate and up align, so that silu(gate) * up becomes a square (arXiv 2409.12517).

Outputs also grow in every healthy run that begins with small weights: 0.02 sqrt(128) = 0.23 is the
size of a gate in a layer of width 128. They grow until the layer has learned its scale, and this is
no sign of alignment. So growth counts only from `FLOOR`, which a layer does not reach whose gates
and ups have variance 1 and are independent. Its outputs are less than |g u|, of normal g and u, and

    P(|g u| > a)  =  2/pi * (integral of K_0 from a)  <  exp(-a)     for a >= 1.

The largest of N outputs exceeds a with a probability below N exp(-a). With N = 2^36, four million
tokens of 16,384 channels, and a = 32, this is less than 2^-10. A gate that equals its up gives
about twice that, 2 ln N, already at variance 1, and its amax grows with the square of its weights.
"""

from collections.abc import Sequence

GROWTHS = 5  # so many validations in a row must grow
FLOOR = 32.0  # (36 + 10) ln 2 = 31.9: no unaligned layer of variance 1 has an amax above it
_FACTOR = 4.0  # over all of them: two binades


def growing(amaxes: Sequence[Sequence[float]]) -> list[int]:
    """Returns the layers whose SwiGLU output grew at each of the last `GROWTHS` validations.

    It must also have grown more than fourfold over them, counted from no less than `FLOOR`. Every
    validation uses the same text, so one amax per layer and validation shows growth without noise.

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
        if all(a < b for a, b in zip(seen, seen[1:], strict=False))
        and seen[-1] > _FACTOR * max(seen[0], FLOOR)
    ]
