"""What a part finds, on the disk as soon as it is known."""

import json
from pathlib import Path
from typing import Any

from blockdraft.core.files import write_whole


class Notes:
    """The findings of a part, which has `seconds` in all; `work` is the folder of all parts."""

    def __init__(self, path: Path, seconds: float = 60.0) -> None:
        self.work, self.seconds = path.parent, seconds
        self.found: dict[str, Any] = {}
        self._path = path

    def note(self, *keys: str, value: object) -> None:
        """Note a value under nested keys, and write everything."""
        inner = self.found
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
        write_whole(self._path, json.dumps(self.found))

    def earlier(self, part: str) -> dict[str, Any]:
        """What another part noted; empty if it has not run."""
        return read_notes(notes_path(self.work, part))


def first_line(error: Exception) -> str:
    """What a report says of an error; the rest is in the log."""
    return str(error).partition("\n")[0] or type(error).__name__


def notes_path(work: Path, part: str) -> Path:
    """Where a part's findings lie."""
    return work / f"{part}.found.json"


def read_notes(path: Path) -> dict[str, Any]:
    """Findings, as far as they came."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
