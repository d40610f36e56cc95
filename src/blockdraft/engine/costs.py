"""What a step costs on this machine, what drafting brings, and which depths pay. All is learned."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_KNOTS: Floats = np.array(sorted(m << e for m in (1, 3) for e in range(14)), np.float64)
"""1, 2, 3, 4, 6, 8, 12 ... 24,576: sizes at which a cost is kept; between them it is a line."""

_LARGEST_SURPRISE = 0.25
"""A measurement counts as at most this much off, relatively: one outlier moves little."""
_LEVEL_GAIN = 0.04
"""Share of a surprise by which all costs of a curve move: a busier machine, longer contexts."""
_SMALLEST_WEIGHT = 4.0
"""Measurements that a knot's cost counts for when it is calibrated, or has not been met lately."""
_KEPT_WEIGHT = 1 - 1 / 256
"""What is left of a knot's weight after another measurement of the curve."""

_PRICES: Floats = np.array([0.02, 0.05, 0.1, 0.17, 0.25, 0.35, 0.5, 0.7])[:, None, None]
"""Probabilities of being kept that a draft must reach. The best of them is chosen."""

_FIRST_RATE = 0.6
"""What is believed of a drafter that was never tried: enough to give it a hearing."""
_START_WEIGHT = 4.0
"""Observations that the first belief counts for."""
_FADING_STEPS = 8
"""A rate loses the weight of one observation in so many steps without one."""


class CostCurve:
    """Seconds by size, never falling with size.

    `points` are measured (size, seconds), sizes and seconds positive. Beyond the largest size the
    cost goes on with the slope of the last two points.

    Two things are learned from live measurements: the `level` of the whole curve, quickly, and its
    shape, at the knots around a size; the longer a knot was not met, the faster. So a machine that
    becomes busy moves the costs of all sizes, also of those that nobody runs just now.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        self.level = 1.0
        self._seconds = _through(sorted(points))
        self._weights = np.full(len(_KNOTS), _SMALLEST_WEIGHT)
        self._monotone = _isotonic(self._seconds, self._weights)

    def __call__(self, sizes: ArrayLike) -> Floats:
        """Seconds for each size, in the shape of `sizes`; 0 for size 0."""
        sizes = np.asarray(sizes, np.float64)
        seconds: Floats = np.interp(sizes, _KNOTS, self._monotone) * (sizes > 0)
        return self.level * seconds

    def record(self, size: int, seconds: float) -> None:
        """Learn from one measurement."""
        surprise = seconds / float(self(size)) - 1
        surprise = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self.level *= 1 + _LEVEL_GAIN * surprise
        right = min(max(int(np.searchsorted(_KNOTS, size)), 1), len(_KNOTS) - 1)
        span = _KNOTS[right] - _KNOTS[right - 1]
        share = min((size - _KNOTS[right - 1]) / span, 1.0)
        around, shares = slice(right - 1, right + 1), np.array([1 - share, share])
        self._seconds[around] *= 1 + shares * surprise / self._weights[around]
        self._weights = np.maximum(self._weights * _KEPT_WEIGHT, _SMALLEST_WEIGHT)
        self._weights[around] += shares
        self._monotone = _isotonic(self._seconds, self._weights)


class StepCosts:
    """Seconds of the phases of a step; sizes may be arrays.

    forward_points: (rows of a target forward, seconds). draft_points: (slots of a draft forward,
    all sequences together, anchors included, seconds). At least one of each.
    """

    def __init__(
        self,
        forward_points: Iterable[tuple[int, float]],
        draft_points: Iterable[tuple[int, float]],
    ) -> None:
        self._forward = CostCurve(forward_points)
        self._draft = CostCurve(draft_points)
        self._absorb = 0.0

    def forward(self, num_rows: ArrayLike) -> Floats:
        """A target forward of so many rows, with all that plain decoding does beside it."""
        return self._forward(num_rows)

    def draft(self, num_sequences: ArrayLike, num_slots: ArrayLike) -> Floats:
        """A draft forward of sequences with `num_slots` each, anchor included; 0 for none.

        A machine that slows the target down is taken to slow the drafter down too, because while
        nothing is drafted nobody measures it.
        """
        return self._forward.level * self._draft(np.multiply(num_sequences, num_slots))

    def absorb(self, num_sequences: ArrayLike) -> Floats:
        """Projecting the context features of one step's tokens of so many drafted sequences."""
        return self._forward.level * self._absorb * np.asarray(num_sequences, np.float64)

    def record_forward(self, num_rows: int, seconds: float) -> None:
        """Learn from a target forward."""
        self._forward.record(num_rows, seconds)

    def record_draft(self, num_sequences: int, num_slots: int, seconds: float) -> None:
        """Learn from a draft forward."""
        self._draft.record(num_sequences * num_slots, seconds / self._forward.level)

    def record_absorb(self, num_sequences: int, seconds: float) -> None:
        """Learn from the features of a step in which so many sequences drafted again."""
        measured = seconds / self._forward.level / num_sequences
        if self._absorb:
            # The same guard against outliers as for the curves, from above only: it may be free.
            measured = min(measured, self._absorb * (1 + 4 * _LARGEST_SURPRISE))
        self._absorb += (measured - self._absorb) * (_LEVEL_GAIN if self._absorb else 1.0)


