"""The chains of a pipeline: in which precision a model is pre-trained, fine-tuned and exported."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fp8jax.lookup import lookup
from fp8jax.numerics.names import as_policy

BASELINE = "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """The precisions of a model on its way, as names of policies.

    Attributes:
      cpt: of continual pre-training.
      sft: of both stages of fine-tuning.
      export: of the exported model, in which it is also evaluated.
    """

    cpt: str
    sft: str
    export: str

    @property
    def name(self) -> str:
        return joined(self.cpt, self.sft, self.export)

    @property
    def trained(self) -> str:
        """What names the trained model: chains that only export differently share it."""
        return joined(self.cpt, self.sft)


def joined(*precisions: str) -> str:
    """Returns the name of a sequence of precisions, which is also the name of a folder."""
    parts = precisions[:1] if len(set(precisions)) == 1 else precisions
    return "+".join(part.replace("/", "_") for part in parts)


def read_chains(precisions: Sequence[Any], chains: Sequence[Any]) -> tuple[Chain, ...]:
    """Returns one chain for each precision, then those that change it; the baseline's is first.

    Raises:
      ValueError: there is none but the baseline, a policy is unknown or cannot be exported, a chain
        has not three precisions, or one is named twice.
    """
    found = [Chain(cpt=name, sft=name, export=name) for name in precisions]
    for chain in chains:
        if isinstance(chain, str) or len(chain) != 3:
            raise ValueError(
                f"chains: {chain!r} must be three precisions, of pre-training, fine-tuning, export"
            )
        found.append(Chain(**dict(zip(("cpt", "sft", "export"), chain, strict=True))))
    for chain in found:
        for name in (chain.cpt, chain.sft, chain.export):
            if not isinstance(name, str):
                raise ValueError(f"precisions and chains name policies, and {name!r} is no name")
            as_policy(name)
        export_format(chain.export)
    names = [chain.name for chain in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"precisions and chains name {', '.join(twice)} twice")
    if BASELINE not in names:
        raise ValueError(f"precisions lack {BASELINE}, which the others are compared with")
    return tuple(sorted(found, key=lambda chain: chain.name != BASELINE))


def export_format(precision: str) -> str:
    """Returns the format in which a model of this policy is exported (lm/interop/export.py).

    Raises ValueError if servers have no format for its weights.
    """
    return lookup("precision with an export format", precision, _EXPORTS)


_EXPORTS = {
    "bf16": "bf16",
    "fp8_block": "fp8_block",
    "fp8_block_ue8m0": "fp8_block",
    "fp8_rowwise": "compressed_tensors",
    "fp8_rowwise_wgrad_bf16": "compressed_tensors",
}  # the scales of FP8 follow the policy
