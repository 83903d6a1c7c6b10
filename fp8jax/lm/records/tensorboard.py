"""Opens TensorBoard's files, without importing torch.

tensorboardX imports torch where that is installed, for methods that take tensors. A run writes
Python numbers only, and the import took 4 of the 6 seconds in which a command imports its modules.
"""

import sys
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    import tensorboardX
else:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import tensorboardX
    finally:
        del sys.modules["torch"]


_SPEED = ("step_s", "tokens_per_s", "mfu", "peak_memory_bytes")


def tag(name: str) -> str:
    """Returns the name of a curve: TensorBoard groups curves by what is before the first slash."""
    if name.startswith("valid_"):
        return f"validation/{name}"
    if "/" in name:
        return name
    return f"speed/{name}" if name in _SPEED else f"training/{name}"


def open_tensorboard(directory: Path, first_step: int) -> Any:
    """Returns a `tensorboardX.SummaryWriter` of a directory, which is created if it is missing.

    Args:
      first_step: TensorBoard's files cannot be shortened; points from this step on that they hold
        already are hidden. 0 for a fresh run.
    """
    return tensorboardX.SummaryWriter(str(directory), purge_step=first_step)
