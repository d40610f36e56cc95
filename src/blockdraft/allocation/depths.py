"""What depths of a step are worth: expected tokens over expected seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import numpy as np

from blockdraft.allocation.costs import Floats, StepCosts

_PRICES: Floats = np.array([0.02, 0.05, 0.1, 0.17, 0.25, 0.35, 0.5, 0.7])[:, None, None]
"""Probabilities of being kept that a draft must reach. The best of them is chosen."""
_FEW = 2
"""So many sequences have few enough plans to look at each, which is faster than arrays are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Depths with the tokens and seconds that are expected of them.

    Only the seconds that decoding adds to a step count: prompt rows are work of their own.
    """

    depths: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def num_drafting(self) -> int:
        """Sequences that draft."""
        return sum(depth > 0 for depth in self.depths)


class DepthSearch:
    """Prices plans of one step.

    survival: by sequence and depth, all of one length, the probability that a draft and all before
    it are kept; never rising with depth, and 0 beyond a sequence's limit.
    """

    def __init__(
        self, costs: StepCosts, survival: Sequence[Sequence[float]], num_other_rows: int
    ) -> None:
        self._costs = costs
        self._survival = survival
        self._num, self._max_depth = len(survival), len(survival[0])
        # Also the least that the target takes of a step with drafts.
        self._plain_seconds = costs.plain(self._num)
        self._kept = [list(accumulate(row, initial=0.0)) for row in survival]
        """Drafts kept on average, by sequence and depth."""
        self._start = self._num + num_other_rows
        # Prompt rows take their time however much is drafted.
        self._sunk = costs.forward_at(self._start) - costs.forward_at(self._num)

    def price(self, depths: Sequence[int]) -> Plan:
        """The plan with these depths."""
        tokens = self._num + sum(kept[d] for kept, d in zip(self._kept, depths, strict=True))
        seconds, num_drafts = self._plain_seconds, sum(depths)
        if num_drafts:
            num_drafting = sum(depth > 0 for depth in depths)
            seconds = self._forward_at(num_drafts)
            seconds += self._costs.drafting_at(num_drafting, 1 + max(depths))
        return Plan(list(depths), tokens, seconds)

    def _forward_at(self, num_drafts: int) -> float:
        seconds = self._costs.forward_at(self._start + num_drafts) - self._sunk
        return max(seconds, self._plain_seconds)

    def best(self) -> Plan:
        """The plan with the most tokens per second."""
        return self._best_of_few() if self._num <= _FEW else self._best_of_many()

    def _best_of_few(self) -> Plan:
        """Looks at every plan; no sequence drafts beyond its limit, where nothing is gained."""
        forward = [self._forward_at(k) for k in range(1, self._num * self._max_depth + 1)]
        depths = range(self._max_depth + 1)
        drafting = [
            [self._costs.drafting_at(num, 1 + depth) for depth in depths]
            for num in range(1, self._num + 1)
        ]
        best, best_rate = (0,) * self._num, self._num / self._plain_seconds
        for plan in product(depths, repeat=self._num):
            num_drafts = sum(plan)
            if not num_drafts:
                continue
            tokens = self._num + sum([kept[k] for kept, k in zip(self._kept, plan, strict=True)])
            num_drafting = self._num - plan.count(0)
            seconds = forward[num_drafts - 1] + drafting[num_drafting - 1][max(plan)]
            if tokens / seconds > best_rate:
                best, best_rate = plan, tokens / seconds
        return self.price(best)

    def _best_of_many(self) -> Plan:
        """The plan with the most tokens per second among a few hundred that may be it.

        Each has a price, the least survival that is worth a row, and a cap, since all blocks of a
        step are as long as the longest. A sequence drafts up to both, unless that does not pay
        for its slots in the draft forward. Axes below: prices, sequences, caps.
        """
        survival = np.array(self._survival)
        slots = np.arange(2.0, self._max_depth + 2)
        taken = survival >= _PRICES
        depths = np.minimum(taken.sum(axis=2, keepdims=True), slots - 1)
        tokens = (survival * taken).cumsum(axis=2)
        drafting = tokens - _PRICES * depths > _PRICES * self._rows_per_block(slots)
        num_drafts, num_tokens = (depths * drafting).sum(axis=1), (tokens * drafting).sum(axis=1)
        seconds = self._seconds(num_drafts, drafting.sum(axis=1), slots)
        price, cap = np.unravel_index(np.argmax((self._num + num_tokens) / seconds), seconds.shape)
        chosen = depths[price, :, cap] * drafting[price, :, cap]
        return self.price(chosen.astype(int).tolist())

    def _seconds(self, num_drafts: Floats, num_drafting: Floats, num_slots: Floats) -> Floats:
        costs = self._costs
        forward = costs.forward(self._start + num_drafts) - self._sunk
        drafting = costs.draft(num_drafting, num_slots) + costs.project(num_drafting)
        with_drafts = np.maximum(forward, self._plain_seconds) + drafting
        seconds: Floats = np.where(num_drafts > 0, with_drafts, self._plain_seconds)
        return seconds

    def _rows_per_block(self, slots: Floats) -> Floats:
        """Rows of the target's forward that cost as much as one more block of each length."""
        draft = self._costs.draft
        block = (draft(self._num, slots) - draft(1, slots)) / (self._num - 1)
        num_drafts = self._num * (slots - 1)
        added = self._costs.forward(self._start + num_drafts) - self._costs.forward(self._start)
        rows: Floats = block / np.maximum(added / num_drafts, 1e-9)
        return rows
