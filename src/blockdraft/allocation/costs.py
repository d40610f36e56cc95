"""What the parts of a step cost on this machine; measured once, then learned. No torch."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

import numpy as np

_KNOTS = sorted(float(m << e) for m in (1, 3) for e in range(14))
"""1, 2, 3, 4, 6, 8, 12 ... 24,576: sizes at which a cost is kept; between them it is a line."""

_LARGEST_SURPRISE, _MOST_SURPRISE = 0.25, 4.0
"""A measurement counts as at most _LARGEST_SURPRISE off, relatively: one outlier moves little. One
right behind others that were off to the same side is hardly an outlier: it counts as at most twice
as much as the one before, up to _MOST_SURPRISE."""
_NOISE = 0.1
"""Where two plain steps between others are off by more to the same side, what was known of them
counts half. They are few, so their cost would be learned slowly, and meanwhile that of candidates
would be taken for theirs: drafting could lose for minutes."""
_LEVEL_GAIN = 0.04
"""Share of a surprise by which all costs of a curve move: a busier machine, longer contexts."""
_FIRST_PLAIN = 8
"""Plain steps from which is learned, quickly, what the measurement at load left out."""
_SLOWDOWN_GAIN, _MOST_SLOWER = 0.25, 4.0
"""Where target and drafter become slower together, all costs follow by this power of how much; one
measurement counts as at most _MOST_SLOWER times slower."""
_LEAST_SLOWER = 1.2
"""If both are slower by less, it may be noise, or costs may have been measured wrongly."""
_HOLD = 1 / 100
"""With each surprise a knot is pulled to the cost measured at load, by this share of its distance
(a logarithm). Without it the level could rise for ever and the knots that are met fall with it,
since no cost that is met changes by that; the others would follow the level."""
_SHIFT = 1 / 400
"""With each plain step so much of what was learned of its cost alone (a logarithm) is taken to be
the level: else what forwards of candidates miss could move the level for ever, since plain steps
would make up for it."""
_FADE_STEPS, _FADE = 64, 1 / 64
"""After so many plain steps that are learned from, all that drafts cost moves back to what was
measured at load, by this share of its distance (a logarithm). Drafts that were dear for a while are
not made, so nothing else would show that they no longer are; in 4,096 such steps two thirds of it
are forgotten."""
_SMALLEST_WEIGHT = 4.0
"""The cost at a knot counts as so many measurements at first, and when none was near it lately."""
_KEPT_WEIGHT = 1 - 1 / 64
"""What is left of a knot's weight after another measurement of the curve."""


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
        self._weights = [_SMALLEST_WEIGHT] * len(_KNOTS)
        self._seconds = _isotonic(_through(sorted(points)), self._weights)
        self._measured = tuple(self._seconds)
        # Of the next surprise, if it goes to the same side as the last one.
        self._bound, self._is_above = _LARGEST_SURPRISE, False

    def at(self, size: float) -> float:
        """Seconds for a positive size."""
        left, share = _place(size)
        low, high = self._seconds[left : left + 2]
        return self.level * (low + share * (high - low))

    def over(self, sizes: range) -> list[float]:
        """The same for sizes one after another: all between two knots at once."""
        found: list[float] = []
        while len(found) < len(sizes):
            first = sizes[len(found)]
            left, _ = _place(first)
            begin, end = _KNOTS[left : left + 2]
            low, high = self._seconds[left : left + 2]
            slope = self.level * (high - low) / (end - begin)
            start = self.level * low - slope * begin
            if first > end:
                found += [start + slope * end] * (len(sizes) - len(found))
            else:
                last = min(int(end) + 1, sizes.stop)
                found += [start + slope * size for size in range(first, last)]
        return found

    def record(self, size: int, seconds: float, above: int | None = None) -> None:
        """Learn from one measurement; `above`: see `record_shape`.

        The less a size was met lately, the more it is its own cost that was wrong, and the less the
        level: else costs of drafting that were believed too low would make plain steps seem dear.
        """
        known = self._known(size)
        self.move_level(known * self.record_shape(size, seconds, above))

    def move_level(self, surprise: float) -> None:
        """Follow a measurement that was off by this share of what was expected."""
        self.level *= 1 + _LEVEL_GAIN * surprise

    def doubt(self) -> None:
        """Let all that was learned of the shape count half."""
        self._weights = [max(weight / 2, _SMALLEST_WEIGHT) for weight in self._weights]

    def fade(self) -> None:
        """Move back a little to what was measured at first, since nothing was measured lately."""
        pairs = zip(self._seconds, self._measured, strict=True)
        self._seconds = [own * (first / own) ** _FADE for own, first in pairs]

    def shift(self, size: int) -> float:
        """Move the cost of a size back a little to what was measured at first.

        Returns the factor of the level with which it is again what it was.
        """
        before = self.at(size)
        for knot, share in _shares(size, None):
            self._seconds[knot] *= (self._measured[knot] / self._seconds[knot]) ** (share * _SHIFT)
        self._seconds = _isotonic(self._seconds, self._weights)
        return before / self.at(size)

    def _known(self, size: float) -> float:
        """From 0 for sizes that were never met, or not lately, to 1."""
        left, share = _place(size)
        weights = self._weights[left : left + 2]
        weight = (1 - share) * weights[0] + share * weights[1]
        return min(weight / _SMALLEST_WEIGHT - 1, 1.0)

    def record_shape(self, size: int, seconds: float, above: int | None = None) -> float:
        """Learn from one measurement but its level; returns by what share it was off, in bounds.

        above: a smaller size, if only what is beyond it was measured. No knot up to it moves.
        """
        # After every step of the engine, and right behind a forward: cheap, so no arrays.
        surprise = self._bounded(seconds / self.at(size) - 1)
        self._weights = [max(weight * _KEPT_WEIGHT, _SMALLEST_WEIGHT) for weight in self._weights]
        for knot, share in _shares(size, above):
            pull = _HOLD * log(self._measured[knot] / self._seconds[knot])
            self._seconds[knot] *= 1 + share * (surprise + pull) / self._weights[knot]
            self._weights[knot] += share
        # Nor does the fit move them.
        held = 0 if above is None else bisect_right(_KNOTS, above)
        least = self._seconds[held - 1] if held else 0.0
        beyond = _isotonic(self._seconds[held:], self._weights[held:])
        self._seconds[held:] = [max(seconds, least) for seconds in beyond]
        return surprise

    def _bounded(self, surprise: float) -> float:
        """A surprise in the bounds of an outlier, or in wider ones if it is not the first."""
        is_above = surprise > 0
        bound = self._bound if is_above == self._is_above else _LARGEST_SURPRISE
        is_off = abs(surprise) > _LARGEST_SURPRISE
        self._bound = min(2 * bound, _MOST_SURPRISE) if is_off else _LARGEST_SURPRISE
        self._is_above = is_above
        return min(max(surprise, -bound), bound)


