"""What a step costs and brings, by how many candidates it verifies. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from blockdraft.allocation.costs import StepCosts

_LEAST_GAIN = 0.03
"""Share by which candidates must raise the rate where sequences share a step. Sequences that
advance unevenly end at different times and share fewer steps, which no price includes."""
_CROWD, _LEAST_GAIN_OF_CROWD = 8, 0.20
"""With more sequences it must be more: what is beside the forward (searching, deciding, keeping
features) takes a few percent of the time there, which steps that gain less do not bring back."""


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
        # What candidates add is added to plain decoding, whose cost is known better: sequences have
        # each a context, and take longer than as many rows of one.
        self._known_forward = [self.plain_seconds]
        self._of_rows = costs.forward(num + num_other_rows)

    @property
    def plain_rate(self) -> float:
        """Tokens per second of a step without candidates."""
        return self.num / self.plain_seconds

    @property
    def plain(self) -> Price:
        """Of a step without candidates."""
        return Price(0, float(self.num), self.plain_seconds, self.plain_seconds)

    def plain_worth(self, tokens: float) -> float:
        """Seconds that plain decoding takes for so many tokens."""
        return tokens / self.plain_rate

    def best(
        self,
        gains: Sequence[float],
        branches: Sequence[float],
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
        # In every step, of a few candidates: without arrays this takes a fifth of the time.
        tokens = [self.num + trust * gained for gained in accumulate(gains, initial=0.0)]
        added = accumulate(branches, initial=0.0)
        forward = [one + more for one, more in zip(self._forward(len(gains)), added, strict=True)]
        rates = [own / (one + drafting) for own, one in zip(tokens, forward, strict=True)]
        found = max(range(least, len(rates)), key=rates.__getitem__)
        least_gain = _LEAST_GAIN if self.num <= _CROWD else _LEAST_GAIN_OF_CROWD
        if self.num > 1 and rates[found] < (1 + least_gain) * rates[least]:
            found = least
        return Price(found, tokens[found], forward[found] + drafting, forward[found])

    def best_depth(self, survival: Sequence[float], num_drafting: int) -> int:
        """The depth of drafts of `num_drafting` sequences, of which only chains would be verified.

        And one more where that costs no forward: of what is drafted, not all is verified.

        survival: [depth] chains that reach it, of all sequences together.
        """
        tokens, rates = float(self.num), []
        beside = self.plain_seconds - self._costs.forward(self.num)
        for depth, reached in enumerate(survival, start=1):
            tokens += reached
            seconds = beside + self._costs.forward(tokens + num_drafting)
            seconds += self._costs.draft(*self._costs.draft_forwards(num_drafting, depth))
            rates.append(tokens / seconds)
        best = 1 + rates.index(max(rates))
        return best if self._costs.drafts_by_level else min(best + 1, len(survival))

    def _forward(self, num_candidates: int) -> list[float]:
        """Seconds of the target for each number of candidates from 0 on."""
        known, start = self._known_forward, self.num + self.num_other_rows
        missing = range(start + len(known), start + num_candidates + 1)
        for seconds in self._costs.forwards(missing):
            known.append(self.plain_seconds + seconds - self._of_rows)
        return known[: num_candidates + 1]
