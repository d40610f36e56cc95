"""What a measurement has done so far, in a file, so that a run that was ended goes on.

The first line says what is measured; each further one is a row of the measurement.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.errors import ConfigError
from blockdraft.core.files import write_errors_named, write_whole
from blockdraft.core.jsonl import read_jsonl
from blockdraft.measure.acceptance import AcceptanceStats

Row = Mapping[str, Any]
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


class RowJournal(Generic[T]):
    """The rows that are done, in the order in which they were written.

    A row is written at once and whole, so that what was measured outlives the process. What a
    process that was killed wrote of its last row is left out.

    Args:
        path: where they are kept; None keeps them nowhere.
        settings: all that a measurement depends on, as plain values for JSON.
        command: whose journal it is, for errors.
        read: what a row stands for; raises what Python does where it is no such row.

    Raises:
        ConfigError: the file is of a run with other settings, is damaged, or is no such file.
        DiskError: it cannot be written.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        command: str,
        read: Callable[[Row], T],
    ) -> None:
        self._path = path
        self.found: list[T] = []
        """What was there at the start."""
        if path is None:
            return
        head = json.dumps({"settings": settings}, sort_keys=True)
        rows: list[dict[str, Any]] = []
        if path.exists():
            first, *rows = [row for _, row in read_jsonl(path, is_growing=True)] or [{}]
            _check_settings(path, first, json.loads(head)["settings"], command)
            try:
                self.found = [read(row) for row in rows]
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ConfigError(
                    f"{path} is damaged: {error!r}; delete it and start again"
                ) from error
        # Without a half line at the end, where the last run was ended.
        with write_errors_named(path):
            write_whole(path, "\n".join([head, *map(json.dumps, rows)]) + "\n")

    def write(self, row: Row) -> None:
        """Keep one more.

        Raises:
            DiskError: it cannot be written.
        """
        if self._path is not None:
            with write_errors_named(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def how_to_go_on(self) -> str:
        """What is said of a run that is broken off."""
        if self._path is None or not self._path.exists():
            return "interrupted"
        return f"interrupted; {self._path} has what was measured, and the same command goes on"

    def remove(self) -> None:
        """Delete the file: the result is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _check_settings(path: Path, first: Row, settings: Mapping[str, Any], command: str) -> None:
    found = first.get("settings")
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no journal of {command}; give another --output")
    then, now = found.get("threads"), settings.get("threads")
    # Without --threads their number depends on what else runs, so this is nobody's mistake.
    if then != now and found == {**settings, "threads": then}:
        raise ConfigError(
            f"{path} is of a run with --threads {then}, and now there are {now}; give --threads "
            f"{then}, delete it, or give another --output"
        )
    other = [
        name
        for key in sorted({*found, *settings})
        for name in _changed(key, found.get(key), settings.get(key))
    ]
    if other:
        raise ConfigError(
            f"{path} is of a run with other {', '.join(dict.fromkeys(other))}, which cannot be "
            "gone on with; delete it, or give another --output"
        )


def _changed(name: str, then: Any, now: Any) -> list[str]:
    """The settings that differ: options by their own names, others as a whole."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = zip(then, now, strict=True)
        return [found for one, other in pairs for found in _changed(name, one, other)]
    if name in OPTIONS and isinstance(then, dict) and isinstance(now, dict):
        return [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return [name] if then != now else []


def sample_row(sample: TimedOutput) -> dict[str, Any]:
    """One output, for JSON; `read_sample` reads it."""
    return {
        "token_ids": sample.token_ids,
        "total_seconds": sample.total_seconds,
        "decode_seconds": sample.decode_seconds,
        "queue_seconds": sample.queue_seconds,
        "largest_gap": sample.largest_gap,
        "acceptance": {
            field.name: value if isinstance(value, int) else list(value.items())
            for field in fields(AcceptanceStats)
            for value in [getattr(sample.acceptance, field.name)]
        },
    }


def read_sample(row: Row) -> TimedOutput:
    """The output of a row.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: it is no such row.
    """
    counts: dict[str, Any] = {
        name: value
        if isinstance(value, int)
        else Counter({tuple(k) if isinstance(k, list) else k: number for k, number in value})
        for name, value in row["acceptance"].items()
    }
    return TimedOutput(
        token_ids=tuple(row["token_ids"]),
        total_seconds=row["total_seconds"],
        decode_seconds=row["decode_seconds"],
        acceptance=AcceptanceStats(**counts),
        queue_seconds=row["queue_seconds"],
        largest_gap=row["largest_gap"],
    )
