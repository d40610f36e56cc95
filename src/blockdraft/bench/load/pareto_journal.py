"""What `bench pareto` has measured so far: a row holds a point and repeat, of all ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.bench.decode import Run
from blockdraft.bench.journal import Row, RowJournal, read_sample, sample_row


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of each way, by its name, over the same requests, at one point.

    prompts: the name of each request's prompt.
    """

    concurrency: int
    repeat: int
    prompts: tuple[str, ...]
    runs: Mapping[str, Run]


class Journal(RowJournal[Turn]):
    """The turns that are done, by concurrency and repeat; see RowJournal."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        super().__init__(path, settings, "bench pareto", _read_turn)
        self.turns = {(turn.concurrency, turn.repeat): turn for turn in self.found}

    def add(self, turn: Turn) -> None:
        """Keep one more."""
        self.turns[turn.concurrency, turn.repeat] = turn
        self.write(_turn_row(turn))


def _turn_row(turn: Turn) -> Row:
    return {
        "concurrency": turn.concurrency,
        "repeat": turn.repeat,
        "prompts": turn.prompts,
        "runs": {
            way: {
                "wall_seconds": run.wall_seconds,
                "samples": [sample_row(sample) for sample in run.samples],
            }
            for way, run in turn.runs.items()
        },
    }


def _read_turn(row: Row) -> Turn:
    runs = {
        way: Run(
            samples=tuple(read_sample(sample) for sample in run["samples"]),
            wall_seconds=run["wall_seconds"],
        )
        for way, run in row["runs"].items()
    }
    return Turn(row["concurrency"], row["repeat"], tuple(row["prompts"]), runs)
