"""How far a long command is, on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


@contextmanager
def stage_progress() -> Iterator[Callable[[str, float], None]]:
    """A bar with the time left, on standard error; a line a stage where that is no terminal.

    Yields a function to call with what begins and the share that is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _StageLines().show
        return
    columns = TextColumn("{task.description:>20}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)


class _StageLines:
    """Says on standard error when a stage begins, how much is done, and what that leaves."""

    def __init__(self) -> None:
        self._stage = ""
        self._started_at = perf_counter()

    def show(self, stage: str, share: float) -> None:
        """Print a line for a stage that was not shown yet."""
        if stage == self._stage:
            return
        self._stage = stage
        seconds = perf_counter() - self._started_at
        left = f", about {seconds * (1 - share) / share:.0f} s left" if share else ""
        print(f"blockdraft: {share:4.0%} {stage}{left}", file=sys.stderr)
