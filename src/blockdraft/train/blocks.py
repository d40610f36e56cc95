"""Training blocks: random anchors, their masked slots, labels and attention masks.

Shapes: b sequences of S tokens, A anchors each, B slots a block (the anchor is slot 0).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdraft.data.dataset import Batch


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where blocks begin.

    positions: [b, A], places in the rows, ascending; keep: [b, A], False where a row has no more.
    shown: [b, A, B - 1], True for slots that show their token instead of a mask; None for none.
    """

    positions: Tensor
    keep: Tensor
    shown: Tensor | None = None

    def showing(self, shown: Tensor) -> "Anchors":
        """The same with other slots shown."""
        return replace(self, shown=shown)

    def group(self, start: int, size: int) -> "Anchors":
        """The anchors start .. start + size of every sequence."""
        return self._of(slice(None), slice(start, start + size))

    def rows(self, chosen: slice) -> "Anchors":
        """The anchors of some of the rows."""
        return self._of(chosen, slice(None))

    def _of(self, rows: slice, places: slice) -> "Anchors":
        shown = None if self.shown is None else self.shown[rows, places]
        return Anchors(self.positions[rows, places], self.keep[rows, places], shown)

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

    def reading(self, token_ids: Tensor) -> "Blocks":
        """The same with other inputs."""
        return replace(self, token_ids=token_ids)


def sample_anchors(batch: Batch, num_anchors: int, generator: torch.Generator) -> Anchors:
    """Up to `num_anchors` different answer tokens per row whose successor is one of the same text.

    A text's first token, an answer's where there is no prompt, has nothing to be drafted from.
    The generator lives on the CPU, so that a seed draws the same anchors on every device.
    """
    width = batch.token_ids.shape[1]
    draws = torch.rand(batch.token_ids.shape, generator=generator).to(batch.token_ids.device)
    allowed = torch.zeros_like(batch.is_answer)
    allowed[:, :-1] = batch.is_answer[:, :-1] & batch.is_answer[:, 1:]
    allowed[:, :-1] &= batch.documents[:, :-1] == batch.documents[:, 1:]
    allowed &= batch.positions > 0
    num_anchors = min(num_anchors, width)
    best, positions = draws.masked_fill(~allowed, -1.0).topk(num_anchors, dim=1)
    keep = best >= 0
    # Surplus anchors go to the end, onto the last good one, and weigh nothing.
    positions = positions.masked_fill(~keep, width).sort(dim=1).values
    keep = positions < width
    last = torch.where(keep, positions, 0).amax(dim=1, keepdim=True)
    return Anchors(torch.where(keep, positions, last), keep)


def make_blocks(
    batch: Batch, anchors: Anchors, block_size: int, mask_token_id: int | None
) -> Blocks:
    """Lay a block on every anchor; without a mask token its slots read their own tokens."""
    offsets = torch.arange(block_size, device=anchors.positions.device)
    places = anchors.positions[:, :, None] + offsets
    width = batch.token_ids.shape[1]
    within = places.clamp(max=width - 1)
    tokens, documents = (
        values.gather(1, within.flatten(1)).view(within.shape)
        for values in (batch.token_ids, batch.documents)
    )
    exists = (places < width) & (documents == documents[:, :, :1]) & anchors.keep[:, :, None]
    inputs = tokens
    if mask_token_id is not None:
        inputs = torch.full_like(tokens, mask_token_id)
        inputs[:, :, 0] = tokens[:, :, 0]
    if anchors.shown is not None:
        inputs[:, :, 1:] = torch.where(anchors.shown, tokens[:, :, 1:], inputs[:, :, 1:])
    first = batch.positions.gather(1, anchors.positions)
    return Blocks(
        token_ids=inputs.flatten(1),
        positions=(first[:, :, None] + offsets).flatten(1),
        labels=tokens[:, :, 1:].contiguous(),
        keep=exists[:, :, 1:],
        starts=anchors.positions - first,
    )
