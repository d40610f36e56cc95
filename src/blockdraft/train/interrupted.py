"""What is left of a run that was broken off, for whoever broke it off."""

from blockdraft.core.errors import INTERRUPTED
from blockdraft.train.config_file import RunFile
from blockdraft.train.run_state import STATE, saved_step
from blockdraft.train.stopping import Stopped
from blockdraft.train.texts import are_written

WHILE_ANSWERING = "interrupted; the same command goes on with the answers that are missing"


def how_to_go_on(run: RunFile) -> str:
    """One line."""
    if run.answers is not None and not are_written(run.answers):
        return WHILE_ANSWERING
    step = saved_step(run.train.out / STATE)
    if step is None:
        return "interrupted before a state was saved; the same command trains from the beginning"
    return f"interrupted; the same command goes on from step {step}"


def exit_status_of(error: KeyboardInterrupt) -> int:
    """As shells give it, for the signal that came."""
    return 128 + error.number if isinstance(error, Stopped) else INTERRUPTED
