"""Training blocks: random anchors, their masked slots, labels and attention masks.

Shapes: b sequences of S tokens, A anchors each, B slots a block (the anchor is slot 0).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.data.dataset import Batch


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where blocks begin.

    positions: [b, A], places in the rows, ascending; keep: [b, A], False where a row has no more.
    """

    positions: Tensor
    keep: Tensor

    def group(self, start: int, size: int) -> "Anchors":
        """The anchors start .. start + size of every sequence."""
        return Anchors(self.positions[:, start : start + size], self.keep[:, start : start + size])

    def rows(self, chosen: slice) -> "Anchors":
        """The anchors of some of the rows."""
        return Anchors(self.positions[chosen], self.keep[chosen])

    def num_groups(self, size: int) -> int:
        """How many groups of `size` hold all that is kept."""
        return -(-int(self.keep.any(dim=0).sum()) // size)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The slots of a batch's blocks.

    token_ids, positions: [b, A * B], the drafter's input.
    labels: [b, A, B - 1], the tokens behind the anchor.
    keep: [b, A, B - 1], True where the label exists.
    starts: [b, A], where in the row the anchor's text begins.
    """

    token_ids: Tensor
    positions: Tensor
    labels: Tensor
    keep: Tensor
    starts: Tensor


def sample_anchors(batch: Batch, num_anchors: int, generator: torch.Generator) -> Anchors:
    """Up to `num_anchors` different answer tokens per row whose successor is one of the same text.

    The generator lives on the CPU, so that a seed draws the same anchors on every device.
    """
    width = batch.token_ids.shape[1]
    draws = torch.rand(batch.token_ids.shape, generator=generator).to(batch.token_ids.device)
    allowed = torch.zeros_like(batch.is_answer)
    allowed[:, :-1] = batch.is_answer[:, :-1] & batch.is_answer[:, 1:]
    allowed[:, :-1] &= batch.documents[:, :-1] == batch.documents[:, 1:]
    num_anchors = min(num_anchors, width)
    best, positions = draws.masked_fill(~allowed, -1.0).topk(num_anchors, dim=1)
    keep = best >= 0
    # Surplus anchors go to the end, onto the last good one, and weigh nothing.
    positions = positions.masked_fill(~keep, width).sort(dim=1).values
    keep = positions < width
    last = torch.where(keep, positions, 0).amax(dim=1, keepdim=True)
    return Anchors(torch.where(keep, positions, last), keep)


def make_blocks(batch: Batch, anchors: Anchors, block_size: int, mask_token_id: int) -> Blocks:
    """Lay a block on every anchor."""
    offsets = torch.arange(block_size, device=anchors.positions.device)
    places = anchors.positions[:, :, None] + offsets
    width = batch.token_ids.shape[1]
    within = places.clamp(max=width - 1)
    tokens, documents = (
        values.gather(1, within.flatten(1)).view(within.shape)
        for values in (batch.token_ids, batch.documents)
    )
    exists = (places < width) & (documents == documents[:, :, :1]) & anchors.keep[:, :, None]
    inputs = torch.full_like(tokens, mask_token_id)
    inputs[:, :, 0] = tokens[:, :, 0]
    first = batch.positions.gather(1, anchors.positions)
    return Blocks(
        token_ids=inputs.flatten(1),
        positions=(first[:, :, None] + offsets).flatten(1),
        labels=tokens[:, :, 1:].contiguous(),
        keep=exists[:, :, 1:],
        starts=anchors.positions - first,
    )
