"""What `bench pareto` has measured so far, in a file, so that a run that was ended goes on.

The first line says what is measured; each further one holds a point and repeat, of all ways.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from blockdraft.allocation.policy import DepthUse
from blockdraft.bench.decode import Run
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.errors import ConfigError
from blockdraft.core.files import write_whole
from blockdraft.core.jsonl import read_jsonl
from blockdraft.measure.acceptance import AcceptanceStats


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of each way, by its name, over the same requests, at one point."""

    concurrency: int
    repeat: int
    runs: Mapping[str, Run]


class Journal:
    """The turns that are done, by concurrency and repeat.

    Args:
        path: where they are kept; None keeps them in memory only.
        settings: all that a measurement depends on, as plain values for JSON.

    Raises:
        ConfigError: the file is of a run with other settings, or no such file.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.turns: dict[tuple[int, int], Turn] = {}
        if path is None:
            return
        head = json.dumps({"settings": settings}, sort_keys=True)
        lines = [head]
        if path.exists():
            rows = [row for _, row in read_jsonl(path, is_growing=True)]
            _check_settings(path, rows, json.loads(head)["settings"])
            for row in rows[1:]:
                turn = _read_turn(path, row)
                self.turns[turn.concurrency, turn.repeat] = turn
            lines += [json.dumps(row) for row in rows[1:]]
        # Without a half line at the end, where the last run was ended.
        write_whole(path, "\n".join(lines) + "\n")

    def add(self, turn: Turn) -> None:
        """Keep one more."""
        self.turns[turn.concurrency, turn.repeat] = turn
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_turn_row(turn)) + "\n")

    def remove(self) -> None:
        """Delete the file: the result is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _check_settings(path: Path, rows: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
    found = rows[0].get("settings") if rows else None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no journal of bench pareto; give another --output")
    other = sorted(key for key in {*found, *settings} if found.get(key) != settings.get(key))
    if other:
        raise ConfigError(
            f"{path} is of a run with another {', '.join(other)}, which cannot be gone on with; "
            "delete it, or give another --output"
        )


def _turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "concurrency": turn.concurrency,
        "repeat": turn.repeat,
        "runs": {
            way: {
                "wall_seconds": run.wall_seconds,
                "samples": [_sample_row(sample) for sample in run.samples],
            }
            for way, run in turn.runs.items()
        },
    }


def _sample_row(sample: TimedOutput) -> dict[str, Any]:
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


def _read_turn(path: Path, row: Mapping[str, Any]) -> Turn:
    try:
        runs = {
            way: Run(
                samples=tuple(_read_sample(sample) for sample in run["samples"]),
                wall_seconds=run["wall_seconds"],
                depth_use=DepthUse(0, 0.0, {}),
            )
            for way, run in row["runs"].items()
        }
        return Turn(row["concurrency"], row["repeat"], runs)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}; delete it and start again") from error


def _read_sample(row: Mapping[str, Any]) -> TimedOutput:
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
