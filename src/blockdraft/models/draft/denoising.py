"""Filling a block in several forwards of the drafter, as masked diffusion models decode.

Every forward sees what is fixed; behind it the most certain of the open slots are fixed, and the
others are masked again (confidence-based remasking, arXiv 2502.09992). One step is one forward.

Shapes: b blocks of q slots, the anchor is slot 0; s = q - 1 slots to fill; D hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]
"""Token ids [b, q] -> hidden states [b, q, D]."""

Guess = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Hidden states [b, s, D] -> token ids [b, s] and how certain they are [b, s]."""


def greedy(logits_of: Forward, vocabulary_ids: Tensor | None = None) -> Guess:
    """The best token of each slot, by its probability.

    Args:
        logits_of: hidden states [b, s, D] -> logits [b, s, n].
        vocabulary_ids: [n], of the tokens that have logits; None if all have.
    """

    def guess(hidden: Tensor) -> tuple[Tensor, Tensor]:
        best, places = logits_of(hidden).float().log_softmax(dim=-1).max(dim=-1)
        return places if vocabulary_ids is None else vocabulary_ids[places], best

    return guess


def num_fixed(step: int, num_steps: int, num_slots: int) -> int:
    """How many of a block's slots are fixed before the step of this number, from 0 on."""
    return step * num_slots // num_steps


def denoise(token_ids: Tensor, forward: Forward, guess: Guess, num_steps: int) -> Tensor:
    """Fill blocks, all in the same number of forwards.

    Args:
        token_ids: [b, q], an anchor and masks.
        forward: of the drafter.
        guess: what could be fixed; a certainty of -inf comes last.
        num_steps: forwards, at least 1.

    Returns:
        [b, q, D], each slot's from the last forward in which it was open.
    """
    hidden = forward(token_ids)
    num_slots = token_ids.shape[1] - 1
    is_open = torch.ones_like(token_ids[:, 1:], dtype=torch.bool)
    for step in range(1, num_steps):
        count = num_fixed(step, num_steps, num_slots) - num_fixed(step - 1, num_steps, num_slots)
        guesses, certainty = guess(hidden[:, 1:])
        # Below -inf there is nothing: what is fixed already must not be taken again.
        order = certainty.clamp(min=torch.finfo(certainty.dtype).min)
        best = order.masked_fill(~is_open, -torch.inf).topk(count, dim=1).indices
        is_open = is_open.scatter(1, best, False)
        fixed = token_ids[:, 1:].scatter(1, best, guesses.gather(1, best))
        token_ids = torch.cat((token_ids[:, :1], fixed), dim=1)
        again = forward(token_ids)
        keeps = torch.cat((torch.ones_like(is_open[:, :1]), is_open), dim=1)[..., None]
        hidden = torch.where(keeps, again, hidden)
    return hidden
