"""What a proposal is expected to hold before it is made, learned from earlier ones. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from blockdraft.core.sequence import Row

_FIRST_RATE = 0.6
"""What is believed of each further token of a drafter that was never tried: enough to try it."""
_MEMORY_OF_ALL, _MEMORY_OF_REQUEST = 32.0, 6.0
"""Proposals that an expectation remembers, of all requests and of one."""
_START_WEIGHT = 1.0
"""Proposals that the first belief counts for."""
_FORGOTTEN_STEPS = 256
"""A sequence that drafted nothing for so long is believed to be like all the others."""
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


@dataclass(slots=True)
class _Known:
    """One sequence: what its proposals hold, and the step of its last one."""

    expectation: Expectation
    drafted_at: int


class Expectations:
    """What is expected of each sequence that drafts, and of all sampled or greedy ones together.

    max_nodes, max_depth: the most candidates that are proposed for a sequence, and on its longest
    path. Steps are counted by whoever asks.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self._max_nodes, self._max_depth = max_nodes, max_depth
        self._of_all: dict[bool, Expectation] = {}
        self._known: dict[int, _Known] = {}

    def of(self, row: Row, step: int) -> Expectation:
        """Of this sequence, or of all that are alike where too little is known of it."""
        known = self._known.get(row.sequence.key)
        if known is None or step - known.drafted_at > _FORGOTTEN_STEPS:
            return self._for_all(row)
        return known.expectation

    def drafted_at(self, row: Row) -> int | None:
        """The step in which something was last proposed for it."""
        known = self._known.get(row.sequence.key)
        return None if known is None else known.drafted_at

    def record(
        self,
        row: Row,
        step: int,
        gains: Sequence[float],
        branches: Sequence[bool],
        first: Sequence[float],
    ) -> None:
        """Learn from what was proposed for a sequence; see Expectation.record."""
        of_all, expectation = self._for_all(row), self.of(row, step)
        if expectation is of_all:
            expectation = of_all.of_request()
        for learning in (expectation, of_all):
            learning.record(gains, branches, first)
        self._known[row.sequence.key] = _Known(expectation, step)

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""
        self._known.pop(key, None)

    def _for_all(self, row: Row) -> Expectation:
        is_sampled = row.sequence.params.is_sampled
        if is_sampled not in self._of_all:
            self._of_all[is_sampled] = Expectation(self._max_nodes, self._max_depth)
        return self._of_all[is_sampled]


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

    def fade(self, num_sequences: int) -> None:
        """A step has used no prediction.

        What is not believed is not used, and so would never be found to be right again.
        """
        self.record(num_sequences, 0.0, 0.0)
