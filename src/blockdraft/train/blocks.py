"""Training blocks: random anchors, their masked slots, labels and attention masks.

Shapes: b sequences of S tokens, A anchors each, B slots a block (the anchor is slot 0).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.train.dataset import Batch


@dataclass(frozen=True, slots=True)
class Anchors:
    """positions: [b, A], ascending; keep: [b, A], False where a sequence has no more anchors."""

    positions: Tensor
    keep: Tensor

    def group(self, start: int, size: int) -> "Anchors":
        """The anchors start .. start + size of every sequence."""
        return Anchors(self.positions[:, start : start + size], self.keep[:, start : start + size])


@dataclass(frozen=True, slots=True)
class Blocks:
    """The slots of a batch's blocks.

    token_ids, positions: [b, A * B], the drafter's input.
    labels: [b, A, B - 1], the tokens behind the anchor.
    keep: [b, A, B - 1], True where the label exists.
    """

    token_ids: Tensor
    positions: Tensor
    labels: Tensor
    keep: Tensor


def sample_anchors(batch: Batch, num_anchors: int, generator: torch.Generator) -> Anchors:
    """Up to `num_anchors` different answer tokens per sequence whose successor is one too.

    The generator lives on the CPU, so that a seed draws the same anchors on every device.
    """
    width = batch.token_ids.shape[1]
    draws = torch.rand(batch.token_ids.shape, generator=generator).to(batch.token_ids.device)
    places = torch.arange(width, device=draws.device)
    allowed = (places >= batch.prompt_lens[:, None]) & (places + 1 < batch.lengths[:, None])
    num_anchors = min(num_anchors, width)
    best, positions = draws.masked_fill(~allowed, -1.0).topk(num_anchors, dim=1)
    keep = best >= 0
    # Surplus anchors go to the end, onto the last good one, and weigh nothing.
    positions = positions.masked_fill(~keep, width).sort(dim=1).values
    keep = positions < width
    last = (batch.lengths - 2).clamp(min=0)
    return Anchors(torch.where(keep, positions, last[:, None]), keep)


def make_blocks(batch: Batch, anchors: Anchors, block_size: int, mask_token_id: int) -> Blocks:
    """Lay a block on every anchor."""
    offsets = torch.arange(block_size, device=anchors.positions.device)
    positions = anchors.positions[:, :, None] + offsets
    exists = (positions < batch.lengths[:, None, None]) & anchors.keep[:, :, None]
    within = positions.clamp(max=batch.token_ids.shape[1] - 1)
    tokens = batch.token_ids.gather(1, within.flatten(1)).view(within.shape)
    inputs = torch.full_like(tokens, mask_token_id)
    inputs[:, :, 0] = tokens[:, :, 0]
    return Blocks(
        inputs.flatten(1), positions.flatten(1), tokens[:, :, 1:].contiguous(), exists[:, :, 1:]
    )