@dataclass(frozen=True, slots=True)
class KeyCosts:
    """What keys add to a forward of the target, in seconds.

    key: of a sequence, each. branch: another branch of a tree, and branch_key: each key that it
    reads again.
    """

    key: float = 0.0
    branch: float = 0.0
    branch_key: float = 0.0


NO_KEY_COSTS = KeyCosts()


class StepCosts:
    """Seconds of the phases of a step.

    plain_points: (sequences of a step that drafts nothing, seconds). forward_points: (rows of a
    target forward that verifies chains, seconds). draft_points: (slots of a draft forward, all
    sequences together, anchors included, seconds). At least one of each. project_points: (tokens
    whose features become draft context, seconds); without them that is free until it was measured.
    key_costs: what contexts and branches add. drafts_by_level: the drafter runs once for each depth
    of a proposal, and a sequence counts as one slot of each of these forwards.

    Rows of one sequence share its keys, so drafts cost less than as many sequences, and each have a
    curve. What a slower machine does to one of them, it does to all.
    """

    def __init__(
        self,
        plain_points: Iterable[tuple[int, float]],
        forward_points: Iterable[tuple[int, float]],
        draft_points: Iterable[tuple[int, float]],
        project_points: Sequence[tuple[int, float]] = (),
        key_costs: KeyCosts = NO_KEY_COSTS,
        *,
        drafts_by_level: bool = False,
    ) -> None:
        plain_points, forward_points = (
            sorted((size, seconds) for size, seconds in points)
            for points in (plain_points, forward_points)
        )
        self._forward = CostCurve(forward_points)
        self._plain = CostCurve(_continued(plain_points, forward_points, self._forward))
        self._num_plain, self._last_off = 0, 1.0
        self._is_behind_forwards = False
        self._draft = CostCurve(draft_points)
        self._project = CostCurve(project_points) if project_points else None
        self._key_costs = key_costs
        self.drafts_by_level = drafts_by_level

    def plain(self, num_sequences: int, num_keys: int = 0) -> float:
        """A step that drafts nothing, of sequences with so many keys together."""
        keys = self._plain.level * self._key_costs.key * num_keys
        return self._forward.level * (self._plain.at(num_sequences) + keys)

    def forward(self, num_rows: float) -> float:
        """Of so many rows of one sequence, with all that a step does beside the draft."""
        return self._forward.at(num_rows)

    def forwards(self, num_rows: range) -> list[float]:
        """The same for each number of rows."""
        return self._forward.over(num_rows)

    def branch(self, num_keys: int) -> float:
        """What another branch adds to a forward, of a sequence with so many keys."""
        costs = self._key_costs
        return self._forward.level * (costs.branch + costs.branch_key * num_keys)

    def draft_forwards(self, num_sequences: int, depth: int) -> tuple[int, int]:
        """(slots of a forward, forwards) of a draft of paths so deep."""
        if self.drafts_by_level:
            return num_sequences, depth
        return num_sequences * (1 + depth), 1

    def draft(self, num_slots: int, num_forwards: int = 1) -> float:
        """Draft forwards of so many slots, of all their sequences together, anchors included.

        A machine that slows the target down is taken to slow the drafter down too, because while
        nothing is drafted nobody measures it.
        """
        return self._forward.level * num_forwards * self._draft.at(num_slots)

    def project(self, num_tokens: int) -> float:
        """Projecting the features of so many tokens."""
        if self._project is None or not num_tokens:
            return 0.0
        return self._forward.level * self._project.at(num_tokens)

    def record_plain(self, num_sequences: int, num_keys: int, seconds: float) -> bool:
        """Learn from a step that drafted nothing; returns whether its cost seems to have changed.

        True only where steps with candidates came between, so that few such steps are measured.
        """
        off = seconds / self.plain(num_sequences, num_keys)
        pair = off, self._last_off
        self._last_off = off
        is_off = min(pair) > 1 + _NOISE or max(pair) < 1 - _NOISE
        # Where nothing comes between, many are measured, and it may as well be the machine.
        has_changed, self._is_behind_forwards = is_off and self._is_behind_forwards, False
        if has_changed:
            self._plain.doubt()
        surprise = self._plain.record_shape(num_sequences, off * self._plain.at(num_sequences))
        self._num_plain += 1
        if self._num_plain % _FADE_STEPS == 0:
            self._forward.fade()
            self._draft.fade()
            self._draft.level **= 1 - _FADE
            if self._project is not None:
                self._project.fade()
                self._project.level **= 1 - _FADE
        if self._num_plain <= _FIRST_PLAIN:
            self._plain.level *= 1 + surprise / (1 + self._num_plain)
        self._forward.move_level(surprise)
        self._forward.level *= self._plain.shift(num_sequences)
        return has_changed

    def record_forward(
        self, num_sequences: int, num_rows: int, expected: float, seconds: float
    ) -> None:
        """Learn from the target's part of a step with drafts that should have taken `expected`."""
        self._is_behind_forwards = True
        found = seconds / expected * self._forward.at(num_rows)
        self._forward.record(num_rows, found, above=num_sequences)

    def record_draft(self, num_slots: int, expected: float, seconds: float) -> None:
        """Learn from draft forwards of so many slots that should have taken `expected` together."""
        self._draft.record(num_slots, seconds / expected * self._draft.at(num_slots))

    def record_slowdown(self, forward: float, draft: float) -> float:
        """Learn from how many times longer than expected target and drafter took.

        What slows both alike is the machine, whose other work comes and goes: all costs follow it
        at once. Returns how many times slower it was.
        """
        slower = min(forward, draft) if min(forward, draft) > 1 else min(1.0, max(forward, draft))
        slower = min(max(slower, 1 / _MOST_SLOWER), _MOST_SLOWER)
        if 1 / _LEAST_SLOWER < slower < _LEAST_SLOWER:
            return 1.0
        self._forward.level *= slower**_SLOWDOWN_GAIN
        return slower

    def record_project(self, num_tokens: int, seconds: float) -> None:
        """Learn from features of so many tokens that were projected."""
        seconds = max(seconds / self._forward.level, 1e-9)
        if self._project is None:
            self._project = CostCurve([(num_tokens, seconds)])
        self._project.record(num_tokens, seconds)


