"""The file that answers are appended to as they come, and what it holds of earlier runs."""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeGuard

from blockdraft.core.files import write_errors_named
from blockdraft.core.jsonl import bad_row, is_whole, read_jsonl
from blockdraft.data.answers import Answer

Row = dict[str, Any]

Key = tuple[str, float, int]
"""A prompt's id, temperature and sample."""


_IDS: dict[int, int] = {}


def shared_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    """Token ids that are kept: 8 bytes each, where a parsed row has an object for every token."""
    return tuple([_IDS.setdefault(token, token) for token in token_ids])


@dataclass(frozen=True, slots=True)
class PriorAnswer:
    """An answer: to which prompt, its tokens if it has an end, else how many there are."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] | None
    cut_at: int | None

    @classmethod
    def of(cls, row: Row) -> "PriorAnswer":
        """An answer that the conversation can go on from, if it has an end."""
        finish, response_ids = row["finish"], shared_ids(row["response_ids"])
        return cls(
            prompt_ids=shared_ids(row["prompt_ids"]),
            response_ids=response_ids if finish == "stop" else None,
            cut_at=len(response_ids) if finish == "length" else None,
        )

    def is_cut_below(self, max_tokens: int) -> bool:
        """True if it might have gone on, with so many tokens."""
        return self.cut_at is not None and self.cut_at < max_tokens


Answered = dict[Key, PriorAnswer]


@dataclass(slots=True)
class DataProgress:
    """Counts of a run so far; `what` is written, `finishes` counts "stop", "length" and "loop"."""

    what: str
    num_jobs: int
    num_answers: int
    num_tokens: int
    tokens_per_second: float
    finishes: Counter[str]

    @property
    def seconds_left(self) -> float:
        """Estimate from the mean answer so far."""
        if not self.num_answers or not self.tokens_per_second:
            return float("inf")
        mean = self.num_tokens / self.num_answers
        return (self.num_jobs - self.num_answers) * mean / self.tokens_per_second


Report = Callable[[DataProgress], None]


def append_rows(
    path: Path,
    answers: Iterable[Answer],
    to_row: Callable[[Answer], Row],
    progress: DataProgress,
    report: Report,
) -> Iterator[Row]:
    """Yield the row of each answer once it is in the file, where a killed run finds it again."""
    start = monotonic()
    if path.exists():
        _end_last_row(path)
    with path.open("a", encoding="utf-8") as file:
        for answer in answers:
            row = to_row(answer)
            with write_errors_named(path):
                file.write(json.dumps(row) + "\n")
                file.flush()
            progress.num_answers += 1
            progress.num_tokens += len(answer.response_ids)
            progress.tokens_per_second = progress.num_tokens / (monotonic() - start)
            progress.finishes[answer.finish] += 1
            report(progress)
            yield row


def read_answered(path: Path) -> Answered:
    """What the file holds, but for a last line cut off by a killed run.

    Raises:
        ConfigError: a row is not as it was written.
    """
    if not path.exists():
        return {}
    return {key_of(row): PriorAnswer.of(row) for _, row in _rows(path)}


def last_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row) without the rows that were answered anew further down.

    Raises:
        ConfigError: a row is not as it was written.
    """
    last = {key_of(row): number for number, row in _rows(path)}
    for number, row in _rows(path):
        if last[key_of(row)] == number:
            yield number, row


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, row in read_jsonl(path, is_growing=True):
        if not _is_as_written(row):
            reason = "it is not an answer that this command wrote"
            remedy = "delete that line, and `blockdraft data` generates the answer again"
            raise bad_row(path, number, reason, remedy)
        yield number, row


def _is_as_written(row: Row) -> bool:
    kinds = {"id": str, "set": str, "temperature": int | float, "sample": int, "finish": str}
    return all(isinstance(row.get(name), kind) for name, kind in kinds.items()) and all(
        are_ids(row.get(name)) for name in ("prompt_ids", "response_ids")
    )


def are_ids(value: object) -> TypeGuard[list[int]]:
    """True for a list of token ids, which arrays of 32 bits hold."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        return False
    return not value or (min(value) >= 0 and max(value) < 2**32)


def key_of(row: Row) -> Key:
    """What an answer is known by."""
    return row["id"], row["temperature"], row["sample"]


def hash_of(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> bytes:
    """Tells an answer from others; a hash, since there may be a million of them."""
    digest = hashlib.sha256(array("q", prompt_ids).tobytes())
    digest.update(array("q", [-1, *response_ids]).tobytes())
    return digest.digest()[:16]


def _end_last_row(path: Path) -> None:
    """Let the file end with a whole line: one that was cut off goes, the rest is not touched."""
    with path.open("rb+") as file:
        line, end = b"\n", 0
        for line in file:
            end += len(line)
        if not is_whole(line):
            file.truncate(end - len(line))
        elif not line.endswith(b"\n"):
            file.write(b"\n")
