"""What a run leaves in its folder beside its state: a log, a page, the last and best drafter."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import LOCK, replace_file
from blockdraft.models.draft.checkpoint import PROVENANCE_NAME, read_provenance
from blockdraft.models.draft.hydra_head import HEAD_NAME
from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME
from blockdraft.train.config import TrainConfig
from blockdraft.train.hydra.state import HEAD_STATE
from blockdraft.train.kinds.base import TrainedDrafter
from blockdraft.train.report import write_report
from blockdraft.train.run_log import append_log, best_of, evaluations, forget_after

if TYPE_CHECKING:
    from blockdraft.train.event_log import EventLog

BEST, LAST = "drafter", "last"

BESIDE = {HEAD_NAME, HEAD_STATE, NGRAMS_NAME}
"""Beside the best drafter: they are of the target and its answers, not of the drafter's weights."""
_OF_OTHERS = BESIDE | {f"{name}.part" for name in BESIDE} | {LOCK}
"""What stays when the best drafter is replaced: a head may be training there at that time."""


class RunFolder:
    """Written by the main process alone; `step` is where the run goes on, None for a new one.

    An evaluation is one of these steps after another: `add` keeps its drafter as the last one and
    logs it, the caller saves the state, and `keep_best` copies the drafter if it is the best. So
    the best drafter is never one whose evaluation a killed run has forgotten.

    Raises:
        ConfigError: tensorboard is wanted and not installed.
    """

    def __init__(self, config: TrainConfig, step: int | None) -> None:
        self._out = config.out
        has_drafter = any(self._holds_drafter(name) for name in (BEST, LAST))
        if step is None:
            forget_after(config.out, -1)
        else:
            # Where all drafters were deleted, the evaluation of this step is made again.
            forget_after(config.out, step if has_drafter else step - 1)
        event_log = event_log_class(config)
        self._events = None if event_log is None else event_log(config.out, step or 0)
        if step is not None:
            self._finish_keeping()
            return
        for name in BESIDE:
            # What an earlier run left there may be of another target.
            (config.out / BEST / name).unlink(missing_ok=True)

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a step or an evaluation."""
        append_log(self._out, row)
        if self._events is not None:
            self._events.add(row)

    def add(
        self, drafter: TrainedDrafter, row: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        """Add an evaluation: `row` for the log, `facts` of where the drafter comes from."""
        drafter.save_pretrained(self._out / LAST, {**facts, "result": row})
        self.log(row)
        write_report(self._out)

    def keep_best(self) -> None:
        """Keep the last drafter as the best one, if the last evaluation is the best.

        It also takes the place of one that somebody has deleted.
        """
        rows = evaluations(self._out)
        if rows and (best_of(rows) is rows[-1] or not self._holds_drafter(BEST)):
            _copy_drafter(self._out / LAST, self._out / BEST)

    def _holds_drafter(self, name: str) -> bool:
        return (self._out / name / PROVENANCE_NAME).exists()

    def _finish_keeping(self) -> None:
        """Do what a run did not come to that was killed before `keep_best`."""
        rows = evaluations(self._out)
        last, best = (read_provenance(self._out / name).get("result") for name in (LAST, BEST))
        if rows and last == rows[-1] and best != last:
            self.keep_best()


def _copy_drafter(source: Path, to: Path) -> None:
    """Its provenance comes last, and tells a whole copy from one that was cut off.

    A Hydra head and n-grams stay: a run that goes on must not throw away an hour of training. So
    does the lock of a head's training, which keeps a second one off.
    """
    to.mkdir(exist_ok=True)
    names = {path.name for path in source.iterdir()}
    for path in to.iterdir():
        if path.name not in names | _OF_OTHERS and not path.is_dir():
            path.unlink()
    for name in sorted(names, key=lambda name: name == PROVENANCE_NAME):
        replace_file(to / name, partial(shutil.copyfile, source / name))


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