def _place(size: float) -> tuple[int, float]:
    """The knot at or before a size, and how far it is to the next one, 1 at most."""
    left = min(max(bisect_left(_KNOTS, size) - 1, 0), len(_KNOTS) - 2)
    return left, min((size - _KNOTS[left]) / (_KNOTS[left + 1] - _KNOTS[left]), 1.0)


def _shares(size: float, above: float | None) -> list[tuple[int, float]]:
    """The knots around a size and their shares in its cost, less their shares in that of `above`.

    So what is learned at a size moves the difference of the two costs the same way.
    """
    left, share = _place(size)
    if above is None:
        return [(left, 1 - share), (left + 1, share)]
    begin, part = _place(above)
    held = {begin: 1 - part, begin + 1: part}
    return [
        (knot, max(own - held.get(knot, 0.0), 0.0))
        for knot, own in ((left, 1 - share), (left + 1, share))
    ]


def _continued(
    plain_points: list[tuple[int, float]],
    forward_points: list[tuple[int, float]],
    forward: CostCurve,
) -> list[tuple[int, float]]:
    """`plain_points` and more: beyond them, a sequence adds as much as another row of one does.

    By the curve, which never falls: of points that were measured beside other work one may be so
    high that those behind it would make plain steps take less than nothing.
    """
    last, seconds = plain_points[-1]
    sizes = [num for num, _ in forward_points if num > last]
    return [*plain_points, *((num, seconds + forward.at(num) - forward.at(last)) for num in sizes)]


def _through(points: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds at the knots: straight lines through the sorted points."""
    sizes, seconds = (np.array(values, np.float64) for values in zip(*points, strict=True))
    at_knots = np.interp(_KNOTS, sizes, seconds)
    if len(points) > 1:
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        at_knots += slope * np.maximum(np.array(_KNOTS) - sizes[-1], 0.0)
    through: list[float] = at_knots.tolist()
    return through


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: weighted least squares, pooling adjacent violators."""
    if all(value <= following for value, following in pairwise(values)):
        return list(values)
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            earlier, its_weight, its_length = pools.pop()
            mean = (mean * total + earlier * its_weight) / (total + its_weight)
            total, length = total + its_weight, length + its_length
        pools.append((mean, total, length))
    return [mean for mean, _, length in pools for _ in range(length)]
