"""Heads of any size: zeros behind them make them as wide as kernels take them.

Zeros change no score and no sum. Both paths fill up alike, so that their bits agree.
"""

import torch.nn.functional as F
from torch import Tensor

STEP = 16
"""Numbers that kernels take at once."""


def stored_size(head_dim: int) -> int:
    """What a key or value of this size takes where it is kept."""
    return head_dim + -head_dim % STEP


def filled(heads: Tensor, size: int) -> Tensor:
    """[.., head_dim] -> [.., size], zeros behind. Itself if it is that wide."""
    missing = size - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads
