"""Convolutions inside a draft block: how DFlash 2 lets slots that stand side by side agree.

One stands before every attention and MLP of a drafter, and one behind it. A channel of a slot
becomes the sum of its own value and those of the slots right before it in the block, each times a
tap. Taps are learned, and a group of channels adds what it reads off the slot's input. Before the
anchor there is nothing: no block sees another, and nothing is kept from one forward to the next.

Shapes: q slots of a block, D hidden size, K taps.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockdraft.models.draft.config import DFlash2Config

Layer = Callable[[Tensor], Tensor]


class DynamicConvolution(nn.Module):
    """The two convolutions around an attention or an MLP; fresh ones change nothing."""

    def __init__(self, hidden_size: int, config: DFlash2Config) -> None:
        super().__init__()
        num_taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        num_groups = hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * num_taps * num_groups, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let every slot pass as it is."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def around(self, layer: Layer, x: Tensor, block_size: int) -> Tensor:
        """`layer` of x [b, A * q, D] between the convolutions, for blocks of q slots."""
        blocks = x.view(x.shape[0], -1, block_size, x.shape[-1])
        before, behind = dynamic_taps(
            self.kernel_projection(blocks), self.base_kernel, self.group_size
        )
        inner = layer(convolve(blocks, before).view(x.shape))
        return convolve(inner.view(blocks.shape), behind).view(x.shape)


def dynamic_taps(projected: Tensor, base_kernel: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The taps before and behind a layer, each [.., q, K, D].

    projected: [.., q, 2 * K * D / group_size], of the layer's input. base_kernel: [2, K, D].
    """
    by_group = base_kernel.view(*base_kernel.shape[:-1], -1, group_size)
    dynamic = projected.view(*projected.shape[:-1], *by_group.shape[:-1], 1)
    taps = (by_group + dynamic).flatten(-2)
    return taps[..., 0, :, :], taps[..., 1, :, :]


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """x [.., q, D] -> the same: slot t is the sum over k of tap k of slot t times slot t - k.

    taps: [.., q, K, D].
    """
    num_slots, num_taps = taps.shape[-3:-1]
    out = x * taps[..., 0, :]
    for k in range(1, min(num_taps, num_slots)):
        out[..., k:, :].addcmul_(taps[..., k:, k, :], x[..., : num_slots - k, :])
    return out
