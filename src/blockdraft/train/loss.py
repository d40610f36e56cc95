"""What a drafter is trained to do: predict the target's tokens, early slots above all.

Shapes: n blocks, s predicting slots each, V vocabulary, v of it in the loss.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class LossVocabulary:
    """The part of the vocabulary that one step's loss is computed over.

    head: [v, D] rows of the target's head; log_share: [v], added to logits; slot_of: [V], where a
    token stands in it; token_ids: [v].
    """

    head: Tensor
    log_share: Tensor
    slot_of: Tensor
    token_ids: Tensor


class PartialVocabulary:
    """Most of the probability is on few tokens, and the full head costs more than the drafter.

    The loss sees the most frequent answer tokens, the step's labels, and random others; the logits
    of these stand for all that are left out and are raised by log(left out / drawn), so that the
    sum under the softmax is right on average.

    Args:
        head: [V, D].
        counts: how often each token occurs in the answers.
        num_frequent: how many tokens are always in; 0 for the whole vocabulary.
        num_random: how many others are drawn for each step.
    """

    def __init__(
        self, head: Tensor, counts: Counter[int], num_frequent: int, num_random: int
    ) -> None:
        size = head.shape[0]
        self._head, self._num_random = head, num_random
        self._whole = num_frequent == 0 or num_frequent + num_random >= size
        frequent = [token for token, _ in counts.most_common(num_frequent or None)]
        self._always = torch.zeros(size, dtype=torch.bool)
        self._always[frequent] = True

    def draw(self, labels: Tensor, generator: torch.Generator) -> LossVocabulary:
        """A vocabulary that holds all `labels` (any shape); `generator` is a CPU one."""
        size, device = self._head.shape[0], self._head.device
        if self._whole:
            every = torch.arange(size, device=device)
            return LossVocabulary(self._head, torch.zeros(size, device=device), every, every)
        kept = self._always.clone()
        kept[labels.flatten().cpu()] = True
        rest = (~kept).nonzero().squeeze(1)
        num_drawn = min(self._num_random, len(rest))
        drawn = rest[torch.randperm(len(rest), generator=generator)[:num_drawn]]
        kept_ids = kept.nonzero().squeeze(1)
        ids = torch.cat((kept_ids, drawn))
        log_share = torch.zeros(len(ids))
        if num_drawn:
            log_share[len(kept_ids) :] = torch.tensor(len(rest) / num_drawn).log()
        slot_of = torch.full((size,), -1)
        slot_of[ids] = torch.arange(len(ids))
        ids = ids.to(device)
        return LossVocabulary(self._head[ids], log_share.to(device), slot_of.to(device), ids)


def decay_weights(num_slots: int, gamma: float) -> Tensor:
    """exp(-j / gamma) for the slots j = 0, 1, .. behind the anchor (arXiv 2602.06036): [s]."""
    return torch.exp(-torch.arange(num_slots) / gamma)


def dpace_weights(nll: Tensor, keep: Tensor, alpha: float) -> Tensor:
    """D-PACE weights (arXiv 2605.18810): what a slot is worth, given how good the others are.

    w_j = sum over m >= j of the product over i <= m of ((1 - alpha) q_i + alpha), where q_i is the
    probability of the right token: a smoothed derivative of the expected accepted length.

    Args:
        nll: [n, s], -log q.
        keep: [n, s]; a slot without a label is never accepted, so q~ is 0 there.
        alpha: 0 trusts the probabilities, 1 ignores them.

    Returns:
        [n, s], without gradient.
    """
    smoothed = ((1 - alpha) * torch.exp(-nll.detach()) + alpha).masked_fill(~keep, 0.0)
    reach = smoothed.cumprod(dim=-1)
    return reach.flip(-1).cumsum(dim=-1).flip(-1)


def slot_weights(nll: Tensor, keep: Tensor, config: TrainConfig) -> Tensor:
    """Weights [n, s] of the slots' losses; 0 where `keep` [n, s] is False."""
    if config.position_weights == "dpace":
        weights = dpace_weights(nll, keep, config.dpace_alpha)
    elif config.position_weights == "decay":
        weights = decay_weights(nll.shape[-1], config.decay_gamma).to(nll.device).expand_as(nll)
    else:
        weights = torch.ones_like(nll)
    return weights.masked_fill(~keep, 0.0)


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """loss: to be minimized, a sum over slots; nll, distill, selector: [n, s], detached."""

    loss: Tensor
    nll: Tensor
    distill: Tensor
    selector: Tensor | None = None


