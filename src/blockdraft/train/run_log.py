"""The log of a run: one JSON line a step and an evaluation, and what is read from it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import write_whole
from blockdraft.core.jsonl import read_jsonl
from blockdraft.train.config import TrainConfig

if TYPE_CHECKING:
    from blockdraft.train.event_log import EventLog

LOG = "log.jsonl"


def append_log(folder: Path, row: Mapping[str, Any]) -> None:
    """Add one JSON line."""
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps(dict(row)) + "\n")


def read_log(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows so far; a line that is cut off is left out."""
    if (folder / LOG).exists():
        for _, row in read_jsonl(folder / LOG, is_growing=True):
            yield row


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The rows of evaluations so far."""
    return [row for row in read_log(folder) if "held_out" in row]


def score(row: Mapping[str, Any]) -> float:
    """What an evaluation is judged by: the true tau, or the offline one if that was left out."""
    return float(row["true_tau"].get("all", row["held_out"]["tau"]))


def forget_after(folder: Path, step: int) -> None:
    """Drop the rows of steps after `step`, which a run that goes on from it makes again."""
    rows = [row for row in read_log(folder) if row["step"] <= step]
    if (folder / LOG).exists():
        write_whole(folder / LOG, "".join(json.dumps(row) + "\n" for row in rows))


def open_event_log(config: TrainConfig, step: int) -> "EventLog | None":
    """TensorBoard's log of a run, if it is wanted, see `event_log_class`."""
    kind = event_log_class(config)
    return None if kind is None else kind(config.out, step)


def event_log_class(config: TrainConfig) -> "type[EventLog] | None":
    """What writes TensorBoard's log, if it is wanted.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    if not config.tensorboard:
        return None
    try:
        from blockdraft.train.event_log import EventLog
    except ImportError as error:
        raise ConfigError(
            "tensorboard=true needs the package tensorboard; pip install tensorboard"
        ) from error
    return EventLog
