"""Forward and backward of one training step.

Shapes: b sequences of S tokens, g anchors of each in one draft forward, B slots a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.models.draft import DraftModel
from blockdraft.models.draft_context import ConcatContext, LayerKV
from blockdraft.models.draft_masks import block_masks
from blockdraft.train.blocks import Anchors, Blocks, make_blocks
from blockdraft.train.config import TrainConfig
from blockdraft.train.dataset import Batch
from blockdraft.train.features import FrozenTarget
from blockdraft.train.loss import BlockLoss, LossVocabulary, block_loss


@dataclass(frozen=True, slots=True)
class StepStats:
    """Means over the `num_slots` slots that have a label, over the loss vocabulary.

    nll: cross entropy on the answer; distill: on the target's distribution.
    """

    nll: float
    distill: float
    num_slots: int


def draft_hidden(
    model: DraftModel,
    embed_weight: Tensor,
    blocks: Blocks,
    anchors: Anchors,
    context_kv: list[LayerKV],
) -> Tensor:
    """The drafter's states [b, g, B, D] of many blocks over one context.

    Args:
        model: the drafter.
        embed_weight: [V, D] of the target.
        blocks, anchors: of this forward.
        context_kv: of the whole sequences; the last anchor decides how much of it is used.
    """
    num_context = int(anchors.positions.max())
    block_size = blocks.labels.shape[-1] + 1
    context = ConcatContext([(k[:, :, :num_context], v[:, :, :num_context]) for k, v in context_kv])
    masks = block_masks(model.config, anchors.positions, block_size, num_context)
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
) -> StepStats:
    """Add the gradient of one batch to the model's.

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
    """
    features, final_states = target.split(states)
    places = torch.arange(features.shape[1], device=features.device)
    projected = model.project_context(features, places.expand(len(features), -1))
    leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in projected]
    # A mean over all possible slots, so that the scale does not depend on the weights.
    scale = 1.0 / max(1, int(anchors.keep.sum()) * (model.config.block_size - 1))
    nll, distill, count = 0.0, 0.0, 0
    for start in range(0, anchors.positions.shape[1], config.anchors_per_forward):
        group = anchors.group(start, config.anchors_per_forward)
        if not bool(group.keep.any()):
            break
        blocks = make_blocks(batch, group, model.config.block_size, model.config.mask_token_id)
        hidden = draft_hidden(model, target.embed_weight, blocks, group, leaves)
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
    return StepStats(nll / max(1, count), distill / max(1, count), count)


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
    logits = model.logits(predicting, vocabulary.head)
    target_logits = None
    if config.distill_share > 0:
        # The target's word on slot k is its output one token earlier, at anchor + k - 1.
        offsets = torch.arange(predicting.shape[1], device=hidden.device)
        places = (anchors.positions[:, :, None] + offsets).clamp(max=final_states.shape[1] - 1)
        rows = torch.arange(len(final_states), device=hidden.device)[:, None, None]
        target_logits = (final_states[rows, places] @ vocabulary.head.T).flatten(0, 1)
    labels = vocabulary.slot_of[blocks.labels].flatten(0, 1)
    keep = blocks.keep.flatten(0, 1)
    return block_loss(logits, target_logits, labels, keep, vocabulary.log_share, config)
