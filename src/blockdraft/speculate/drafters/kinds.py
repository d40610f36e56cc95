"""The table of kinds of drafters: from a checkpoint's folder to a drafter at work.

A drafter is loaded in two steps. Its checkpoint says what it will ask of the target and how much
memory its cache takes; then the target is prepared and the memory planned; then the drafter is made
beside it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import page_bytes
from blockdraft.cache.pages import Pages
from blockdraft.core.errors import ModelError
from blockdraft.hub.model_config import ASSISTANT
from blockdraft.kernels.weights import GroupWeight
from blockdraft.models.draft.checkpoint import read_config
from blockdraft.models.draft.config_reader import (
    BLOCK_ARCHITECTURES,
    architectures_of,
    may_be_named_by_projector,
    projector_of,
)
from blockdraft.models.draft.context import DraftContexts
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.eagle3_config import ARCHITECTURE_EAGLE3
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.pair_contexts import PagedPairs
from blockdraft.models.draft.speculators_layout import MARK
from blockdraft.models.layers.quantized import weight_of
from blockdraft.models.layers.recurrent import is_recurrent
from blockdraft.models.target.loading import check_eagle3, check_pair, load_target_model
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged, layer_shapes
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.dflash2 import DFlash2Drafter
from blockdraft.speculate.drafters.diffusion import DiffusionDrafter
from blockdraft.speculate.drafters.draft_model import DraftModelDrafter
from blockdraft.speculate.drafters.eagle3 import Eagle3Drafter
from blockdraft.speculate.drafters.path_head import PathHeadDrafter
from blockdraft.text.same_tokenizer import tokenizer_difference


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A drafter's weights, before the target is prepared for it.

    feature_layers: of the target, whose outputs it wants. page_bytes: of its own cache, for each
    page of the target's memory. drafter: makes the drafter beside a target, with its cache in the
    same pages if there are any.
    """

    feature_layers: tuple[int, ...]
    page_bytes: float
    drafter: Callable[[PreTrainedModel, Pages | None], Drafter]


