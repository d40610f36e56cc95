"""Attention whose rows do not depend on the rows beside them, and transformers' own.

`scaled_dot_product_attention` picks kernels and splits by the number of queries, so a row's bits
change with its company. Here a row is computed by a kernel that knows nothing of the others; where
there is none, by a batched matrix product, a float32 softmax over a padded number of keys, and a
second product. transformers models call it through their attention interface.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import TiledAttention, kernels_for_heads
from blockdraft.models.elementwise import in_whole_vectors
from blockdraft.models.exact import row_rule

EXACT_ATTENTION = "blockdraft_exact"
STOCK_ATTENTION = "blockdraft_stock"


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Row-invariant attention of one sequence, for transformers' attention interface.

    query: [1, heads, q, head_dim]; key, value: [1, kv_heads, keys, head_dim];
    attention_mask: additive, [1, 1, q, keys]; s_aux: sink logits [heads].
    Returns [1, q, heads, head_dim] and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bias = None if attention_mask is None else attention_mask[0]
    kernels = kernels_for_heads(query)
    is_plain = key.shape == value.shape and _is_plain_bias(bias, query.shape[2], key.shape[2])
    if kernels is not None and is_plain:
        return _tiled(kernels, query[0], key[0], value[0], bias, scale, softcap, s_aux)[None], None
    heads = query.view(key.shape[1], -1, *query.shape[2:])
    output = grouped_attention(heads[:, None], key[0], value[0], bias, scale, softcap, s_aux)
    return output[:, 0].flatten(0, 1).transpose(0, 1)[None], None


def _is_plain_bias(bias: Tensor | None, num_rows: int, num_keys: int) -> bool:
    """True for what the kernels read: one float32 mask for all heads. Models may make others."""
    return bias is None or (
        bias.dtype == torch.float32
        and bias.shape == (1, num_rows, num_keys)
        and bias.stride(-1) == 1
    )


def _tiled(
    kernels: Library,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """The same without the batch: the keys are one long page, and the bias says who is seen."""
    num_rows, num_keys = query.shape[1], key.shape[1]
    plan = TiledAttention(
        num_rows, [(0, num_rows, 0)], num_keys, bias=None if bias is None else bias[0]
    )
    # In whole buffers this copies nothing.
    return plan.attend(kernels, query, key.contiguous(), value.contiguous(), scale, softcap, s_aux)


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Row-invariant attention of b sequences, query heads grouped by the K/V head they share.

    query: [kv_heads, b, group, q, head_dim]; key, value: [kv_heads * b, keys, head_dim];
    bias: added to the scores, [b, q, keys], or None; s_aux: sink logits [kv_heads * group].
    Returns [kv_heads, b, group, q, head_dim].
    """
    kv_heads, num_sequences, group, q_len, head_dim = query.shape
    # All query heads of a K/V head are rows of one product: no copy of K/V per head.
    rows = query.reshape(kv_heads * num_sequences, group * q_len, head_dim)
    is_exact = math.frexp(scale)[0] == 0.5
    if is_exact:  # a power of two rounds nothing, so the smaller tensor may be scaled
        rows = rows * scale
    scores = _scores(rows, key).to(softmax_dtype(query.dtype))
    if not is_exact:
        scores *= scale
    if softcap is not None:
        scores = in_whole_vectors(torch.tanh, scores.div_(softcap)).mul_(softcap)
    scores = scores.view(kv_heads, num_sequences, group, q_len, -1)
    if bias is not None:
        scores += bias[:, None]
    weights = _softmax(scores, s_aux).to(value.dtype)
    weights = weights.view(kv_heads * num_sequences, group * q_len, -1)
    output = _weighted_sum(weights, value)
    # A hidden key or value that is no number leaves its mark on every row: 0 times it is none.
    if bias is not None and not output.sum().isfinite():
        hidden = (bias == -torch.inf)[:, None].expand(scores.shape)
        weights = _softmax(scores.masked_fill_(hidden, -torch.inf), s_aux).to(value.dtype)
        output = _sum_of_seen(weights.view(output.shape[0], output.shape[1], -1), value, hidden)
    return output.view(*query.shape[:-1], -1)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """[kv_heads, rows, head_dim] times [kv_heads, keys, head_dim], keys in fixed tiles."""
    tile, num_keys = row_rule(key.dtype).key_tile, key.shape[1]
    if num_keys <= tile:
        return torch.bmm(query, key.transpose(1, 2))
    scores = query.new_empty(*query.shape[:2], num_keys)
    for start in range(0, num_keys, tile):
        end = start + tile
        scores[:, :, start:end] = torch.bmm(query, key[:, start:end].transpose(1, 2))
    return scores


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """[kv_heads, rows, keys] times [kv_heads, keys, head_dim], keys in tiles of fixed borders."""
    tile, num_keys = row_rule(value.dtype).key_tile, value.shape[1]
    if num_keys <= tile:
        return torch.bmm(weights, value)
    # The sum over tiles rounds once, not per tile.
    output = torch.bmm(weights[:, :, :tile], value[:, :tile]).to(softmax_dtype(value.dtype))
    for start in range(tile, num_keys, tile):
        end = start + tile
        output += torch.bmm(weights[:, :, start:end], value[:, start:end])
    return output.to(value.dtype)


