"""Answers of fixed lengths: from which one on drafting saves time. Loads no model library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LENGTH_DEFINITIONS = {
    "break_even_length": "of the measured lengths: at_least_as_fast_from, the least at which, and "
    "at all longer ones, drafted decoding took no longer than plain decoding from the request to "
    "the last token; surely_from, the same for the lower end of the interval; null: not even at "
    "the longest; has_bands: false for a single prompt, which has no interval",
}


@dataclass(frozen=True, slots=True)
class BreakEvenLength:
    """See LENGTH_DEFINITIONS. has_bands: False with a single prompt, which has no band."""

    lengths: tuple[int, ...]
    at_least_as_fast_from: int | None
    surely_from: int | None
    has_bands: bool = True


def break_even_length(speedups: Mapping[int, Mapping[str, Any] | None]) -> BreakEvenLength:
    """Of the speed-ups over plain decoding, end to end, by growing length."""
    lengths = tuple(speedups)
    lows = [_at(found, "low") for found in speedups.values()]
    return BreakEvenLength(
        lengths,
        _from(lengths, [_at(found, "value") for found in speedups.values()]),
        _from(lengths, lows),
        any(low is not None for low in lows),
    )


def _at(speedup: Mapping[str, Any] | None, key: str) -> float | None:
    return None if speedup is None else speedup[key]


def _from(lengths: Sequence[int], speedups: Sequence[float | None]) -> int | None:
    first = None
    for length, speedup in zip(reversed(lengths), reversed(speedups), strict=True):
        if speedup is None or speedup < 1:
            break
        first = length
    return first


def length_line(found: BreakEvenLength) -> str:
    """What it says, for people."""
    shown = ", ".join(map(str, found.lengths))
    if found.at_least_as_fast_from is None:
        return f"of {shown} tokens, drafted decoding takes longer at the longest"
    line = (
        f"of {shown} tokens, drafted decoding takes no longer from {found.at_least_as_fast_from} on"
    )
    if not found.has_bands:
        return f"{line}; one prompt, no interval"
    if found.surely_from is None:
        return f"{line}; the interval of the longest reaches below 1"
    return f"{line}; the whole interval is at least 1 from {found.surely_from} on"
