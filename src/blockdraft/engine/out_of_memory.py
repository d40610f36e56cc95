"""Telling a lack of memory from other failures."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """True if a smaller step could have succeeded."""
    # On the CPU torch raises a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
