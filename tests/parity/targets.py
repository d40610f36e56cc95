"""Targets of both kinds, and the block-diffusion drafter on either."""

from typing import Literal

from transformers import PreTrainedModel

from blockdraft.cache.pages import Pages
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.pair_contexts import PagedPairs
from blockdraft.models.layers.quantized import weight_of
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.eagle3 import Eagle3Drafter
from blockdraft.speculate.drafters.kinds import block_drafter
from tests.tiny import LAYER_IDS

Way = Literal["sequential", "paged"]
WAYS: tuple[Way, ...] = ("sequential", "paged")
"""Each sequence in a forward of its own with its own cache; or all in one, in pages."""


def make_target(
    way: Way,
    model: PreTrainedModel,
    *,
    num_pages: int = 65,
    layer_ids: tuple[int, ...] = LAYER_IDS,
) -> SequentialTarget | PagedTarget:
    """A target with the features that a tiny drafter wants; the memory of pages is limited."""
    if way == "sequential":
        return SequentialTarget(model, layer_ids=layer_ids)
    return PagedTarget(model, Pages(num_pages), layer_ids=layer_ids)


def make_dflash(
    target: SequentialTarget | PagedTarget,
    draft: DraftModel,
    drafter_type: type[DFlashDrafter] | None = None,
) -> DFlashDrafter:
    """A drafter that keeps its context where the target keeps its cache.

    It is of the model's kind, unless another is given. Pages belong to one drafter: another one
    would look for its context in them.
    """
    contexts = None
    if isinstance(target, PagedTarget):
        contexts = PagedContexts(draft.config, target.memory, draft.fc.weight)
    model = target.model
    return (drafter_type or block_drafter)(
        draft,
        model.get_input_embeddings().weight,
        weight_of(model.get_output_embeddings()),
        contexts,
    )


def make_eagle(target: SequentialTarget | PagedTarget, draft: Eagle3Model) -> Eagle3Drafter:
    """An EAGLE-3 drafter that keeps its pairs where the target keeps its cache."""
    contexts = None
    if isinstance(target, PagedTarget):
        contexts = PagedPairs(draft.config, target.memory, draft.fc.weight)
    embedding = target.model.get_input_embeddings().weight
    return Eagle3Drafter(draft, embedding, target.layer_ids, contexts)
