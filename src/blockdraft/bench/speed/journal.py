"""What `bench speed` has measured so far: a row holds a turn of a prompt, decoded in every way."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockdraft.bench.journal import Row, RowJournal, read_sample, sample_row
from blockdraft.bench.outside.interface import Failure, OutsideOutput
from blockdraft.bench.timed_output import TimedOutput

Decoded = TimedOutput | OutsideOutput | Failure
Samples = Mapping[str, Decoded]
"""By way."""
_Place = tuple[int, int, int]
"""Run, prompt and turn."""


class SpeedJournal(RowJournal[tuple[_Place, Samples]]):
    """The samples that are done, of all runs of a command; see RowJournal."""

    def __init__(self, path: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, settings or {}, "bench speed", _read_row)
        self.done = dict(self.found)
        self.num_found = len(self.done)
        """Measured by an earlier start of the same command."""

    def part(self, run: int) -> "Part":
        """That of one run, by its number from 0."""
        return Part(self, run)


class Part:
    """The samples of one run."""

    def __init__(self, journal: SpeedJournal, run: int) -> None:
        self._journal, self._run = journal, run

    def find(self, prompt: int, turn: int) -> Samples | None:
        """Of a prompt by its place from 0 and a turn from 1; None if it was not measured."""
        return self._journal.done.get((self._run, prompt, turn))

    def add(self, prompt: int, turn: int, samples: Samples) -> None:
        """Keep one more."""
        self._journal.done[self._run, prompt, turn] = samples
        rows = {name: _row(sample) for name, sample in samples.items()}
        self._journal.write({"run": self._run, "prompt": prompt, "turn": turn, "samples": rows})


def _read_row(row: Row) -> tuple[_Place, Samples]:
    samples = {name: _read(sample) for name, sample in row["samples"].items()}
    return (row["run"], row["prompt"], row["turn"]), samples


def _row(sample: Decoded) -> Row:
    if isinstance(sample, Failure):
        return asdict(sample)
    if isinstance(sample, OutsideOutput):
        return {"timed": sample_row(sample.timed), "num_passes": sample.num_passes}
    return sample_row(sample)


def _read(row: Row) -> Decoded:
    if "reason" in row:
        return Failure(row["reason"])
    if "timed" in row:
        return OutsideOutput(read_sample(row["timed"]), row["num_passes"])
    return read_sample(row)
