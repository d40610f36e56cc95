"""What `bench context` has measured so far: a row holds a passage at one length, both ways."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.bench.journal import Row, RowJournal, read_sample, sample_row
from blockdraft.bench.timed_output import TimedOutput


@dataclass(frozen=True, slots=True)
class ContextMeasurement:
    """One passage, by its number from 0, at one length, decoded both ways."""

    requested_len: int
    prompt_len: int
    passage: int
    plain: TimedOutput
    drafted: TimedOutput

    @property
    def identical(self) -> bool:
        """True if drafted and plain decoding gave the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids


class ContextJournal(RowJournal[ContextMeasurement]):
    """The passages that are done; see RowJournal."""

    def __init__(self, path: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, settings or {}, "bench context", _read)
        # By the tokens of the prompt too: memory may have room for fewer or more than then.
        self.done = {(one.requested_len, one.prompt_len, one.passage): one for one in self.found}

    def add(self, measured: ContextMeasurement) -> None:
        """Keep one more."""
        self.write(
            {
                "requested_len": measured.requested_len,
                "prompt_len": measured.prompt_len,
                "passage": measured.passage,
                "plain": sample_row(measured.plain),
                "drafted": sample_row(measured.drafted),
            }
        )


def _read(row: Row) -> ContextMeasurement:
    return ContextMeasurement(
        *(row["requested_len"], row["prompt_len"], row["passage"]),
        *(read_sample(row["plain"]), read_sample(row["drafted"])),
    )
