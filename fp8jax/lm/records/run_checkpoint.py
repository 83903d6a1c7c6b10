"""What a checkpoint of a run contains, for those who write it and those who read parts of it.

Items: `params`; `state` (step, optimizer state, key); one for each part that only some configs have
(lm/training/optional_state.py). The JSON record `meta`: version, config, fingerprint of the data,
position in the data, what recovery has spent, and the SwiGLU amaxes of the last validations. A
conversion writes `params` alone, and a meta with version, `converted_from` and `names`.
"""

from typing import Any

from fp8jax.lm.records.config_keys import with_new_keys

# Raise it when items or meta change. 1 was never released; 3 made `params` an item of its own.
CHECKPOINT_VERSION = 3

PARAMS = "params"  # name of the item
CONVERTED_FROM = "converted_from"  # key of the meta of a conversion: the folder
NAMES = "names"  # key of the meta of a conversion: how the folder named its tensors


def today(meta: dict[str, Any]) -> dict[str, Any]:
    """Returns a meta whose config has the keys of today, whenever it was written."""
    return meta | {"config": with_new_keys(meta["config"])} if "config" in meta else meta


def require_version(step: int, meta: dict[str, Any]) -> None:
    """Raises ValueError unless this version wrote the checkpoint."""
    version = meta["version"] if "version" in meta else 1
    if version != CHECKPOINT_VERSION:
        raise ValueError(
            f"the checkpoint of step {step} in this workdir has version {version}, and this fp8jax"
            f" reads version {CHECKPOINT_VERSION}: take another --workdir, or resume it with the"
            " fp8jax that wrote it"
        )
