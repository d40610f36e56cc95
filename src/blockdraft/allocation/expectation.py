"""What a proposal is expected to hold before it is made, learned from earlier ones. No torch."""

from collections.abc import Sequence
from itertools import accumulate

_FIRST_RATE = 0.6
"""What is believed of each further token of a drafter that was never tried: enough to try it."""
_MEMORY_OF_ALL, _MEMORY_OF_REQUEST = 32.0, 6.0
"""Proposals that an expectation remembers, of all requests and of one."""
_START_WEIGHT = 1.0
"""Proposals that the first belief counts for."""
_TRUST_WEIGHT = 16.0
_TRUST_KEPT = 1 - 1 / 512
_LEAST_TRUST, _MOST_TRUST = 0.25, 1.5


class Expectation:
    """Candidates of a proposal in the order in which they are taken: of each its mean probability.

    gains: [max_nodes], never rising. branches: [max_nodes] mean share of branches among them.
    survival: [max_depth] of the first path, how likely each depth is reached.
    """

    def __init__(self, max_nodes: int, max_depth: int, memory: float = _MEMORY_OF_ALL) -> None:
        self.gains = _first_beliefs(max_nodes)
        self.branches = [0.0] * max_nodes
        self._weight, self._memory = _START_WEIGHT, memory
        self.survival = _first_beliefs(max_depth)

    def of_request(self) -> "Expectation":
        """The same belief, ready to be changed by what one request brings."""
        expectation = Expectation(len(self.gains), len(self.survival), _MEMORY_OF_REQUEST)
        expectation.gains, expectation.branches = self.gains, self.branches
        expectation.survival = self.survival
        return expectation

    def record(
        self, gains: Sequence[float], branches: Sequence[bool], first: Sequence[float]
    ) -> None:
        """Learn from one proposal, which may be smaller: its candidates, and its first path.

        Depths that it does not reach stay what they were, but none is likelier than those before.
        """
        self._weight = min(self._weight + 1, self._memory)
        nothing = [0.0] * len(self.gains)
        self.gains = self._moved(self.gains, gains, nothing)
        self.branches = self._moved(self.branches, branches, nothing)
        survival = self._moved(self.survival, first, self.survival)
        self.survival = list(accumulate(survival, min))

    def _moved(self, old: list[float], new: Sequence[float], rest: Sequence[float]) -> list[float]:
        """rest: what is new where `new` has no more."""
        values = [*new, *rest[len(new) :]]
        return [own + (one - own) / self._weight for own, one in zip(old, values, strict=False)]


def _first_beliefs(num: int) -> list[float]:
    """Before a drafter was tried."""
    return [_FIRST_RATE**power for power in range(1, num + 1)]


class Trust:
    """By what share predictions come true, by the number of sequences that share a step.

    Who takes the best of many predictions overestimates it, and the more of them there are, the
    more. first: the share that is believed before anything came.
    """

    def __init__(self, first: float = 1.0) -> None:
        self._first = first
        self._sums: dict[int, list[float]] = {}

    def __call__(self, num_sequences: int) -> float:
        """Of the tokens that are predicted, so much is believed."""
        predicted, came = self._sums.get(num_sequences.bit_length(), (0.0, 0.0))
        trust = (came + self._first * _TRUST_WEIGHT) / (predicted + _TRUST_WEIGHT)
        return min(max(trust, _LEAST_TRUST), _MOST_TRUST)

    def record(self, num_sequences: int, predicted: float, came: float) -> None:
        """Take the tokens that one step was predicted to gain, and those that it did."""
        sums = self._sums.setdefault(num_sequences.bit_length(), [0.0, 0.0])
        sums[0] = sums[0] * _TRUST_KEPT + predicted
        sums[1] = sums[1] * _TRUST_KEPT + came
