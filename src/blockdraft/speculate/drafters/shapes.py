"""What a drafter's files say of it before its weights are read, for every kind in the table."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import LayerShape, page_bytes
from blockdraft.core.errors import ModelError
from blockdraft.models.draft.angelspec_layout import is_angelspec
from blockdraft.models.draft.checkpoint import read_config
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.eagle3_config import AnyDraftConfig, Eagle3Config
from blockdraft.models.draft.own_ends import has_own_embedding, has_own_ends
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.pair_contexts import PagedPairs
from blockdraft.models.draft.speculators_layout import MARK
from blockdraft.models.draft.vocabulary import read_draft_vocabulary
from blockdraft.models.target.loading import check_eagle3, check_pair, target_without_weights
from blockdraft.models.target.paged_support import NotPaged, layer_shapes
from blockdraft.speculate.drafters.kinds import check_draft_model, kind_of
from blockdraft.speculate.drafters.levels import DEPTH
from blockdraft.text.same_tokenizer import has_tokenizer


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """A drafter as its config describes it.

    refusal: why it does not fit the target; None if it does. longest_path: tokens that it proposes
    one behind another, unless told otherwise. kv_shapes: of its own keys and values, layer by
    layer; page_bytes: what they take for each page of the target's memory, with all that belongs
    to them. block_size, mask_token_id: None for a drafter that does not fill blocks. later: what
    only loading shows, as its config alone is here.
    """

    kind: str
    layout: str
    target_layer_ids: tuple[int, ...]
    longest_path: int
    guessed_tokens: int
    num_weights: int
    kv_shapes: tuple[LayerShape, ...]
    page_bytes: float
    refusal: str | None
    block_size: int | None = None
    mask_token_id: int | None = None
    later: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What read_shape was asked for, and what stands in the drafter's config."""

    folder: Path
    raw: Mapping[str, Any]
    kind: str
    target: PreTrainedModel
    dtype: torch.dtype
    trusts: bool


def read_shape(
    folder: Path, target: PreTrainedModel, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> DrafterShape:
    """The shape of a drafter of any kind, beside a target that may be without weights.

    Only with `trust_remote_code` is code of the folder run, which a draft model may need.

    Raises:
        ModelError: its files cannot be read, or describe what cannot be run at all.
    """
    raw = read_config(folder)
    kind = kind_of(raw)
    read = _READERS.get(kind, _block_shape)
    return read(_Asked(folder, raw, kind, target, dtype, trust_remote_code))


def _block_shape(asked: _Asked) -> DrafterShape:
    config = DraftConfig.from_dict(asked.raw)
    with torch.device("meta"):
        model = DraftModel(config)
    ends = has_own_ends(asked.folder)
    return DrafterShape(
        kind=config.kind,
        layout=_block_layout(asked.raw),
        target_layer_ids=config.target_layer_ids,
        longest_path=config.num_drafted,
        guessed_tokens=_num_guessed(asked, config.vocab_size),
        num_weights=_num_weights(model),
        kv_shapes=tuple(PagedContexts.shapes(config)),
        page_bytes=PagedContexts.page_bytes(config, asked.dtype),
        refusal=_refusal(lambda: check_pair(asked.target, config, has_own_ends=ends is not False)),
        later=_of_other_width(config, ends),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )


def _block_layout(raw: Mapping[str, Any]) -> str:
    if MARK in raw:
        return "speculators"
    return "AngelSpec" if is_angelspec(raw) else "z-lab"


def _num_guessed(asked: _Asked, vocab_size: int) -> int:
    if size := asked.raw.get("draft_vocab_size"):
        return int(size)
    chosen = read_draft_vocabulary(asked.folder, vocab_size)
    return vocab_size if chosen is None else len(chosen)


def _eagle3_shape(asked: _Asked) -> DrafterShape:
    config = Eagle3Config.from_dict(asked.raw)
    with torch.device("meta"):
        model = Eagle3Model(config)
    has_embedding = has_own_embedding(asked.folder)
    return DrafterShape(
        kind=asked.kind,
        layout="speculators" if MARK in asked.raw else "SafeAILab",
        target_layer_ids=config.layers_of(asked.target.config.get_text_config().num_hidden_layers),
        longest_path=DEPTH,
        guessed_tokens=config.draft_vocab_size,
        num_weights=_num_weights(model),
        kv_shapes=tuple(PagedContexts.shapes(config)),
        page_bytes=PagedPairs.page_bytes(config, asked.dtype),
        refusal=_refusal(
            lambda: check_eagle3(asked.target, config, has_embedding=has_embedding is not False)
        ),
        later=_of_other_width(config, has_embedding),
    )


def _draft_model_shape(asked: _Asked) -> DrafterShape:
    model = target_without_weights(asked.folder, trust_remote_code=asked.trusts).to(asked.dtype)
    shapes: tuple[LayerShape, ...] = ()
    # Without pages its memory grows with each sequence, and is not planned.
    with suppress(NotPaged):
        shapes = tuple(layer_shapes(model))
    sizes = (own.config.get_text_config().vocab_size for own in (model, asked.target))
    return DrafterShape(
        kind=asked.kind,
        layout="transformers",
        target_layer_ids=(),
        longest_path=DEPTH,
        guessed_tokens=min(sizes),
        num_weights=_num_weights(model),
        kv_shapes=shapes,
        page_bytes=page_bytes(shapes, asked.dtype),
        refusal=_refusal(
            lambda: check_draft_model(asked.target, model, asked.folder, trusts=asked.trusts)
        ),
        later=()
        if has_tokenizer(asked.folder) and has_tokenizer(Path(asked.target.name_or_path))
        else ("whether its tokens are the target's",),
    )


def _of_other_width(config: AnyDraftConfig, has_ends: bool | None) -> tuple[str, ...]:
    """What is not known of a drafter that is not as wide as its target."""
    if has_ends is not None or config.hidden_size == config.target_hidden_size:
        return ()
    return ("whether the drafter has an embedding of its own, which a different width requires",)


_READERS: Mapping[str, Callable[[_Asked], DrafterShape]] = {
    "eagle3": _eagle3_shape,
    "draft_model": _draft_model_shape,
}


def _num_weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ModelError as error:
        return str(error)
    return None