def block_loss(
    logits: Tensor,
    target_logits: Tensor | None,
    labels: Tensor,
    keep: Tensor,
    log_share: Tensor,
    config: TrainConfig,
) -> BlockLoss:
    """Weighted sum of cross entropy on the labels and on the target's distribution.

    This is the loss to edit for another one: plain operations, whose gradient torch finds. Then set
    `fused_loss = false`, or the faster form of `fused_loss.py` goes on computing this one.

    Args:
        logits: [n, s, v] of the drafter.
        target_logits: [n, s, v], or None without distillation.
        labels: [n, s], places in the loss vocabulary.
        keep: [n, s], False where there is no label.
        log_share: [v], see `LossVocabulary`.
        config: mixture and position weights.
    """
    log_p = (logits.float() + log_share).log_softmax(dim=-1)
    nll = -log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    distill, share = torch.zeros_like(nll), 0.0
    if target_logits is not None:
        wanted = (target_logits.float() + log_share).softmax(dim=-1)
        distill, share = -(wanted * log_p).sum(dim=-1), config.distill_share
    weights = slot_weights(nll.detach(), keep, config)
    loss = (weights * ((1 - share) * nll + share * distill)).sum()
    return BlockLoss(loss, nll.detach(), distill.detach())


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a selector is to choose from, without gradient.

    places: [n, s, k] in the loss vocabulary, the label always among them; logits: [n, s, k] of the
    drafter; target_logits: [n, s, k], or None without distillation.
    """

    places: Tensor
    logits: Tensor
    target_logits: Tensor | None


@torch.no_grad()
def candidates_of(
    logits: Tensor, target_logits: Tensor | None, labels: Tensor, top_k: int
) -> Candidates:
    """The best of `logits` [n, s, v], as serving has them; a missing label replaces the last."""
    places = logits.topk(min(top_k, logits.shape[-1])).indices
    labels = labels.clamp(min=0)[..., None]
    is_missing = ~(places == labels).any(dim=-1, keepdim=True)
    places[..., -1:] = torch.where(is_missing, labels, places[..., -1:])
    wanted = None if target_logits is None else target_logits.gather(-1, places)
    return Candidates(places, logits.gather(-1, places), wanted)


def all_candidates(parts: Sequence[Candidates]) -> Candidates:
    """Those of all blocks, from some at a time."""
    wanted = [part.target_logits for part in parts if part.target_logits is not None]
    return Candidates(
        torch.cat([part.places for part in parts]),
        torch.cat([part.logits for part in parts]),
        torch.cat(wanted) if wanted else None,
    )


def selector_loss(
    added: Tensor, candidates: Candidates, labels: Tensor, weights: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of the candidates' scores behind the true token before them.

    Args:
        added: [n, s, k], of the selector to the candidates' logits.
        candidates: of the slots.
        labels: [n, s], places in the loss vocabulary.
        weights: [n, s], those of the slots in `block_loss`.
        config: mixture of label and target's distribution.

    Returns:
        the sum over slots, and the cross entropy on the labels [n, s], detached.
    """
    log_p = (added.float() + candidates.logits.float()).log_softmax(dim=-1)
    is_label = candidates.places == labels.clamp(min=0)[..., None]
    nll = loss = -log_p.masked_fill(~is_label, 0.0).sum(dim=-1)
    if candidates.target_logits is not None:
        wanted = candidates.target_logits.float().softmax(dim=-1)
        distill = -torch.linalg.vecdot(wanted, log_p)
        loss = (1 - config.distill_share) * nll + config.distill_share * distill
    return (weights * loss).sum(), nll.detach()


CHUNK_LOGITS = 2**25
"""Logits of one chunk: 64 MB in bfloat16, and a few times that in float32 temporarily."""


def chunked_loss(
    hidden: Tensor, loss_of: Callable[[Tensor, slice], BlockLoss], vocab_size: int
) -> BlockLoss:
    """The loss of all blocks, with the logits of a few at a time.

    So the vocabulary never decides how much memory a step takes. The gradient with respect to
    `hidden` is made in the forward, chunk by chunk.

    Args:
        hidden: [n, s, D] of the predicting slots.
        loss_of: the loss of some blocks, from their hidden states and their place among all.
        vocab_size: v.
    """
    size = max(1, CHUNK_LOGITS // (hidden.shape[1] * vocab_size))
    if size >= len(hidden):
        return loss_of(hidden, slice(None))
    loss, nll, distill = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, loss_of, size
    )
    return BlockLoss(loss, nll, distill)


class _ChunkedLoss(torch.autograd.Function):
    """The loss chunk by chunk, each with its gradient: logits of one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, loss_of: Callable[[Tensor, slice], BlockLoss], size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: list[BlockLoss] = []
        grad = torch.empty_like(hidden)
        for start in range(0, len(hidden), size):
            chosen = slice(start, start + size)
            with torch.enable_grad():
                leaf = hidden[chosen].detach().requires_grad_()
                result = loss_of(leaf, chosen)
                (grad[chosen],) = torch.autograd.grad(result.loss, leaf)
            parts.append(result)
        ctx.save_for_backward(grad)
        nll, distill = (torch.cat([getattr(p, name) for p in parts]) for name in ("nll", "distill"))
        ctx.mark_non_differentiable(nll, distill)
        return torch.stack([part.loss.detach() for part in parts]).sum(), nll, distill

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None