def _sum_of_seen(weights: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """`_weighted_sum` in which a value that is no number counts only for rows that see it.

    For the other rows it has the bits of `_weighted_sum` with any number in that place.
    hidden: [kv_heads, b, group, q, keys].
    """
    broken = ~value.isfinite()
    output = _weighted_sum(weights, value.masked_fill(broken, 0.0))
    seen = torch.bmm(hidden.logical_not().reshape(weights.shape).float(), broken.float())
    return output.masked_fill_(seen > 0, torch.nan)


def _softmax(scores: Tensor, s_aux: Tensor | None) -> Tensor:
    """Softmax over the keys of [kv_heads, b, group, q, keys].

    A sink takes its share of the sum and is dropped.
    """
    if s_aux is None:
        return scores.softmax(dim=-1)
    sink = s_aux.to(scores.dtype).view(scores.shape[0], 1, scores.shape[2], 1, 1)
    sink = sink.expand(*scores.shape[:4], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1].contiguous()


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of scores and weights before they are rounded."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `scaled_dot_product_attention`; shapes as above, the mask boolean.

    It knows neither soft caps nor sinks, and would leave sinks out without a word.
    """
    if softcap is None and s_aux is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    bias = _as_bias(attention_mask, query.dtype)
    return exact_attention(module, query, key, value, bias, softcap=softcap, s_aux=s_aux, **kwargs)


def _full_mask(*args: Any, **kwargs: Any) -> Tensor:
    """The model's own mask rule as boolean [1, 1, q, keys].

    Never None: transformers leaves the mask out where no key lies ahead of a query, and its cache
    would then hold no padding. Ours hands out whole buffers.
    """
    kwargs["allow_is_causal_skip"] = False
    visible: Tensor | None = sdpa_mask(*args, **kwargs)
    assert visible is not None
    return visible


def _additive_mask(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
    """The same as additive [1, 1, q, keys]: made once a forward, not per layer."""
    return _as_bias(_full_mask(*args, **kwargs), dtype)


def _as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(visible.shape, dtype=softmax_dtype(dtype), device=visible.device)
    return bias.masked_fill_(~visible, -torch.inf)


AttentionInterface.register(EXACT_ATTENTION, exact_attention)
AttentionMaskInterface.register(EXACT_ATTENTION, _additive_mask)
AttentionInterface.register(STOCK_ATTENTION, stock_attention)
AttentionMaskInterface.register(STOCK_ATTENTION, _full_mask)
