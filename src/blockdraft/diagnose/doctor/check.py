"""One line of the doctor's report. Loads no model library."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from blockdraft.core.words import counted

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
        parts.append(counted(warnings, "warning"))
    if unknown := marks.count("unknown"):
        parts.append(f"{unknown} unknown")
    rest = f" ({', '.join(parts)})" if parts else ""
    if names:
        # Names hold commas: "tau, math".
        return f"PROBLEMS FOUND: {'; '.join(names)}{rest}"
    return f"NO PROBLEMS: nothing was found that costs acceptance{rest}"
