"""What `bench pareto` has measured so far: a row holds a point and repeat, of all ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.bench.decode import Run
from blockdraft.bench.journal import Row, RowJournal, read_sample, sample_row


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repeat of a point: a run of each way, by its name, over the same requests.

    number: from 0. prompts: the name of each request's prompt.
    """

    concurrency: int
    number: int
    prompts: tuple[str, ...]
    runs: Mapping[str, Run]


class Journal(RowJournal[Repeat]):
    """The repeats that are done, by concurrency and number; see RowJournal."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        super().__init__(path, settings, "bench pareto", _read_repeat)
        self.repeats = {(repeat.concurrency, repeat.number): repeat for repeat in self.found}

    def add(self, repeat: Repeat) -> None:
        """Keep one more."""
        self.repeats[repeat.concurrency, repeat.number] = repeat
        self.write(_repeat_row(repeat))


def _repeat_row(repeat: Repeat) -> Row:
    return {
        "concurrency": repeat.concurrency,
        "repeat": repeat.number,
        "prompts": repeat.prompts,
        "runs": {
            way: {
                "wall_seconds": run.wall_seconds,
                "samples": [sample_row(sample) for sample in run.samples],
            }
            for way, run in repeat.runs.items()
        },
    }


def _read_repeat(row: Row) -> Repeat:
    runs = {
        way: Run(
            samples=tuple(read_sample(sample) for sample in run["samples"]),
            wall_seconds=run["wall_seconds"],
        )
        for way, run in row["runs"].items()
    }
    return Repeat(row["concurrency"], row["repeat"], tuple(row["prompts"]), runs)
