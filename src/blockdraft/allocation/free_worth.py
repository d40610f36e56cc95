"""Whether it pays to propose candidates without a model. No torch.

No model runs, yet each sequence of a step takes time: for lookups, noise and merging. Where many
sequences share a step, or the guesses are always wrong, that may be more than they save.
"""

from dataclasses import dataclass
from math import ceil

_MEMORY = 32.0
"""Means are over about so many steps."""
_FIRST_WORTH = 2.0
"""Before anything is known, proposals are taken to save so many times the seconds they take."""
_SELDOM, _MOST_SELDOM = 8, 32
"""Where proposing does not pay, one step in _SELDOM does it all the same, since texts change. Each
time that it still does not pay, twice as many steps pass, up to _MOST_SELDOM."""
_SHARE, _LONGEST_PAUSE = 1 / 200, 128
"""Nor does proposing in vain take more than this share of the time, as it would with many
sequences, where it takes long. But at least one step in _LONGEST_PAUSE does it."""
_OUTLIER = 4.0
"""Proposing counts as at most so many plain steps: a stall of the machine tells nothing."""


@dataclass(slots=True)
class _Balance:
    """Mean seconds a step: what proposals saved, and what they took.

    num_since: steps since the last one with proposals. pause: where proposing does not pay, one
    step of so many does it.
    """

    saved: float
    took: float
    num_since: int = 0
    pause: int = _SELDOM

    @property
    def pays(self) -> bool:
        return self.saved >= self.took


class FreeWorth:
    """What free proposals saved and took, by the number of sequences in a step."""

    def __init__(self) -> None:
        self._balances: dict[int, _Balance] = {}

    def asks(self, num_sequences: int) -> bool:
        """True if free drafters are to propose in the next step; to be called once a step."""
        balance = self._balances.get(num_sequences.bit_length())
        if balance is None or balance.pays:
            return True
        balance.num_since += 1
        return balance.num_since >= balance.pause

    def record(self, num_sequences: int, saved: float, took: float, plain: float) -> None:
        """Take the seconds that candidates were expected to save, and those that they took.

        plain: seconds of a step that drafts nothing.
        """
        key, took = num_sequences.bit_length(), min(took, _OUTLIER * plain)
        balance = self._balances.setdefault(key, _Balance(_FIRST_WORTH * took, took))
        did_pay, pause = balance.pays, balance.pause
        balance.saved += (saved - balance.saved) / _MEMORY
        balance.took += (took - balance.took) / _MEMORY
        balance.num_since = 0
        balance.pause = _SELDOM
        if not did_pay and saved < took:
            least = min(ceil(balance.took / (_SHARE * plain)), _LONGEST_PAUSE)
            balance.pause = max(min(2 * pause, _MOST_SELDOM), least)