def block_drafter(
    model: DraftModel,
    embed_weight: Tensor | GroupWeight,
    lm_head_weight: Tensor | GroupWeight,
    contexts: DraftContexts | None = None,
    *,
    in_int8: bool = False,
) -> DFlashDrafter:
    """The drafter of a model's kind; see DFlashDrafter."""
    drafter = DFlashDrafter
    if model.config.reads_tokens:
        drafter = DiffusionDrafter
    elif model.config.dflash2 is not None:
        drafter = DFlash2Drafter
    elif model.path_head(embed_weight) is not None:
        drafter = PathHeadDrafter
    return drafter(model, embed_weight, lm_head_weight, contexts, in_int8=in_int8)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What load_checkpoint was asked for; a kind reads what concerns it."""

    folder: Path
    target: PreTrainedModel
    dtype: torch.dtype
    device: str
    in_int8: bool
    trusts: bool


Loader = Callable[[_Asked], Checkpoint]
"""Raises ModelError for what does not fit the target."""


def _load_dflash(asked: _Asked) -> Checkpoint:
    """A block-diffusion drafter: DFlash (arXiv 2602.06036) or one of its successors."""
    model = DraftModel.from_pretrained(asked.folder, asked.dtype, asked.device)
    has_own_ends = model.own_embedding is not None and model.own_head is not None
    check_pair(asked.target, model.config, has_own_ends=has_own_ends)
    _share_ends(model, asked.target)
    config, weight = model.config, model.fc.weight

    def drafter(target: PreTrainedModel, pages: Pages | None) -> Drafter:
        contexts = None if pages is None else PagedContexts(config, pages, weight)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        return block_drafter(
            model, weight_of(embedding), weight_of(head), contexts, in_int8=asked.in_int8
        )

    page_bytes = PagedContexts.page_bytes(config, weight.dtype)
    return Checkpoint(config.target_layer_ids, page_bytes, drafter)


def _share_ends(model: DraftModel, target: PreTrainedModel) -> None:
    """Drop what the checkpoint only copied from the target."""
    ends = {
        "own_embedding": target.get_input_embeddings(),
        "own_head": target.get_output_embeddings(),
    }
    for name, module in ends.items():
        own, theirs = getattr(model, name), weight_of(module)
        if own is None or not isinstance(theirs, Tensor):  # quantized: no copy of it
            continue
        if own.shape != theirs.shape or own.device != theirs.device:
            continue
        if torch.equal(own, theirs.to(own.dtype)):
            setattr(model, name, None)


def _load_eagle3(asked: _Asked) -> Checkpoint:
    """An EAGLE-3 drafter (arXiv 2503.01840)."""
    model = Eagle3Model.from_pretrained(asked.folder, asked.dtype, asked.device)
    has_embedding = model.own_embedding is not None
    layers = check_eagle3(asked.target, model.config, has_embedding=has_embedding)
    config, weight = model.config, model.fc.weight

    def drafter(target: PreTrainedModel, pages: Pages | None) -> Drafter:
        contexts = None if pages is None else PagedPairs(config, pages, weight)
        embedding = weight_of(target.get_input_embeddings())
        return Eagle3Drafter(model, embedding, layers, contexts, in_int8=asked.in_int8)

    return Checkpoint(layers, PagedPairs.page_bytes(config, weight.dtype), drafter)


def check_draft_model(
    target: PreTrainedModel, model: PreTrainedModel, folder: Path, *, trusts: bool
) -> None:
    """Refuse a language model, in a folder, that cannot draft for a target.

    Raises:
        ModelError: it has recurrent layers, or another tokenizer.
    """
    if is_recurrent(model):
        raise ModelError(
            f"the draft model {folder} has recurrent layers ({type(model).__name__}), whose state "
            "cannot be rolled back after rejected tokens; use one with attention in all layers"
        )
    difference = tokenizer_difference(Path(target.name_or_path), folder, trusts=trusts)
    if difference is not None:
        raise ModelError(
            f"the draft model does not fit the target: {difference}; use a model with the target's "
            "tokenizer, or a drafter made for this target"
        )


def _load_draft_model(asked: _Asked) -> Checkpoint:
    """A language model of the target's tokenizer, in pages of its own as many as the target's."""
    model = load_target_model(
        asked.folder, asked.dtype, asked.device, trust_remote_code=asked.trusts
    )
    check_draft_model(asked.target, model, asked.folder, trusts=asked.trusts)
    own_bytes: int | None = None
    with suppress(NotPaged):
        own_bytes = page_bytes(layer_shapes(model), model.dtype)

    def drafter(target: PreTrainedModel, pages: Pages | None) -> Drafter:
        runs: SequentialTarget | PagedTarget
        if pages is None or own_bytes is None:
            runs = SequentialTarget(model, exact=False)
        else:
            own = Pages(pages.num_pages, reuse=pages.reuse)
            runs = PagedTarget(model, own, exact=False, keep_weights=False)
        return DraftModelDrafter(runs, target.config.get_text_config().vocab_size)

    return Checkpoint((), own_bytes or 0.0, drafter)


LOADERS: Mapping[str, Loader] = {
    "dflash": _load_dflash,
    "dflash2": _load_dflash,
    "diffusion": _load_dflash,
    "dspark": _load_dflash,
    "domino": _load_dflash,
    "dfly": _load_dflash,
    "dflare": _load_dflash,
    "eagle3": _load_eagle3,
    "draft_model": _load_draft_model,
}
ARCHITECTURES: Mapping[str, str] = {
    **BLOCK_ARCHITECTURES,
    ARCHITECTURE_EAGLE3: "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
}
"""Kinds by the architecture that a published config names."""


_CAUSAL_LM = "ForCausalLM"
_DFLASH_CONFIG = "dflash_config"


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind that a checkpoint's config describes.

    EAGLE-3 has been published under many names, and also under that of the layer's model, where the
    draft vocabulary tells. Any other language model is a draft model. What names no architecture at
    all, or Gemma 4's assistant, is read as DFlash, whose reader says what it is instead.

    Raises:
        ModelError: the names of its architectures are no list.
    """
    named = architectures_of(config)
    for name in named:
        if name in ARCHITECTURES:
            return _with_projector(ARCHITECTURES[name], config)
    if config.get(MARK) is not None:
        mark = str(config[MARK])
        return mark if mark in LOADERS else "dflash"
    if any("eagle3" in name.lower() for name in named) or "eagle_config" in config:
        return "eagle3"
    is_causal_lm = any(name.endswith(_CAUSAL_LM) and not name.endswith(ASSISTANT) for name in named)
    if is_causal_lm and _DFLASH_CONFIG not in config:
        return "eagle3" if config.get("draft_vocab_size") else "draft_model"
    return "dflash"


def _with_projector(kind: str, config: Mapping[str, Any]) -> str:
    """Some drafters of the methods that follow DFlash name its architecture, and their projector.

    What contradicts itself is refused by its reader.
    """
    projector = projector_of(config)
    return str(projector) if may_be_named_by_projector(kind, projector) else kind


def load_checkpoint(
    folder: Path,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: str,
    *,
    in_int8: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a drafter of any kind in the table.

    in_int8: it is to multiply with the closest weights in int8, where it can. Only with
    `trust_remote_code` is code of the folder run, which a draft model may need.

    Raises:
        ModelError: the folder is incomplete, its kind is unknown, or it does not fit the target.
    """
    load = LOADERS[kind_of(read_config(folder))]
    return load(_Asked(folder, target, dtype, device, in_int8, trust_remote_code))
