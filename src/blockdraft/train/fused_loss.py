"""The loss of `loss.py` with its gradient made by hand: the same numbers in fewer passes."""

from typing import Any

import torch
from torch import Tensor

from blockdraft.train.config import TrainConfig
from blockdraft.train.loss import BlockLoss, slot_weights


def fused_block_loss(
    logits: Tensor,
    target_logits: Tensor | None,
    labels: Tensor,
    keep: Tensor,
    log_share: Tensor,
    config: TrainConfig,
) -> BlockLoss:
    """`block_loss`, within rounding."""
    labels = labels.clamp(min=0)
    loss, nll, distill = _BlockLoss.apply(  # type: ignore[no-untyped-call]
        logits, target_logits, labels, keep, log_share, config
    )
    return BlockLoss(loss, nll, distill)


class _BlockLoss(torch.autograd.Function):
    """The gradient is made in the forward, in place: passes over logits are what costs here."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target_logits: Tensor | None,
        labels: Tensor,
        keep: Tensor,
        log_share: Tensor,
        config: TrainConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        share = config.distill_share if target_logits is not None else 0.0
        log_p = (logits.float() + log_share).log_softmax(dim=-1)
        nll = -log_p.gather(-1, labels[..., None]).squeeze(-1)
        weights = slot_weights(nll, keep, config)
        distill = torch.zeros_like(nll)
        if target_logits is None:
            grad = log_p.exp_()
        else:
            wanted = (target_logits.float() + log_share).softmax(dim=-1)
            distill = -torch.linalg.vecdot(wanted, log_p)
            grad = log_p.exp_().sub_(wanted, alpha=share)
        ones = torch.ones_like(labels[..., None], dtype=grad.dtype)
        grad.scatter_add_(-1, labels[..., None], ones.mul_(share - 1.0))
        ctx.save_for_backward(grad.mul_(weights[..., None]).to(logits.dtype))
        loss = (weights * ((1 - share) * nll + share * distill)).sum()
        ctx.mark_non_differentiable(nll, distill)
        return loss, nll, distill

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None, None
