"""`models check`: whether a drafter fits a target, and how the two would run, from configs alone.

The target's modules are built without weights, and one forward without numbers shows what its
layers ask for. What only loading can show is named, not guessed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from blockdraft.cache.kv import KVLayer
from blockdraft.cache.paged_kv import page_bytes
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.cache.states import StateCache
from blockdraft.hub.folder import INDEX_NAME
from blockdraft.models.attention.exact import EXACT_ATTENTION
from blockdraft.models.layers.recurrent import cache_argument, is_recurrent, mixers, new_cache
from blockdraft.models.supported import (
    check_supported,
    quantization_of,
    quantized_by,
    varying_rope_type,
)
from blockdraft.models.target.loading import target_without_weights
from blockdraft.models.target.paged_support import NotPaged, layer_shapes
from blockdraft.models.target.transformers import replace_attention
from blockdraft.speculate.drafters.shapes import DrafterShape, read_shape

RunPath = Literal["paged", "one after another", "recurrent", "recurrent, one after another"]
"""All sequences in one forward, or one; recurrent layers go token by token in both."""

LATER = (
    "whether rows are independent in this precision (tested at the first load, unless --exact is "
    "off)",
    "how much drafting gains (`blockdraft generate --compare` times it)",
)
"""What no config says."""


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a target's config says of how it would run.

    Memory in bytes, None where only loading tells: weights, keys and values of a token, states of
    a sequence (each candidate of a step takes at most as much again).
    """

    architecture: str
    num_layers: int
    path: RunPath
    path_reason: str | None
    trees: bool
    quantization: str | None
    missing: str | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    state_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class DrafterFacts:
    """What a drafter's config says; memory as in TargetFacts. See DrafterShape."""

    kind: str
    layout: str
    block_size: int | None
    mask_token_id: int | None
    longest_path: int
    target_layer_ids: tuple[int, ...]
    guessed_tokens: int
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The verdict; `reason` says why not. `later` is what only loading shows."""

    fits: bool
    reason: str | None
    target: TargetFacts
    drafter: DrafterFacts
    dtype: str
    later: tuple[str, ...] = LATER

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"block_size": self.drafter.block_size}


def examine_fit(
    target: Path, drafter: Path, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Fit:
    """Compare two folders of which only configs need to be there.

    Raises:
        ModelError: one of them cannot be run at all; says why, and the remedy.
    """
    model = target_without_weights(target, trust_remote_code=trust_remote_code).to(dtype)
    shape = read_shape(drafter, model, dtype, trust_remote_code=trust_remote_code)
    return Fit(
        fits=shape.refusal is None,
        reason=shape.refusal,
        target=_target_facts(model, target, dtype),
        drafter=_drafter_facts(shape, dtype),
        dtype=str(dtype).removeprefix("torch."),
        later=(*shape.later, *LATER),
    )


def _target_facts(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> TargetFacts:
    """Raises ModelError for a model that no path runs."""
    exact = varying_rope_type(model) is None
    check_supported(model, (), exact=exact)
    recurrent = is_recurrent(model)
    mixers(model)
    cache_argument(model)
    quantization, missing = _quantization(model)
    kv_bytes: int | None
    state_bytes, reason = None, None
    path: RunPath = "recurrent" if recurrent else "paged"
    # Experts as products of all of them: which ones are chosen depends on numbers.
    model.set_experts_implementation("batched_mm")
    try:
        kv_bytes = page_bytes(layer_shapes(model), dtype) // PAGE_SIZE
        if recurrent:
            state_bytes = _cached_bytes(model, dtype)[1]
    except NotPaged as error:
        own_attention = model.config._attn_implementation
        replace_attention(model, EXACT_ATTENTION)
        model.set_attn_implementation(own_attention)
        path = "recurrent, one after another" if recurrent else "one after another"
        reason = str(error)
        kv_bytes, state_bytes = _cached_bytes(model, dtype)
    return TargetFacts(
        architecture=type(model).__name__,
        num_layers=model.config.get_text_config().num_hidden_layers,
        path=path,
        path_reason=reason,
        trees=not recurrent,
        quantization=quantization,
        missing=missing,
        weight_bytes=_weight_bytes(model, folder, dtype, is_quantized=quantization is not None),
        kv_bytes_per_token=kv_bytes,
        state_bytes=state_bytes,
    )


def _cached_bytes(model: PreTrainedModel, dtype: torch.dtype) -> tuple[int | None, int | None]:
    """Of a token's keys and values, and of a sequence's states, from one step without numbers."""
    cache = new_cache(model)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    # What a model raises that asks for numbers.
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return None, None
    held = [layer for layer in cache.layers if isinstance(layer, KVLayer) and layer.is_initialized]
    sizes = [t.shape[1] * t.shape[3] for layer in held for t in (layer.keys, layer.values)]
    states = cache.num_state_bytes if isinstance(cache, StateCache) else None
    return sum(sizes) * dtype.itemsize, states


def _quantization(model: PreTrainedModel) -> tuple[str | None, str | None]:
    """(method, what transformers lacks to load it)."""
    method = quantized_by(model.config)
    if method is None:
        return None, None
    try:
        AutoHfQuantizer.from_config(
            quantization_of(model.config), pre_quantized=True
        ).validate_environment(device_map=None, dtype=model.dtype)
    # transformers raises any type here: an absent package, an absent GPU.
    except Exception as error:
        return method, str(error).strip().split("\n")[0]
    return method, None


def _weight_bytes(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype, *, is_quantized: bool
) -> int | None:
    """In memory: what the modules count, or for quantized ones what the files have."""
    if not is_quantized:
        num_weights: int = sum(p.numel() for p in model.parameters())
        return num_weights * dtype.itemsize
    index = folder / INDEX_NAME
    if index.is_file():
        metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata") or {}
        size: int | None = metadata.get("total_size")
        return size
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None


def _drafter_facts(shape: DrafterShape, dtype: torch.dtype) -> DrafterFacts:
    return DrafterFacts(
        kind=shape.kind,
        layout=shape.layout,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        longest_path=shape.longest_path,
        target_layer_ids=shape.target_layer_ids,
        guessed_tokens=shape.guessed_tokens,
        weight_bytes=shape.num_weights * dtype.itemsize,
        kv_bytes_per_token=round(shape.page_bytes / PAGE_SIZE),
    )
