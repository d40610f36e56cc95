"""Attention of draft blocks: dense, with a mask that is added to the scores, or block-sparse.

Decoding and training on a CPU take the dense form. Training on a GPU has thousands of slots that
see little of each other; flex attention (arXiv 2412.05496) skips the tiles that are masked out.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from blockdraft.models.draft.config import AttentionKind, DraftConfig

ScoreMask = Tensor | BlockMask | None
"""What a slot may see: numbers to add to the scores, [b or 1, 1, q, keys]; tiles; or everything."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: ScoreMask) -> Tensor:
    """q: [b, heads, q, head_dim], k and v: [b, kv_heads, keys, head_dim] -> as q."""
    if isinstance(mask, BlockMask):
        result: Tensor = _flex(q.device.type)(q, k, v, block_mask=mask, enable_gqa=True)
        return result
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@cache
def _flex(device_type: str) -> Any:
    # Without the compiler it makes all scores, which is of use for a comparison only.
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


def flex_masks(
    config: DraftConfig, anchors: Tensor, block_size: int, num_context: int, starts: Tensor
) -> dict[AttentionKind, BlockMask]:
    """The masks of `masks.block_masks`, as tiles."""
    sizes = (len(anchors), None, anchors.shape[1] * block_size)
    num_keys = num_context + sizes[2]
    return {
        kind: create_block_mask(
            _rule(config, kind, anchors, block_size, num_context, starts),
            *sizes,
            num_keys,
            device=anchors.device,
            _compile=anchors.device.type == "cuda",  # or it makes the whole mask first
        )
        for kind in sorted(set(config.layer_types))
    }


def _rule(
    config: DraftConfig,
    kind: AttentionKind,
    anchors: Tensor,
    block_size: int,
    num_context: int,
    starts: Tensor,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether the slot `query` of row `b` sees the key `key`; all are index tensors."""
    visibility = config.visibility(kind)

    def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, (key - num_context).clamp(min=0)
        place = anchors[b, block] + query % block_size
        in_context = key < num_context
        key_place = torch.where(in_context, key, anchors[b, slot // block_size] + slot % block_size)
        before = in_context & (key < anchors[b, block]) & (key >= starts[b, block])
        visible = before | (~in_context & (slot // block_size == block))
        return visible & visibility.sees(place, key_place)

    return sees
