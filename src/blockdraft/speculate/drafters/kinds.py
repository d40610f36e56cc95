"""The table of kinds of drafters: from a checkpoint's folder to a drafter at work.

A drafter is loaded in two steps. Its checkpoint says what it will ask of the target and how much
memory its cache takes; then the target is prepared and the memory planned; then the drafter is made
beside it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.pages import Pages
from blockdraft.kernels.interface import GroupWeight
from blockdraft.models.checkpoint import read_config
from blockdraft.models.draft import DraftModel, load_draft_model
from blockdraft.models.draft_config import ARCHITECTURE, ARCHITECTURE_2
from blockdraft.models.draft_context import DraftContexts
from blockdraft.models.loading import check_pair
from blockdraft.models.paged_context import PagedContexts
from blockdraft.models.quantized import weight_of
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.dflash2 import DFlash2Drafter


class Checkpoint(Protocol):
    """A drafter's weights, before the target is prepared for it."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Of the target, whose outputs it wants."""
        ...

    @property
    def page_bytes(self) -> float:
        """Of its own cache, for each page of the target's memory."""
        ...

    def drafter(self, target: PreTrainedModel, pages: Pages | None) -> Drafter:
        """The drafter beside a target, with its cache in the same pages if there are any."""
        ...


class DFlashCheckpoint:
    """A block-diffusion drafter: DFlash (arXiv 2602.06036) or DFlash 2."""

    def __init__(self, model: DraftModel, *, in_int8: bool = False) -> None:
        self._model, self._in_int8 = model, in_int8
        self.feature_layers = model.config.target_layer_ids
        self.page_bytes = PagedContexts.page_bytes(model.config, model.fc.weight.dtype)

    def drafter(self, target: PreTrainedModel, pages: Pages | None) -> DFlashDrafter:
        """See Checkpoint."""
        weight, contexts = self._model.fc.weight, None
        if pages is not None:
            contexts = PagedContexts(self._model.config, pages, weight)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        return block_drafter(
            self._model, weight_of(embedding), weight_of(head), contexts, in_int8=self._in_int8
        )


def block_drafter(
    model: DraftModel,
    embed_weight: Tensor | GroupWeight,
    lm_head_weight: Tensor | GroupWeight,
    contexts: DraftContexts | None = None,
    *,
    in_int8: bool = False,
) -> DFlashDrafter:
    """The drafter of a model's kind; see DFlashDrafter."""
    drafter = DFlashDrafter if model.config.dflash2 is None else DFlash2Drafter
    return drafter(model, embed_weight, lm_head_weight, contexts, in_int8=in_int8)


Loader = Callable[[Path, PreTrainedModel, torch.dtype, str, bool], Checkpoint]
"""From (folder, target, dtype, device, in_int8).

Raises ModelError for what does not fit the target.
"""


def _load_dflash(
    folder: Path, target: PreTrainedModel, dtype: torch.dtype, device: str, in_int8: bool
) -> Checkpoint:
    model = load_draft_model(folder, dtype, device)
    has_own_ends = model.own_embedding is not None and model.own_head is not None
    check_pair(target, model.config, has_own_ends=has_own_ends)
    _share_ends(model, target)
    return DFlashCheckpoint(model, in_int8=in_int8)


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


LOADERS: Mapping[str, Loader] = {"dflash": _load_dflash, "dflash2": _load_dflash}
ARCHITECTURES: Mapping[str, str] = {ARCHITECTURE: "dflash", ARCHITECTURE_2: "dflash2"}
"""Kinds by the architecture that a published config names."""


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind that a checkpoint's config describes.

    What names no architecture of the table is read as DFlash, whose reader says what it is instead.
    """
    named = [str(name) for name in config.get("architectures") or []]
    return next((ARCHITECTURES[name] for name in named if name in ARCHITECTURES), "dflash")


def load_checkpoint(
    folder: Path,
    target: PreTrainedModel,
    dtype: torch.dtype,
    device: str,
    *,
    in_int8: bool = False,
) -> Checkpoint:
    """Load a drafter of any kind in the table, to multiply with the closest weights in int8 or not.

    Raises:
        ModelError: the folder is incomplete, its kind is unknown, or it does not fit the target.
    """
    return LOADERS[kind_of(read_config(folder))](folder, target, dtype, device, in_int8)
