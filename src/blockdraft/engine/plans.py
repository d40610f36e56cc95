"""What depths of a step are worth: expected tokens over expected seconds."""

from dataclasses import dataclass

import numpy as np

from blockdraft.engine.costs import Floats, StepCosts

_PRICES: Floats = np.array([0.02, 0.05, 0.1, 0.17, 0.25, 0.35, 0.5, 0.7])[:, None, None]
"""Probabilities of being kept that a draft must reach. The best of them is chosen."""


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


class Economy:
    """Prices plans of one step.

    survival: [sequences, depths], the probability that a draft and all before it are kept; never
    rising with depth, and 0 beyond a sequence's limit.
    """

    def __init__(self, costs: StepCosts, survival: Floats, num_other_rows: int) -> None:
        self._costs = costs
        self._survival = survival
        self._num, max_depth = survival.shape
        # Also the least that the target takes of a step with drafts.
        self._plain_seconds = costs.plain(self._num)
        self._kept = np.zeros((self._num, 1 + max_depth))  # drafts kept on average, by depth
        np.cumsum(survival, axis=1, out=self._kept[:, 1:])
        self._start = self._num + num_other_rows
        # Prompt rows take their time however much is drafted.
        self._sunk = float(costs.forward(self._start) - costs.forward(self._num))

    def price(self, depths: list[int]) -> Plan:
        """The plan with these depths."""
        tokens = self._num + float(self._kept[range(self._num), depths].sum())
        num_drafting = sum(depth > 0 for depth in depths)
        seconds = self._seconds(sum(depths), num_drafting, 1 + max(depths))
        return Plan(depths, tokens, float(seconds))

    def _seconds(
        self, num_drafts: Floats | int, num_drafting: Floats | int, num_slots: Floats | int
    ) -> Floats:
        costs = self._costs
        forward = costs.forward(self._start + num_drafts) - self._sunk
        drafting = costs.draft(num_drafting, num_slots) + costs.absorb(num_drafting)
        with_drafts = np.maximum(forward, self._plain_seconds) + drafting
        seconds: Floats = np.where(np.greater(num_drafts, 0), with_drafts, self._plain_seconds)
        return seconds

    def best(self) -> Plan:
        """The plan with the most tokens per second among a few hundred that may be it.

        Each has a price, the least survival that is worth a row, and a cap, since all blocks of a
        step are as long as the longest. A sequence drafts up to both, unless that does not pay
        for its slots in the draft forward. Axes below: prices, sequences, caps.
        """
        max_depth = self._survival.shape[1]
        slots = np.arange(2.0, max_depth + 2)
        taken = self._survival >= _PRICES
        depths = np.minimum(taken.sum(axis=2, keepdims=True), slots - 1)
        tokens = (self._survival * taken).cumsum(axis=2)
        drafting = tokens - _PRICES * depths > _PRICES * self._rows_per_block(slots)
        num_drafts, num_tokens = (depths * drafting).sum(axis=1), (tokens * drafting).sum(axis=1)
        seconds = self._seconds(num_drafts, drafting.sum(axis=1), slots)
        price, cap = np.unravel_index(np.argmax((self._num + num_tokens) / seconds), seconds.shape)
        chosen = depths[price, :, cap] * drafting[price, :, cap]
        return self.price(chosen.astype(int).tolist())

    def _rows_per_block(self, slots: Floats) -> Floats:
        """Rows of the target's forward that cost as much as one more block of each length."""
        if self._num == 1:
            return np.zeros_like(slots)  # no one to share with: the whole plan pays, or does not
        draft = self._costs.draft
        block = (draft(self._num, slots) - draft(1, slots)) / (self._num - 1)
        num_drafts = self._num * (slots - 1)
        added = self._costs.forward(self._start + num_drafts) - self._costs.forward(self._start)
        rows: Floats = block / np.maximum(added / num_drafts, 1e-9)
        return rows