class Acceptance:
    """Rates of acceptance by position, of one sequence or of all.

    A rate is the share of drafts that were kept where all before them were. Positions that were
    never tested are believed to be like the last one that was.
    """

    def __init__(self, max_depth: int, memory: float) -> None:
        self.rates = [_FIRST_RATE] * max_depth
        self._num_tested = 0
        self._weights = [_START_WEIGHT] * max_depth
        self._memory = memory

    def start(self, memory: float) -> "Acceptance":
        """The same beliefs, ready to be changed by new observations."""
        acceptance = Acceptance(len(self.rates), memory)
        acceptance.rates = list(self.rates)
        acceptance._num_tested = self._num_tested
        return acceptance

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from one block. What comes behind the first miss was not tested."""
        num_tested = min(num_drafted, num_accepted + 1)
        for i in range(num_tested):
            weight = self._weights[i] = min(self._weights[i] + 1, self._memory)
            self.rates[i] += ((i < num_accepted) - self.rates[i]) / weight
        self._num_tested = max(self._num_tested, num_tested)
        num_untested = len(self.rates) - self._num_tested
        self.rates[self._num_tested :] = [self.rates[self._num_tested - 1]] * num_untested

    def fade(self, num_steps: int) -> None:
        """Trust the rates less after steps without a test, so that news counts for more."""
        loss = num_steps / _FADING_STEPS
        self._weights = [max(weight - loss, _START_WEIGHT) for weight in self._weights]


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
        return forward + costs.draft(num_drafting, num_slots) + costs.absorb(num_drafting)

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


def measure_points(
    run: Callable[[int], object],
    sizes: Sequence[int],
    *,
    rounds: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> list[tuple[int, float]]:
    """Median seconds of `run(size)` for each size.

    The sizes take turns, so that a busy moment of the machine falls on all of them.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            start = clock()
            run(size)
            seconds[size].append(clock() - start)
    return [(size, median(times)) for size, times in seconds.items()]


def _through(points: Sequence[tuple[int, float]]) -> Floats:
    """Seconds at the knots: straight lines through the sorted points."""
    sizes, seconds = (np.array(values, np.float64) for values in zip(*points, strict=True))
    at_knots: Floats = np.interp(_KNOTS, sizes, seconds)
    if len(points) > 1:
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        at_knots += slope * np.maximum(_KNOTS - sizes[-1], 0.0)
    return at_knots


def _isotonic(values: Floats, weights: Floats) -> Floats:
    """The nearest sequence that never falls: weighted least squares, pooling adjacent violators."""
    if (np.diff(values) >= 0).all():
        return values.copy()
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            earlier, its_weight, its_length = pools.pop()
            mean = (mean * total + earlier * its_weight) / (total + its_weight)
            total, length = total + its_weight, length + its_length
        pools.append((mean, total, length))
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])
