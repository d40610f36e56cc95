"""Drafters that fill a block of masked slots at once: DFlash, DFlash 2, and without features."""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from blockdraft.data.dataset import Batch
from blockdraft.data.store import Example
from blockdraft.models.draft.attention import ScoreMask, flex_masks
from blockdraft.models.draft.candidate_selector import CandidateSelector
from blockdraft.models.draft.checkpoint import read_config
from blockdraft.models.draft.config import AttentionKind, DraftConfig
from blockdraft.models.draft.context import ConcatContext, LayerKV
from blockdraft.models.draft.denoising import denoise, greedy, num_fixed
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.masks import block_masks
from blockdraft.train.blocks import Anchors, Blocks, make_blocks
from blockdraft.train.config import TrainConfig
from blockdraft.train.drafter import check_copy, train_only_adapter
from blockdraft.train.kinds.base import DrafterShape, Kind, TrainedDrafter, num_trained
from blockdraft.train.prepare import load_drafter, shape_of, start_shape
from blockdraft.train.sharing import check_rows, share_parameters, whole_drafter


def draft_hidden(
    model: DraftModel,
    embed_weight: Tensor,
    blocks: Blocks,
    anchors: Anchors,
    context_kv: Sequence[LayerKV],
    *,
    is_sparse: bool = False,
) -> Tensor:
    """The drafter's states [b, g, B, D] of many blocks of B = s + 1 slots over one context.

    Args:
        model: the drafter.
        embed_weight: [V, D] of the target.
        blocks, anchors: of this forward.
        context_kv: of the whole rows; the last anchor decides how much of it is used.
        is_sparse: attend with tiles.
    """
    # Tiles skip what no block sees, and one shape for all steps is compiled once.
    num_context = context_kv[0][0].shape[2] if is_sparse else int(anchors.positions.max())
    block_size = blocks.labels.shape[-1] + 1
    context = ConcatContext([(k[:, :, :num_context], v[:, :, :num_context]) for k, v in context_kv])
    where = (model.config, anchors.positions, block_size, num_context, blocks.starts)
    masks: Mapping[AttentionKind, ScoreMask] = (
        flex_masks(*where) if is_sparse else block_masks(*where)
    )
    embeddings = model.embed(blocks.token_ids, embed_weight)
    hidden: Tensor = model(embeddings, blocks.positions, context, masks, block_size)
    return hidden.view(len(hidden), -1, block_size, hidden.shape[-1])


