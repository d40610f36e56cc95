"""How far a token is from being the choice."""

from collections.abc import Callable

from torch import Tensor

from blockdraft.core.sequence import Sequence
from blockdraft.speculate.sampler.choose import choices

MOST_MARGIN = 64.0
"""Logits. Larger margins count as this: no noise is as large."""
PRECISION = 2.0**-10
"""Of a margin, in logits."""


def margin_of(logits: Tensor, sequence: Sequence, token_id: int) -> float:
    """How much the choice leads a token, in logits [V]; 0 if the token is the choice.

    It is the least by which the logit of the token must rise, or that of the choice fall, for the
    choice rule to take the token. The rule is applied with its filters, penalties and noise.
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
