"""Which models fit the paged path: found out by one forward in which every layer reports itself."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from blockdraft.cache.paged_kv import LayerShape
from blockdraft.core.errors import ModelError
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.kernels.heads import stored_size
from blockdraft.models.attention.plan import PoolNumbers
from blockdraft.models.layers.recurrent import layers_without_keys, mixers
from blockdraft.models.supported import (
    CACHES,
    CANNOT_RUN,
    decoder_layers,
    decoder_of,
    varying_rope_type,
)

SHAPES_ATTENTION = "blockdraft_layer_shapes"

_KNOWN = {
    "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids",
    "use_cache", "output_attentions", "output_router_logits", "cache_position",
    "logits_to_keep", *CACHES,
}  # fmt: skip
"""What layers tell their attention and the paged one follows, or may ignore."""


class NotPaged(Exception):
    """The model runs on the sequential path; says why."""


class _Reports(threading.local):
    pools: dict[int, LayerShape] | None = None
    windows: set[tuple[int, int | None]]
    numbers: PoolNumbers


_reports = _Reports()


def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """kv_heads and stored size of a head of every pool; (0, 0) where a layer has no attention.

    Those of the layers come first; for what attends again, see PoolNumbers.

    Raises:
        NotPaged: a layer that attends has no K/V of its own, or none attends; its attention needs
            more than the paged one has; it takes no positions; or its rotation would depend on the
            other sequences of a forward.
        ModelError: a window holds no token; or see `mixers`.
    """
    num_layers = len(decoder_layers(model))
    varying = varying_rope_type(model)
    if varying is not None:
        raise NotPaged(
            f"its rope_type {varying!r} depends on the longest sequence of a forward pass"
        )
    mixers(model)
    empty = layers_without_keys(model)
    if len(empty) == num_layers:
        raise NotPaged("its layers keep a state and no keys, which pages are for")
    ids = torch.zeros(1, 4, dtype=torch.long, device=model.device)
    positions = torch.arange(4, device=ids.device)[None]
    with _noting_shapes(model), _noting_positions(decoder_of(model)) as reached:
        try:
            with torch.inference_mode():
                model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
        except CANNOT_RUN as error:  # its layers expect more of the attention, or a cache
            if is_out_of_memory(error):
                raise
            reason = str(error).split("\n")[0]
            raise NotPaged(f"its forward pass without a cache fails ({reason})") from error
        shapes, windows = dict(_reports.pools or {}), set(_reports.windows)
    # Others take any argument, and count positions from the start of the forward.
    if not _names_positions(model) and all(given is not positions for given in reached):
        raise NotPaged("its forward pass takes no position_ids")
    # More than the layers where each has two attentions (LongCat-Flash).
    num_pools = max(num_layers, 1 + max(shapes, default=0))
    shapes |= dict.fromkeys(empty - set(shapes), (0, 0))
    missing = sorted(set(range(num_pools)) - set(shapes))
    if missing:
        raise NotPaged(f"layer {missing[0]} has no attention with keys and values of its own")
    for index, window in windows:
        if window != _configured_window(model, index):
            raise NotPaged(f"layer {index} does not tell its attention which window it uses")
    first_again = min(0, *shapes)
    return [shapes[index] for index in (*range(num_pools), *range(first_again, 0))]


def _configured_window(model: PreTrainedModel, index: int) -> int | None:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    if kinds is None or kinds[index] == "sliding_attention":
        return window
    return None if kinds[index] in ("full_attention", "hybrid") else -1


def _names_positions(module: nn.Module) -> bool:
    return "position_ids" in signature(module.forward).parameters


@contextmanager
def _noting_positions(decoder: nn.Module) -> Iterator[list[object]]:
    """What a decoder is given as positions if it names them; its model may hand them on unnamed."""
    reached: list[object] = []
    if not _names_positions(decoder):
        yield reached
        return
    hook = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: reached.append(kwargs.get("position_ids")), with_kwargs=True
    )
    try:
        yield reached
    finally:
        hook.remove()


@contextmanager
def _noting_shapes(model: PreTrainedModel) -> Iterator[None]:
    own = model.config._attn_implementation
    _reports.pools, _reports.windows, _reports.numbers = {}, set(), PoolNumbers()
    model.set_attn_implementation(SHAPES_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
        _reports.pools = None


def _note_shapes(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Notes what the layer asks for, and answers with zeros."""
    layer: Any = module.layer_idx
    unknown = sorted(k for k, v in kwargs.items() if k not in _KNOWN and v is not None)
    if unknown:
        raise NotPaged(f"layer {layer} gives its attention {unknown[0]}, which is not known here")
    if attention_mask is not None:
        raise NotPaged(f"layer {layer} makes a mask of its own")
    if not getattr(module, "is_causal", True):
        raise NotPaged(f"layer {layer} looks ahead")
    if key.shape[-1] < value.shape[-1]:
        raise NotPaged(f"layer {layer} has values that are larger than its keys")
    assert _reports.pools is not None
    if layer < 0:
        raise NotPaged("its layers share an attention")
    window = kwargs.get("sliding_window")
    if window is not None and window < 1:
        raise ModelError(
            f"layer {layer} attends in a window of {window} tokens by the model's config.json; "
            "correct its sliding_window, which is null for no window"
        )
    _reports.pools[_reports.numbers.next(layer)] = key.shape[1], stored_size(key.shape[3])
    _reports.windows.add((layer, window))
    _, heads, rows, _ = query.shape
    return query.new_zeros(1, rows, heads, value.shape[-1]), None


AttentionInterface.register(SHAPES_ATTENTION, _note_shapes)
