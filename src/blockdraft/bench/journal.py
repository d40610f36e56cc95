"""What a measurement has done so far, in a file, so that a run that was ended goes on.

The first line says what is measured; each further one has a value and its place.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.errors import ConfigError
from blockdraft.core.files import write_errors_named, write_whole
from blockdraft.core.jsonl import read_jsonl
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.phases import PhaseTotals

Place = tuple[int, ...]
T = TypeVar("T")

ENDING = ".part.jsonl"
"""Behind the name of the output: what has been measured so far."""


def journal_path(output: Path | None) -> Path | None:
    """Where the journal of a result lies; None without a result that is written to a file."""
    if output is None or (output.exists() and not output.is_file()):
        return None
    return output.with_name(output.name + ENDING)


OPTIONS = ("models", "options")
"""Settings that hold options by name; the others hold paths, digests or versions."""


class Journal(Generic[T]):
    """What is done, by its place, in the order in which it was added.

    A row is written at once and whole, so that what was measured outlives the process. What a
    process that was killed wrote of its last row is left out. No phases are kept, so a measurement
    with a ledger is given no path.

    Args:
        path: where it is kept; None keeps it nowhere.
        settings: all that a measurement depends on, as plain values for JSON.
        command: whose journal it is, for errors.

    Raises:
        ConfigError: the file is of a run with other settings, is damaged, or is no such file.
        DiskError: it cannot be written.
    """

    kinds: ClassVar[tuple[type, ...]] = ()
    """The dataclasses that values are made of, beside TimedOutput."""

    def __init__(
        self,
        path: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        command: str = "bench",
    ) -> None:
        self._path = path
        self.done: dict[Place, T] = {}
        self.num_found = 0
        """Of those done, what an earlier start of the same command measured."""
        if path is None:
            return
        head = json.dumps({"settings": settings or {}}, sort_keys=True)
        rows: list[dict[str, Any]] = []
        if path.exists():
            first, *rows = [row for _, row in read_jsonl(path, is_growing=True)] or [{}]
            _check_settings(path, first, json.loads(head)["settings"], command)
            try:
                kinds = {kind.__name__: kind for kind in (*self.kinds, *_KINDS)}
                self.done = {tuple(row["place"]): _read(row["value"], kinds) for row in rows}
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path} is damaged: {error!r}; delete it and start again"
                ) from error
        self.num_found = len(self.done)
        # Without a half line at the end, where the last run was ended.
        with write_errors_named(path):
            write_whole(path, "\n".join([head, *map(json.dumps, rows)]) + "\n")

    def add(self, place: Place, value: T) -> None:
        """Keep one more.

        Raises:
            DiskError: it cannot be written.
        """
        self.done[place] = value
        if self._path is not None:
            row = {"place": place, "value": _plain(value)}
            with write_errors_named(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def how_to_go_on(self) -> str:
        """What is said of a run that is broken off."""
        if self._path is None or not self._path.exists():
            return "interrupted"
        return f"interrupted; {self._path} holds what was measured; the same command resumes it"

    def remove(self) -> None:
        """Delete the file: the result is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _check_settings(
    path: Path, first: Mapping[str, Any], settings: Mapping[str, Any], command: str
) -> None:
    found = first.get("settings")
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a journal of {command}; give another --output")
    then, now = found.get("threads"), settings.get("threads")
    # Without --threads their number depends on what else runs, so this is nobody's mistake.
    if then != now and found == {**settings, "threads": then}:
        raise ConfigError(
            f"{path} is from a run with --threads {then}, and this one uses {now}; give --threads "
            f"{then}, delete it, or give another --output"
        )
    other = [
        name
        for key in sorted({*found, *settings})
        for name in _changed(key, found.get(key), settings.get(key))
    ]
    if other:
        raise ConfigError(
            f"{path} is from a run with different {', '.join(dict.fromkeys(other))} and cannot be "
            "resumed; delete it, or give another --output"
        )


def _changed(name: str, then: Any, now: Any) -> list[str]:
    """The settings that differ: options by their own names, others as a whole."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = zip(then, now, strict=True)
        return [found for one, other in pairs for found in _changed(name, one, other)]
    if name in OPTIONS and isinstance(then, dict) and isinstance(now, dict):
        return [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return [name] if then != now else []


_KINDS = (TimedOutput, AcceptanceStats)
_KIND, _COUNTS = "kind", "counts"


def _plain(value: Any) -> Any:
    """For JSON; `_read` reads it. Tuples are lists there, and dataclasses are named."""
    if isinstance(value, Counter):
        return {_COUNTS: list(value.items())}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if is_dataclass(value):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        kept = {name: _plain(v) for name, v in found.items() if not isinstance(v, PhaseTotals)}
        return {_KIND: type(value).__name__, **kept}
    return value


def _read(value: Any, kinds: Mapping[str, type]) -> Any:
    """What `_plain` was given, with tuples in the place of lists.

    Raises:
        KeyError, TypeError, ValueError: it is no such value.
    """
    if isinstance(value, list):
        return tuple(_read(one, kinds) for one in value)
    if not isinstance(value, dict):
        return value
    found = {name: _read(one, kinds) for name, one in value.items()}
    if _COUNTS in found:
        return Counter(dict(found[_COUNTS]))
    return kinds[found.pop(_KIND)](**found) if _KIND in found else found
