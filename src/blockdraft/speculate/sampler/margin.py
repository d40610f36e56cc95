"""How far a token is from being the choice."""

from collections.abc import Callable

from torch import Tensor

from blockdraft.core.sequence import Sequence
from blockdraft.speculate.sampler.choose import choices

MOST_MARGIN = 64.0
"""Logits. More is not told apart: no noise is as large."""
PRECISION = 2.0**-10


def margin_of(logits: Tensor, sequence: Sequence, token_id: int) -> float:
    """How much the choice leads a token, in logits [V]; 0 if the token is the choice.

    The least by which the token must rise, or the choice fall, against all others until the choice
    rule takes the token. Filters, penalties and noise are those of the rule itself, and a choice
    that a filter lets pass by a hair falls out of it.
    """
    choice = next(choices(logits[None], sequence, []))
    if choice == token_id:
        return 0.0

    def is_chosen(moved_id: int, move: float) -> bool:
        moved = logits.float().clone()
        moved[moved_id] += move
        return next(choices(moved[None], sequence, [])) == token_id

    return min(
        _least(lambda margin: is_chosen(token_id, margin)),
        _least(lambda margin: is_chosen(choice, -margin)),
    )


def _least(is_enough: Callable[[float], bool]) -> float:
    """The least margin that is enough, to PRECISION; MOST_MARGIN if none below it is."""
    low, high = 0.0, PRECISION
    while not is_enough(high):
        low, high = high, 2 * high
        if high > MOST_MARGIN:
            return MOST_MARGIN
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
