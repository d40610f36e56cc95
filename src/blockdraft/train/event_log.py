"""Event files for TensorBoard. Needs the package tensorboard."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class EventLog:
    """Writes the rows of a run's log as events into `folder`; those after `step` are void."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, row: Mapping[str, Any]) -> None:
        """Every number of a row, under its name."""
        for name, value in _numbers(row, ""):
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value, 1):
            yield from _numbers(inner, f"{name}/{index}")
    elif isinstance(value, int | float) and name != "step":
        yield name, float(value)
