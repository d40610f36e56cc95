"""The log of a run: one JSON line a step and an evaluation, and what is read from it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.core.files import write_errors_named, write_whole
from blockdraft.core.jsonl import bad_row, read_jsonl

LOG = "log.jsonl"


def append_log(folder: Path, row: Mapping[str, Any]) -> None:
    """Add one JSON line."""
    path = folder / LOG
    with write_errors_named(path), path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(dict(row)) + "\n")


def read_log(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows so far; a line that is cut off is left out.

    Raises:
        ConfigError: the file is not that of a run.
    """
    if (folder / LOG).exists():
        for number, row in read_jsonl(folder / LOG, is_growing=True):
            if not isinstance(row.get("step"), int):
                remedy = "give another out, or move the file away"
                raise bad_row(folder / LOG, number, "it does not belong to a step of a run", remedy)
            yield row


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The rows of evaluations so far."""
    return [row for row in read_log(folder) if "held_out" in row]


def score(row: Mapping[str, Any]) -> float:
    """What an evaluation is judged by: the true tau, or the offline one if that was left out."""
    return float(row["true_tau"].get("all", row["held_out"]["tau"]))


def best_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The evaluation to keep, of those that measured the same as the last one; of equals the first.

    Where few prompts are decoded the true tau is often the same: then the offline one decides, and
    at last the loss.
    """
    comparable = [row for row in rows if row.get("measured_on") == rows[-1].get("measured_on")]
    return max(
        comparable, key=lambda row: (score(row), row["held_out"]["tau"], -row["held_out"]["loss"])
    )


def forget_after(folder: Path, step: int) -> None:
    """Drop the rows of steps after `step`, which a run that goes on from it makes again."""
    rows = [row for row in read_log(folder) if row["step"] <= step]
    if (folder / LOG).exists():
        write_whole(folder / LOG, "".join(json.dumps(row) + "\n" for row in rows))
