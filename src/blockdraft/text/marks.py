"""Marks in a text that comes in pieces."""

from collections.abc import Sequence
from functools import reduce


def begun_pattern(atoms: Sequence[str]) -> str:
    """A pattern of what these match one behind the other, up to any of them."""
    return reduce(lambda rest, atom: f"(?:{atom}{rest})?", reversed(atoms), "")


def num_begun(text: str, *marks: str) -> int:
    """Length of the longest end of a text that may begin a mark, none of them whole."""
    longest = max(map(len, marks), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
