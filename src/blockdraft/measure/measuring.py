"""Setting an engine up to be measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from blockdraft.cache.pages import Pages
from blockdraft.measure.ledger import Ledger, Measurable, make_ledger
from blockdraft.measure.phases import PhaseTimer, PhaseTotals


def compute_every_prompt(engine: Measurable) -> None:
    """Turn off the reuse of prompts: runs repeat each other's, and would find them in memory."""
    memory = engine.target.memory
    if isinstance(memory, Pages):
        memory.reuse = False


@contextmanager
def reusing(engine: Measurable, wanted: bool) -> Iterator[None]:
    """Let requests take over what earlier ones left in memory, or compute every prompt inside."""
    memory = engine.target.memory
    if not isinstance(memory, Pages):
        yield
        return
    before, memory.reuse = memory.reuse, wanted
    try:
        yield
    finally:
        memory.reuse = before


def time_phases(engine: Measurable, device: str) -> None:
    """Time the phases of every step from now on; on a GPU each waits until the device is done."""
    on_gpu = torch.device(device).type == "cuda"
    # Of this device: without it, that of the current one, which may be another card.
    wait = partial(torch.cuda.synchronize, device)
    engine.timer = PhaseTimer(synchronize=wait if on_gpu else None)


class Meter:
    """Keeps account of an engine that is being measured."""

    def __init__(self, engine: Measurable) -> None:
        self._engine = engine

    def take(self) -> Ledger:
        """The ledger of what has passed since the last call, or since measuring began."""
        return make_ledger(self.take_totals(), self._engine)

    def take_totals(self) -> PhaseTotals:
        """The same, as it was measured: totals of several runs can be merged."""
        return self._engine.timer.take_totals()


@contextmanager
def measured(engine: Measurable, device: str) -> Iterator[Meter]:
    """Measure what an engine does inside, and all that its user does: text, streams, pauses.

    Afterwards the engine has the timer that it had.
    """
    usual = engine.timer
    time_phases(engine, device)
    try:
        with engine.timer.phase("stream"):
            yield Meter(engine)
    finally:
        engine.timer = usual
