"""Forward and backward of one training step.

Shapes: b sequences of S tokens, g anchors of each in one draft forward, B slots a block.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.data.dataset import Batch, Row
from blockdraft.models.draft import DraftModel
from blockdraft.models.draft_attention import ScoreMask, flex_masks
from blockdraft.models.draft_config import AttentionKind
from blockdraft.models.draft_context import ConcatContext, LayerKV
from blockdraft.models.draft_masks import block_masks
from blockdraft.train.blocks import Anchors, Blocks, make_blocks
from blockdraft.train.config import TrainConfig
from blockdraft.train.features import FrozenTarget
from blockdraft.train.loss import BlockLoss, LossVocabulary, block_loss, chunked_loss


@dataclass(frozen=True, slots=True)
class Part:
    """One batch of a step; every process draws the whole of it.

    rows: the examples of each of the batch's rows.
    """

    rows: list[Row]
    batch: Batch
    anchors: Anchors
    vocabulary: LossVocabulary

    def of(self, own: slice) -> "Part":
        """The rows of one process."""
        return Part(self.rows[own], self.batch.rows(own), self.anchors.rows(own), self.vocabulary)

    def stand_in(self) -> "Part":
        """A row that weighs nothing, for a process that has none and must compute with others."""
        first = self.of(slice(1))
        weightless = Anchors(first.anchors.positions, torch.zeros_like(first.anchors.keep))
        return Part([], first.batch, weightless, self.vocabulary)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Sums over the `num_slots` slots that have a label, over the loss vocabulary.

    nll_sum: cross entropy on the answer; distill_sum: on the target's distribution.
    """

    nll_sum: float
    distill_sum: float
    num_slots: int

    @property
    def nll(self) -> float:
        """Mean cross entropy on the answer."""
        return self.nll_sum / max(1, self.num_slots)

    @property
    def distill(self) -> float:
        """Mean cross entropy on the target's distribution."""
        return self.distill_sum / max(1, self.num_slots)

    def check_finite(self, step: int, config: TrainConfig) -> None:
        """Raise ConfigError if the losses are no numbers: nothing is learned from there on."""
        if not math.isfinite(self.nll_sum + self.distill_sum):
            raise ConfigError(
                f"the loss of step {step} is not finite; give a lower lr (now {config.lr:g}) or "
                f"grad_clip (now {config.grad_clip:g}), and another out than {config.out}"
            )


def draft_hidden(
    model: DraftModel,
    embed_weight: Tensor,
    blocks: Blocks,
    anchors: Anchors,
    context_kv: list[LayerKV],
    *,
    is_sparse: bool = False,
) -> Tensor:
    """The drafter's states [b, g, B, D] of many blocks over one context.

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
    hidden: Tensor = model(embeddings, blocks.positions, context, masks)
    return hidden.view(len(hidden), -1, block_size, hidden.shape[-1])


def accumulate_gradients(
    model: DraftModel,
    target: FrozenTarget,
    batch: Batch,
    states: Tensor,
    anchors: Anchors,
    vocabulary: LossVocabulary,
    config: TrainConfig,
    scale: float,
    num_groups: int,
) -> StepStats:
    """Add the gradient of one batch, times `scale`, to the model's.

    Blocks are taken a few anchors at a time, in ascending order: early groups need only a short
    context, and no slot pays for the keys of blocks that it may not see. The context is projected
    once; its gradient is collected over the groups.

    Args:
        model: the drafter.
        target: gives embedding and head.
        batch: the tokens.
        states: [b, S, (K + 1) * D], see `FrozenTarget.states`.
        anchors: [b, A].
        vocabulary: of the loss.
        config: of the run.
        scale: one over the slots of the whole step, see `num_possible_slots`.
        num_groups: draft forwards, see `Anchors.num_groups`; more than are needed add nothing.
    """
    features, final_states = target.split(states)
    projected = model.project_context(features, batch.positions)
    leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in projected]
    nll, distill, count = 0.0, 0.0, 0
    for number in range(num_groups):
        size = config.anchors_per_forward
        group = anchors.group(number * size, size)
        blocks = make_blocks(batch, group, model.config.block_size, model.config.mask_token_id)
        hidden = draft_hidden(
            model, target.embed_weight, blocks, group, leaves, is_sparse=config.is_sparse
        )
        result = group_loss(model, hidden, final_states, blocks, group, vocabulary, config)
        (result.loss * scale).backward()  # type: ignore[no-untyped-call]
        keep = blocks.keep.flatten(0, 1)
        nll += float((result.nll * keep).sum())
        distill += float((result.distill * keep).sum())
        count += int(keep.sum())
    pairs = [
        (tensor, leaf.grad)
        for layer, layer_leaves in zip(projected, leaves, strict=True)
        for tensor, leaf in zip(layer, layer_leaves, strict=True)
        if leaf.grad is not None
    ]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
    return StepStats(nll, distill, count)


def num_possible_slots(anchors: Anchors, block_size: int) -> int:
    """Slots behind the kept anchors. A mean over these does not depend on the weights."""
    return int(anchors.keep.sum()) * (block_size - 1)


def group_loss(
    model: DraftModel,
    hidden: Tensor,
    final_states: Tensor,
    blocks: Blocks,
    anchors: Anchors,
    vocabulary: LossVocabulary,
    config: TrainConfig,
) -> BlockLoss:
    """The loss of the blocks of one forward.

    Args:
        model: the drafter.
        hidden: [b, g, B, D], see `draft_hidden`.
        final_states: [b, S, D] of the target.
        blocks, anchors: of this forward.
        vocabulary: of the loss.
        config: of the run.
    """
    predicting = hidden[:, :, 1:].flatten(0, 1)
    last_states = None
    if config.distill_share > 0:
        # The target's word on slot k is its output one token earlier, at anchor + k - 1.
        offsets = torch.arange(predicting.shape[1], device=hidden.device)
        places = (anchors.positions[:, :, None] + offsets).clamp(max=final_states.shape[1] - 1)
        rows = torch.arange(len(final_states), device=hidden.device)[:, None, None]
        last_states = final_states[rows, places].flatten(0, 1)
    labels = vocabulary.slot_of[blocks.labels].flatten(0, 1)
    keep = blocks.keep.flatten(0, 1)

    def loss_of(part: Tensor, chosen: slice) -> BlockLoss:
        wanted = None if last_states is None else last_states[chosen] @ vocabulary.head.T
        logits = model.logits(part, vocabulary.head)
        return block_loss(
            logits, wanted, labels[chosen], keep[chosen], vocabulary.log_share, config
        )

    return chunked_loss(predicting, loss_of, len(vocabulary.head))
