"""What one step of a served engine did, for whoever counts. No torch."""

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from blockdraft.cache.memory import Memory
from blockdraft.cache.pages import Pages
from blockdraft.measure.phases import PhaseTotals

_STALL_FACTOR = 3.0
_NUM_GAPS = 33
_FEWEST_GAPS = 8


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages of K/V memory: held by sequences, kept for reuse only, and free."""

    held: int
    kept: int
    free: int

    @property
    def share(self) -> float:
        """Part of the pages that sequences hold."""
        total = self.held + self.kept + self.free
        return self.held / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Samples that run, that wait, and whose requests are being prepared; and the pages.

    There are none where memory is not planned in pages.
    """

    num_running: int
    num_waiting: int
    num_preparing: int
    pages: PageUse | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, counted.

    passes: decoding passes by (num_drafted, num_accepted); a sequence's first token comes from its
    prompt and is no pass. num_pass_tokens: tokens that they committed.
    num_prompt_tokens: of prompts whose first token came now, num_reused_tokens of which were not
    computed. gaps: seconds between the tokens of a sequence, one for each pass.
    num_stalls: see Pace. has_prompt: prompts shared the step.
    num_preempted: since the start.
    """

    num_tokens: int
    num_prompt_tokens: int
    num_reused_tokens: int
    num_pass_tokens: int
    num_stalls: int
    num_preempted: int
    has_prompt: bool
    phases: PhaseTotals
    passes: Counter[tuple[int, int]] = field(default_factory=Counter)
    gaps: tuple[float, ...] = ()


class StepObserver(Protocol):
    """Is told of every step, in the engine's thread; must be quick, and must not raise."""

    def on_step(self, report: StepReport) -> None:
        """Take the report of one step."""


class Pace:
    """When the tokens of one sequence came; finds stalls.

    A stall is a gap of more than three times the median of the last 33 gaps, once there are 8.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)

    def note(self, now: float) -> tuple[float, bool]:
        """Take the time of the next tokens; returns the gap, and whether it is a stall."""
        gap, self._last = now - self._last, now
        known = len(self._gaps) >= _FEWEST_GAPS
        is_stall = known and gap > _STALL_FACTOR * statistics.median(self._gaps)
        self._gaps.append(gap)
        return gap, is_stall


def page_use(memory: Memory) -> PageUse | None:
    """How the pages of a memory are used; None if it has none."""
    if not isinstance(memory, Pages):
        return None
    free, kept = memory.num_free, memory.num_available - memory.num_free
    return PageUse(held=memory.num_pages - 1 - free - kept, kept=kept, free=free)
