"""What a model's next proposal is expected to hold, learned from earlier ones. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from blockdraft.core.sequence import Row

_FIRST_RATE = 0.6
"""The chance of each further token of a drafter that was never tried: enough to try it."""
_MEMORY_OF_ALL, _MEMORY_OF_REQUEST = 32.0, 6.0
"""Proposals that a mean is over, about: of all requests, and of one."""
_START_WEIGHT = 1.0
"""The first belief counts as so many proposals."""
_FORGOTTEN_STEPS = 256
"""After so many steps without a draft, a sequence is expected to be like all others."""
_TRUST_WEIGHT = 16.0
"""The first trust counts as so many predicted tokens."""
_TRUST_KEPT = 1 - 1 / 512
"""With each step the weight of earlier ones shrinks to this share."""
_LEAST_TRUST, _MOST_TRUST = 0.25, 1.5


class Expectation:
    """What the candidates of a proposal are like on average, in the order in which they are taken.

    gains: [max_nodes] the probability that each is kept, never rising. branches: [max_nodes] the
    share of proposals in which it begins a branch. survival: [max_depth] the probability that the
    first path is kept to each depth.
    """

    def __init__(self, max_nodes: int, max_depth: int, memory: float = _MEMORY_OF_ALL) -> None:
        self.gains = _first_beliefs(max_nodes)
        self.branches = [0.0] * max_nodes
        self._weight, self._memory = _START_WEIGHT, memory
        self.survival = _first_beliefs(max_depth)

    def of_request(self) -> "Expectation":
        """The same values, to be changed from now on by the proposals of one request."""
        expectation = Expectation(len(self.gains), len(self.survival), _MEMORY_OF_REQUEST)
        expectation.gains, expectation.branches = self.gains, self.branches
        expectation.survival = self.survival
        return expectation

    def record(
        self, gains: Sequence[float], branches: Sequence[bool], first: Sequence[float]
    ) -> None:
        """Learn from one proposal, which may be smaller: its candidates, and its first path.

        Depths beyond its first path keep their probability, or get that of the depth before if that
        has become lower.
        """
        self._weight = min(self._weight + 1, self._memory)
        nothing = [0.0] * len(self.gains)
        self.gains = self._moved(self.gains, gains, nothing)
        self.branches = self._moved(self.branches, branches, nothing)
        survival = self._moved(self.survival, first, self.survival)
        self.survival = list(accumulate(survival, min))

    def _moved(self, old: list[float], new: Sequence[float], rest: Sequence[float]) -> list[float]:
        """Values moved towards `new`, and behind its end towards `rest`."""
        values = [*new, *rest[len(new) :]]
        return [own + (one - own) / self._weight for own, one in zip(old, values, strict=False)]


@dataclass(slots=True)
class _Known:
    """Of one sequence: what its proposals are like, and the step of the last one."""

    expectation: Expectation
    drafted_at: int


class Expectations:
    """What is expected of each sequence that drafts, and of all sampled or greedy ones together.

    max_nodes, max_depth: the most candidates that are proposed for a sequence, and on its longest
    path. The caller counts the steps.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self._max_nodes, self._max_depth = max_nodes, max_depth
        self._of_all: dict[bool, Expectation] = {}
        self._known: dict[int, _Known] = {}

    def of(self, row: Row, step: int) -> Expectation:
        """Of this sequence; of all greedy or sampled ones if it has not drafted lately."""
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
    """The share of predicted tokens that is really kept, by the number of sequences in a step.

    The best of many predictions is on average too high, and the more there are, the higher. first:
    the share before anything was observed.
    """

    def __init__(self, first: float = 1.0) -> None:
        self._first = first
        self._sums: dict[int, list[float]] = {}

    def __call__(self, num_sequences: int) -> float:
        """The share of predicted tokens to believe."""
        predicted, gained = self._sums.get(num_sequences.bit_length(), (0.0, 0.0))
        trust = (gained + self._first * _TRUST_WEIGHT) / (predicted + _TRUST_WEIGHT)
        return min(max(trust, _LEAST_TRUST), _MOST_TRUST)

    def record(self, num_sequences: int, predicted: float, gained: float) -> None:
        """Take the tokens that one step was predicted to gain, and those that it has gained."""
        sums = self._sums.setdefault(num_sequences.bit_length(), [0.0, 0.0])
        sums[0] = sums[0] * _TRUST_KEPT + predicted
        sums[1] = sums[1] * _TRUST_KEPT + gained

    def fade(self, num_sequences: int, num_steps: int = 1) -> None:
        """No prediction was used in so many steps: trust moves back a little to where it began.

        Predictions that are not believed are not used, so they could never turn out right again.
        """
        sums = self._sums.get(num_sequences.bit_length())
        if sums is not None:
            sums[:] = [own * _TRUST_KEPT**num_steps for own in sums]
