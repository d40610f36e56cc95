"""Whether it pays to propose without a model. No torch.

No model runs, yet it takes time for each sequence of a step: looking up, noise, merging. Where many
sequences share a step, or a text is never guessed, that may be more than it saves.
"""

from dataclasses import dataclass
from math import ceil

_MEMORY = 32.0
"""Steps that are remembered."""
_FIRST_WORTH = 2.0
"""Before anything is known it is believed to save so many times what it takes."""
_SELDOM, _MOST_SELDOM = 8, 32
"""Where it does not pay, one step of so many asks, since texts change; of twice as many each time
that it saves less than it takes once more."""
_SHARE, _LONGEST_PAUSE = 1 / 200, 128
"""Nor does asking in vain take more of the time than this, as it would in a crowd, where it takes
long; but one step of so many asks in any case."""
_OUTLIER = 4.0
"""Asking counts as at most so many plain steps: a machine that stood still tells nothing."""


@dataclass(slots=True)
class _Balance:
    """Seconds a step. num_since: steps that have not asked since the last that did.

    pause: that one step of so many asks, where it does not pay.
    """

    saved: float
    took: float
    num_since: int = 0
    pause: int = _SELDOM

    @property
    def pays(self) -> bool:
        return self.saved >= self.took


class FreeWorth:
    """What free proposals saved and took, by the number of sequences that share a step."""

    def __init__(self) -> None:
        self._balances: dict[int, _Balance] = {}

    def asks(self, num_sequences: int) -> bool:
        """True if the next step of so many is to be proposed for; asked once a step."""
        balance = self._balances.get(num_sequences.bit_length())
        if balance is None or balance.pays:
            return True
        balance.num_since += 1
        return balance.num_since >= balance.pause

    def record(self, num_sequences: int, saved: float, took: float, plain: float) -> None:
        """Take the seconds that candidates were expected to save, and those of proposing them.

        plain: of a step that drafts nothing.
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
