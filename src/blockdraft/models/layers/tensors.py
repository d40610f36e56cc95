"""What several modules do to tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """At least one tensor, one behind another; a single one is not copied."""
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]


def is_close(
    found: Tensor, expected: Tensor, max_error: int, dtype: torch.dtype | None = None
) -> bool:
    """Whether values differ only by their last bits.

    max_error: in units in the last place of the largest value. dtype: whose, if not the values'.
    """
    error = (found.float() - expected.float()).abs().max()
    allowed = max_error * torch.finfo(dtype or expected.dtype).eps * expected.abs().max()
    return bool(error <= allowed)


def with_fresh_strides(x: Tensor) -> Tensor:
    """The same values [..., n] with the strides of a new tensor.

    A slice such as `x[:, 1:]` of a batch of one counts as contiguous and keeps the stride of the
    longer batch. oneDNN refuses it for a linear layer in bfloat16; the fallback gives other bits,
    and took 17 times as long for the head of a small model.
    """
    return x.reshape(-1, x.shape[-1]).view(x.shape)
