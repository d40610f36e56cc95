"""What to tell the user of a run that was interrupted."""

from blockdraft.data.generate import WHILE_ANSWERING
from blockdraft.train.config_file import RunFile
from blockdraft.train.run_state import STATE, saved_step
from blockdraft.train.texts import are_written


def how_to_go_on(run: RunFile) -> str:
    """One line."""
    if run.answers is not None and not are_written(run.answers):
        return WHILE_ANSWERING
    step = saved_step(run.train.out / STATE)
    if step is None:
        return "interrupted before a state was saved; the same command starts over"
    return f"interrupted; the same command resumes from step {step}"
