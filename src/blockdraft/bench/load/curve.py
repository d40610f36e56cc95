"""Throughput against interactivity, and what is read off such curves. Loads no model library.

A curve has a point for each concurrency, in that order: interactivity, the tokens
per second of the median user, and throughput, the tokens per second of all users together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Both axes at one concurrency."""

    interactivity: float
    throughput: float


Curve = Sequence[CurvePoint]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a curve gives at a level of the other axis; `outside` its measured range: nothing."""

    value: float | None
    outside: Literal["below", "above"] | None = None


def throughput_at(curve: Curve, interactivity: float) -> Reading:
    """Linear between neighboring points; the largest, where a curve has several."""
    return _read([(point.interactivity, point.throughput) for point in curve], interactivity)


def interactivity_at(curve: Curve, throughput: float) -> Reading:
    """The same, the other way around."""
    return _read([(point.throughput, point.interactivity) for point in curve], throughput)


def _read(points: Sequence[tuple[float, float]], x: float) -> Reading:
    found = [y for at, y in points if at == x]
    for (x0, y0), (x1, y1) in pairwise(points):
        if min(x0, x1) < x < max(x0, x1):
            found.append(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    if found:
        return Reading(max(found))
    return Reading(None, "below" if x < min(at for at, _ in points) else "above")


def no_faster_from(speedups: Mapping[int, float]) -> int | None:
    """From which concurrency on a configuration was nowhere faster than plain decoding.

    Args:
        speedups: over plain decoding, by concurrency.

    Returns:
        The least such one that was measured; None if it was faster at the largest.
    """
    found = None
    for concurrency in sorted(speedups, reverse=True):
        if speedups[concurrency] > 1:
            break
        found = concurrency
    return found
