"""Attention whose rows do not depend on the rows beside them, and transformers' own.

transformers models call it through their attention interface, one sequence with a cache at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.heads import filled, stored_size
from blockdraft.kernels.interface import Scoring
from blockdraft.kernels.torch.attention import softmax_dtype

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

    query: [1, heads, q, head_dim]; key: [1, kv_heads, keys, head_dim]; value: the same, or smaller
    as those of latent attention; attention_mask: additive, [1, 1, q, keys]; s_aux: sink logits
    [heads]. Returns [1, q, heads, size of a value] and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    bias = None if attention_mask is None else attention_mask[0]
    size = stored_size(key.shape[-1])
    backend = backend_for(query.dtype, query.device, [size])
    scoring = Scoring(scale, softcap, s_aux)
    queries, keys, values = (filled(heads[0], size) for heads in (query, key, value))
    output = backend.attend(queries, keys, values, bias, scoring)
    # Contiguous: some models view it in another shape.
    return output[None, ..., : value.shape[-1]].contiguous(), None


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
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
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