class BlockDrafter(TrainedDrafter):
    """A drafter of DFlash's code in training, see TrainedDrafter."""

    model: DraftModel

    def __init__(self, model: DraftModel, *, is_sparse: bool = False) -> None:
        self.model, self._is_sparse = model, is_sparse
        self.feature_layers = model.config.target_layer_ids
        self.num_slots = model.config.block_size - 1

    @property
    def candidate_selector(self) -> CandidateSelector | None:
        """See TrainedDrafter."""
        return self.model.candidate_selector

    def limit_vocabulary(self, token_ids: Sequence[int] | None) -> None:
        """See TrainedDrafter.limit_vocabulary."""
        self.model.draft_vocabulary = None if token_ids is None else list(token_ids)

    def guessable_ids(self) -> Tensor | None:
        """See TrainedDrafter.guessable_ids."""
        ids = self.model.draft_vocabulary
        return None if ids is None else torch.tensor(ids, device=self.model.fc.weight.device)

    def draw(self, anchors: Anchors, generator: torch.Generator) -> Anchors:
        """See TrainedDrafter.draw: with several denoising steps, which slots are fixed already.

        Every block is in one of its steps, and any of its slots may be fixed. The loss asks for
        their tokens too, which are there to be read.
        """
        num_steps = self.model.config.num_denoising_steps
        if num_steps == 1:
            return anchors
        shape = anchors.positions.shape
        counts = [num_fixed(step, num_steps, self.num_slots) for step in range(num_steps)]
        drawn = torch.randint(num_steps, (*shape, 1), generator=generator)
        ranks = torch.rand(*shape, self.num_slots, generator=generator).argsort(-1).argsort(-1)
        shown = ranks < torch.tensor(counts)[drawn]
        return anchors.showing(shown.to(anchors.positions.device))

    def blocks(self, batch: Batch, anchors: Anchors) -> Blocks:
        """See TrainedDrafter.blocks: an anchor and masks."""
        config = self.model.config
        return make_blocks(batch, anchors, config.block_size, config.mask_token_id)

    def context(self, features: Tensor, batch: Batch, embed_weight: Tensor) -> list[Tensor]:
        """See TrainedDrafter.context: keys and values of each layer in turn."""
        if self.model.config.reads_tokens:
            features = self.model.embed(batch.token_ids, embed_weight)
        return [t for kv in self.model.project_context(features, batch.positions) for t in kv]

    def slots(
        self, context: Sequence[Tensor], blocks: Blocks, anchors: Anchors, embed_weight: Tensor
    ) -> Tensor:
        """See TrainedDrafter.slots."""
        given = (self.model, embed_weight, blocks, anchors, _pairs(context))
        return draft_hidden(*given, is_sparse=self._is_sparse)[:, :, 1:]

    def filled(
        self,
        context: Sequence[Tensor],
        blocks: Blocks,
        anchors: Anchors,
        embed_weight: Tensor,
        head: Tensor,
    ) -> Tensor:
        """See TrainedDrafter.filled: in all denoising steps, with its own guesses."""
        shape = (*anchors.positions.shape, self.num_slots + 1)

        def forward(token_ids: Tensor) -> Tensor:
            inputs = blocks.reading(token_ids.view(shape).flatten(1))
            given = (self.model, embed_weight, inputs, anchors, _pairs(context))
            return draft_hidden(*given).flatten(0, 1)

        ids = self.guessable_ids()
        rows = head if ids is None else head[ids]
        guess = greedy(lambda hidden: self.logits(hidden, rows), ids)
        every = blocks.token_ids.view(-1, shape[-1])
        hidden = denoise(every, forward, guess, self.model.config.num_denoising_steps)
        return hidden.view(*shape, -1)[:, :, 1:]

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """See TrainedDrafter.logits."""
        return self.model.logits(hidden, head)

    def greedy_guesses(self, hidden: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """See TrainedDrafter.greedy_guesses."""
        ids = self.guessable_ids()
        known = logits if ids is None else logits[..., ids]
        return self.model.greedy_guesses(hidden, known, anchors, ids)

    def share(self, config: TrainConfig, mesh: DeviceMesh) -> None:
        """See TrainedDrafter.share."""
        share_parameters(self.model, config, mesh)

    def whole(self, is_main: bool) -> Self:
        """See TrainedDrafter.whole."""
        return type(self)(whole_drafter(self.model, is_main), is_sparse=self._is_sparse)


def _pairs(context: Sequence[Tensor]) -> list[LayerKV]:
    return list(zip(context[::2], context[1::2], strict=True))


def _shape(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example], num_processes: int
) -> DrafterShape:
    if config.init_from is None:
        found = shape_of(config, target, examples)
    else:
        start = DraftConfig.from_dict(read_config(config.init_from))
        found = start_shape(config, start, target, examples)
    with torch.device("meta"):
        model = DraftModel(found)
    if config.init == "target":
        check_copy(model, target)
    if config.only_adapter:
        train_only_adapter(model)
    if config.shard_drafter:
        check_rows(model, config, num_processes)
    return DrafterShape(
        num_layers=found.num_hidden_layers,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        feature_layers=found.target_layer_ids,
        num_parameters=num_trained(model),
        facts=found.to_dict(),
    )


def _load(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> BlockDrafter:
    model = load_drafter(config, target, examples)
    if config.only_adapter:
        train_only_adapter(model)
    return BlockDrafter(model, is_sparse=config.is_sparse)


BLOCK = Kind(_shape, _load)
