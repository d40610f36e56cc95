"""Who sees whom in a draft forward."""

import torch
from torch import Tensor

from blockdraft.models.draft.config import AttentionKind, DraftConfig


def block_masks(
    config: DraftConfig,
    anchors: Tensor,
    block_size: int,
    num_context: int,
    starts: Tensor | None = None,
) -> dict[AttentionKind, Tensor | None]:
    """Masks of many blocks in one forward: several sequences, several blocks of each.

    A slot sees the context strictly before its anchor, of its own text, and its own block.

    Args:
        config: of the drafter.
        anchors: [b, A].
        block_size: B.
        num_context: C, tokens of context given to the forward, counted from position 0.
        starts: [b, A], where the texts of the anchors begin, if several share a context.

    Returns:
        for each kind of layer [b, 1, A * B, C + A * B], True where a slot may attend.
    """
    num_anchors, device = anchors.shape[1], anchors.device
    slots = anchors[:, :, None] + torch.arange(block_size, device=device)
    queries = slots.flatten(1)[:, :, None]
    context = torch.arange(num_context, device=device)
    keys = torch.cat((context.expand(len(anchors), -1), slots.flatten(1)), dim=1)[:, None]
    own = torch.arange(num_anchors, device=device).repeat_interleave(block_size)
    before = context < anchors.repeat_interleave(block_size, dim=1)[:, :, None]
    if starts is not None:
        before = before & (context >= starts.repeat_interleave(block_size, dim=1)[:, :, None])
    same = (own[:, None] == own).expand(len(anchors), -1, -1)
    visible = torch.cat((before, same), dim=2)
    masks: dict[AttentionKind, Tensor | None] = {}
    for kind in sorted(set(config.layer_types)):
        masks[kind] = (visible & config.visibility(kind).sees(queries, keys))[:, None]
    return masks
