"""Forward and backward of one training step.

Shapes: b sequences of S tokens, g anchors of each in one draft forward, B slots a block.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.data.dataset import Batch, Row
from blockdraft.train.blocks import Anchors, Blocks
from blockdraft.train.config import TrainConfig
from blockdraft.train.features import FrozenTarget
from blockdraft.train.fused_loss import fused_block_loss
from blockdraft.train.kinds.base import TrainedDrafter
from blockdraft.train.loss import (
    BlockLoss,
    Candidates,
    LossVocabulary,
    all_candidates,
    block_loss,
    candidates_of,
    chunked_loss,
    selector_loss,
    slot_weights,
)


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
        weightless = replace(first.anchors, keep=torch.zeros_like(first.anchors.keep))
        return Part([], first.batch, weightless, self.vocabulary)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Sums over the `num_slots` slots that have a label, over the loss vocabulary.

    nll_sum: cross entropy on the answer; distill_sum: on the target's distribution; selector_sum:
    on the answer, of a selector's choice among candidates, 0 without one.
    """

    nll_sum: float
    distill_sum: float
    selector_sum: float
    num_slots: int

    @property
    def nll(self) -> float:
        """Mean cross entropy on the answer."""
        return self.nll_sum / max(1, self.num_slots)

    @property
    def distill(self) -> float:
        """Mean cross entropy on the target's distribution."""
        return self.distill_sum / max(1, self.num_slots)

    @property
    def selector(self) -> float:
        """Mean cross entropy of the selector's choices."""
        return self.selector_sum / max(1, self.num_slots)

    def check_finite(self, step: int, config: TrainConfig) -> None:
        """Raise ConfigError if the losses are no numbers: nothing is learned from there on."""
        if not math.isfinite(self.nll_sum + self.distill_sum + self.selector_sum):
            raise ConfigError(
                f"the loss of step {step} is not finite; give a lower lr (now {config.lr:g}) or "
                f"grad_clip (now {config.grad_clip:g}), and another out than {config.out}"
            )


def accumulate_gradients(
    drafter: TrainedDrafter,
    target: FrozenTarget,
    part: Part,
    states: Tensor,
    config: TrainConfig,
    scale: float,
    num_groups: int,
) -> StepStats:
    """Add the gradient of one batch, times `scale`, to the drafter's.

    Blocks are taken a few anchors at a time, in ascending order: early groups need only a short
    context, and no slot pays for the keys of blocks that it may not see. The context is projected
    once; its gradient is collected over the groups.

    Args:
        drafter: of any kind.
        target: gives embedding and head.
        part: the tokens, anchors [b, A] in them, and the vocabulary of the loss.
        states: [b, S, (K + 1) * D], see `FrozenTarget.states`.
        config: of the run.
        scale: one over the slots of the whole step, see `num_possible_slots`.
        num_groups: draft forwards, see `Anchors.num_groups`; more than are needed add nothing.
    """
    features, final_states = target.split(states)
    context = drafter.context(features, part.batch, target.embed_weight)
    leaves = [tensor.detach().requires_grad_() for tensor in context]
    nll, distill, selector, count = 0.0, 0.0, 0.0, 0
    for number in range(num_groups):
        size = config.anchors_per_forward
        group = part.anchors.group(number * size, size)
        blocks = drafter.blocks(part.batch, group)
        hidden = drafter.slots(leaves, blocks, group, target.embed_weight)
        result = group_loss(drafter, hidden, final_states, blocks, group, part.vocabulary, config)
        (result.loss * scale).backward()  # type: ignore[no-untyped-call]
        keep = blocks.keep.flatten(0, 1)
        nll += float((result.nll * keep).sum())
        distill += float((result.distill * keep).sum())
        if result.selector is not None:
            selector += float((result.selector * keep).sum())
        count += int(keep.sum())
    pairs = [
        (tensor, leaf.grad)
        for tensor, leaf in zip(context, leaves, strict=True)
        if leaf.grad is not None
    ]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
    return StepStats(nll, distill, selector, count)


def num_possible_slots(anchors: Anchors, num_slots: int) -> int:
    """Slots behind the kept anchors. A mean over these does not depend on the weights."""
    return int(anchors.keep.sum()) * num_slots


def group_loss(
    drafter: TrainedDrafter,
    hidden: Tensor,
    final_states: Tensor,
    blocks: Blocks,
    anchors: Anchors,
    vocabulary: LossVocabulary,
    config: TrainConfig,
) -> BlockLoss:
    """The loss of the blocks of one forward.

    Args:
        drafter: of any kind.
        hidden: [b, g, B - 1, D], see `TrainedDrafter.slots`.
        final_states: [b, S, D] of the target.
        blocks, anchors: of this forward.
        vocabulary: of the loss.
        config: of the run.
    """
    predicting = hidden.flatten(0, 1)
    last_states = None
    if config.distill_share > 0:
        # The target's word on slot k is its output one token earlier, at anchor + k - 1.
        offsets = torch.arange(predicting.shape[1], device=hidden.device)
        places = (anchors.positions[:, :, None] + offsets).clamp(max=final_states.shape[1] - 1)
        rows = torch.arange(len(final_states), device=hidden.device)[:, None, None]
        last_states = final_states[rows, places].flatten(0, 1)
    labels = vocabulary.slot_of[blocks.labels].flatten(0, 1)
    keep = blocks.keep.flatten(0, 1)
    selector, candidates = drafter.candidate_selector, list[Candidates]()

    blocks_loss = fused_block_loss if config.fused_loss else block_loss

    def loss_of(part: Tensor, chosen: slice) -> BlockLoss:
        wanted = None if last_states is None else last_states[chosen] @ vocabulary.head.T
        logits = drafter.logits(part, vocabulary.head)
        if selector is not None:
            candidates.append(candidates_of(logits, wanted, labels[chosen], selector.top_k))
        return blocks_loss(
            logits, wanted, labels[chosen], keep[chosen], vocabulary.log_share, config
        )

    result = chunked_loss(predicting, loss_of, len(vocabulary.head))
    if selector is None:
        return result
    found = all_candidates(candidates)
    before = torch.cat((blocks.token_ids.view(*blocks.labels.shape[:2], -1)[..., :1],
                        blocks.labels[..., :-1]), dim=-1)  # fmt: skip
    # The selector learns to choose among what the layers offer, which have a loss of their own.
    added = selector(
        predicting.detach(), before.flatten(0, 1)[..., None], vocabulary.token_ids[found.places]
    )
    weights = slot_weights(result.nll, keep, config)
    loss, nll = selector_loss(added[..., 0, :], found, labels, weights, config)
    return replace(result, loss=result.loss + config.selector_weight * loss, selector=nll)
