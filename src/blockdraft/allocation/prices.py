"""What a step costs and brings, by how many candidates it verifies. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from blockdraft.allocation.costs import StepCosts

_LEAST_GAIN = 0.03
"""The share by which candidates must raise the rate where sequences share a step. Sequences that
advance unevenly end at different times and share fewer steps, which no price includes."""
_MANY_SEQUENCES, _LEAST_GAIN_OF_MANY = 8, 0.20
"""With more than _MANY_SEQUENCES they must raise it by this share. Work beside the forward
(searching, deciding, keeping features) then takes a few percent of the time, which no price
includes either."""


@dataclass(frozen=True, slots=True)
class Price:
    """The best number of candidates, the tokens expected of the step, and its seconds.

    forward: the part of the seconds that is the target's. Prompt tokens of the step are work of
    their own and not counted.
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
    """Prices of one step of `num_sequences` decoding sequences with `num_keys` keys together.

    num_prompt_tokens: of prompts in the same forward. They take their time however many candidates
    are verified.
    """

    def __init__(
        self, costs: StepCosts, num_sequences: int, num_keys: int, num_prompt_tokens: int
    ) -> None:
        self.num_sequences, self.num_prompt_tokens = num_sequences, num_prompt_tokens
        self.plain_seconds = costs.plain(num_sequences, num_keys)
        self._costs, self.num_keys = costs, num_keys
        # What candidates add is added to the cost of plain decoding. The cost of as many rows of
        # one sequence would be too low: sequences have a context each.
        self._known_forward = [self.plain_seconds]
        self._forward_of_rows = costs.forward(num_sequences + num_prompt_tokens)

    @property
    def shows_plain_cost(self) -> bool:
        """True if the cost of plain decoding can be learned from this step, if it is plain.

        Prompt tokens cost otherwise: only the last one goes through the head.
        """
        return self.num_prompt_tokens == 0

    @property
    def plain_rate(self) -> float:
        """Tokens per second of a step without candidates."""
        return self.num_sequences / self.plain_seconds

    @property
    def plain(self) -> Price:
        """Of a step without candidates."""
        return Price(0, float(self.num_sequences), self.plain_seconds, self.plain_seconds)

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

        gains: [k] the probability that each candidate is kept, in the order in which they are
        taken. trust: the share of it that is believed. branches: [k] seconds that each adds because
        it begins a branch. drafting: seconds that it takes to draft.
        """
        # There are few candidates, in every step: lists take a fifth of the time of arrays.
        tokens = [self.num_sequences + trust * gained for gained in accumulate(gains, initial=0.0)]
        added = accumulate(branches, initial=0.0)
        forward = [one + more for one, more in zip(self._forward(len(gains)), added, strict=True)]
        rates = [own / (one + drafting) for own, one in zip(tokens, forward, strict=True)]
        found = max(range(least, len(rates)), key=rates.__getitem__)
        least_gain = _LEAST_GAIN if self.num_sequences <= _MANY_SEQUENCES else _LEAST_GAIN_OF_MANY
        if self.num_sequences > 1 and rates[found] < (1 + least_gain) * rates[least]:
            found = least
        return Price(found, tokens[found], forward[found] + drafting, forward[found])

    def best_depth(self, survival: Sequence[float], num_drafting: int) -> int:
        """The best depth for drafts of `num_drafting` sequences, if only chains are verified.

        It is one more where depth costs no forward of the drafter, since not all of a draft is
        verified.

        survival: [depth] the number of chains, of all sequences together, that are kept so far.
        """
        tokens, rates = float(self.num_sequences), []
        beside = self.plain_seconds - self._costs.forward(self.num_sequences)
        for depth, reached in enumerate(survival, start=1):
            tokens += reached
            seconds = beside + self._costs.forward(tokens + num_drafting)
            seconds += self._costs.draft(*self._costs.draft_forwards(num_drafting, depth))
            rates.append(tokens / seconds)
        best = 1 + rates.index(max(rates))
        return best if self._costs.drafts_by_level else min(best + 1, len(survival))

    def _forward(self, num_candidates: int) -> list[float]:
        """Seconds of the target for each number of candidates from 0 on."""
        known, start = self._known_forward, self.num_sequences + self.num_prompt_tokens
        missing = range(start + len(known), start + num_candidates + 1)
        for seconds in self._costs.forwards(missing):
            known.append(self.plain_seconds + seconds - self._forward_of_rows)
        return known[: num_candidates + 1]
