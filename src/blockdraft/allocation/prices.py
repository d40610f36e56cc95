"""What a step costs and brings, by how many candidates it verifies. No torch."""

from dataclasses import dataclass

import numpy as np

from blockdraft.allocation.costs import Floats, StepCosts

_LEAST_GAIN = 0.10
"""Share of the rate by which candidates must raise it where sequences share a step. Those that
advance unevenly share fewer steps at their ends: no price says so, and crowds gain little."""
_USUAL_CANDIDATES = 32
"""Of a step; their costs are computed once."""


@dataclass(frozen=True, slots=True)
class Price:
    """The best number of candidates, the tokens expected of the step, and its seconds.

    forward: of the seconds those of the target. Prompt rows are work of their own, and not counted.
    """

    num_candidates: int
    tokens: float
    seconds: float
    forward: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class StepPrices:
    """Prices of one step of `num` decoding sequences with `num_keys` keys together.

    num_other_rows: rows of prompts in the same forward. Prompt rows take their time however much is
    verified.
    """

    def __init__(self, costs: StepCosts, num: int, num_keys: int, num_other_rows: int) -> None:
        self.num, self.num_other_rows = num, num_other_rows
        self.plain_seconds = costs.plain(num, num_keys)
        self._costs, self.num_keys = costs, num_keys
        self._known_forward: Floats = np.zeros(0)

    @property
    def plain_rate(self) -> float:
        """Tokens per second of a step without candidates."""
        return self.num / self.plain_seconds

    def plain_worth(self, tokens: float) -> float:
        """Seconds that plain decoding takes for so many tokens."""
        return tokens / self.plain_rate

    def best(
        self,
        gains: Floats,
        branches: Floats,
        drafting: float,
        *,
        least: int = 0,
        trust: float = 1.0,
    ) -> Price:
        """The number of candidates, at least `least`, with the most expected tokens per second.

        All numbers are looked at, since costs have steps.

        gains: [k] of each candidate, in the order in which they are taken, the probability that it
        is kept; of which `trust` is believed. branches: [k] seconds that each adds because it
        begins a branch. drafting: seconds of what was or will be drafted.
        """
        tokens = self.num + trust * np.concatenate(([0.0], np.cumsum(gains)))
        forward = self._forward(len(gains)) + np.concatenate(([0.0], np.cumsum(branches)))
        rates = tokens[least:] / (forward[least:] + drafting)
        found = int(np.argmax(rates))
        if self.num > 1 and rates[found] < (1 + _LEAST_GAIN) * rates[0]:
            found = 0
        found += least
        seconds = float(forward[found])
        return Price(found, float(tokens[found]), seconds + drafting, seconds)

    def best_depth(self, survival: Floats, num_drafting: int) -> int:
        """The depth of drafts of `num_drafting` sequences, of which only chains would be verified.

        And one more where that costs no forward: of what is drafted, not all is verified.

        survival: [depth] chains that reach it, of all sequences together.
        """
        # A few depths, in every step: without arrays this takes a fifth of the time.
        tokens, rates = float(self.num), []
        for depth, reached in enumerate(survival.tolist(), start=1):
            tokens += reached
            seconds = self._costs.forward_at(tokens + num_drafting)
            seconds += self._costs.draft_at(*self._costs.draft_forwards(num_drafting, depth))
            rates.append(tokens / seconds)
        best = 1 + rates.index(max(rates))
        return best if self._costs.drafts_by_level else min(best + 1, len(survival))

    def _forward(self, num_candidates: int) -> Floats:
        """Seconds of the target for each number of candidates from 0 on."""
        if len(self._known_forward) <= num_candidates:
            self._known_forward = self._computed_forward(max(num_candidates, _USUAL_CANDIDATES))
        return self._known_forward[: num_candidates + 1]

    def _computed_forward(self, num_candidates: int) -> Floats:
        start = self.num + self.num_other_rows
        rows = np.arange(start, start + num_candidates + 1)
        forward = self._costs.forward(rows, self.num_keys)
        if self.num_other_rows:
            forward -= forward[0] - float(self._costs.forward(self.num, self.num_keys))
        forward = np.maximum(forward, self.plain_seconds)
        forward[0] = self.plain_seconds
        return forward
