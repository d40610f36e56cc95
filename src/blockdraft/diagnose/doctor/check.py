"""One line of the doctor's report. Loads no model library."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Mark = Literal["ok", "warning", "out", "unknown"]

SIGNS: Mapping[Mark, str] = {"ok": "✓", "warning": "!", "out": "✗", "unknown": "?"}


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is, what was found, and what to do about it.

    "out" costs acceptance, or speed, for certain; a "warning" may. "unknown": nothing to compare
    with, or not looked at.
    """

    name: str
    mark: Mark
    found: str
    remedy: str = ""


def verdict(checks: Iterable[Check]) -> str:
    """All lines in one sentence."""
    marks = [check.mark for check in checks]
    names = [check.name for check in checks if check.mark == "out"]
    parts = []
    if warnings := marks.count("warning"):
        parts.append(f"{warnings} warning{'s' if warnings > 1 else ''}")
    if unknown := marks.count("unknown"):
        parts.append(f"{unknown} unknown")
    rest = f" ({', '.join(parts)})" if parts else ""
    if names:
        return f"OUT OF ORDER: {', '.join(names)}{rest}"
    return f"IN ORDER: nothing was found that costs acceptance{rest}"
