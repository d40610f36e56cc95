"""Where the time of a step goes: phases whose sum is the wall time. No torch.

One clock runs all the time. Entering a phase charges what has passed since the last switch to the
phase that was current, leaving it returns to the outer one. So no moment is counted twice or
lost, and what no phase claims is the remainder. Times are whole nanoseconds: the sum is exact.

Two phases serve several ends at once: a forward of the target runs rows of prompts, and rows of
blocks that turn out to be kept or not. Their time is split after each step, in equal parts over the
rows. That is an attribution: a forward of half the rows would take more than half of the time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import cast, get_args

from blockdraft.core.recorder import Line, Phase, Recorder, Work

PHASES: tuple[Phase, ...] = get_args(Phase)
LINES: tuple[Line, ...] = get_args(Line)
SPLITS: Mapping[Phase, tuple[Line, ...]] = {
    "project": ("draft_prefill", "inject"),
    "forward": ("prefill", "accepted", "bonus", "siblings", "wasted"),
}
"""Phases that are split by rows; what has no rows, such as a step that failed, is the last's."""

_REMAINDER: Phase = "remainder"
_SECOND = 1_000_000_000


@dataclass(slots=True)
class PhaseTotals:
    """Time of each phase over many steps. A phase that was never entered is absent.

    `nanoseconds` sum to the wall time of the steps, and of phases entered between steps.
    `split_nanoseconds` are what lines have of the phases in SPLITS. `waited` is the part of
    `nanoseconds` in which the host waited for the device, 0 on a CPU. `work` is what was counted.
    `verified` and `kept` count candidates by source. The last two are the most tokens at any time
    in the draft context, and waiting to enter it.
    """

    num_steps: int = 0
    nanoseconds: Counter[Phase] = field(default_factory=Counter)
    split_nanoseconds: Counter[Line] = field(default_factory=Counter)
    waited: Counter[Phase] = field(default_factory=Counter)
    work: dict[Line, Work] = field(default_factory=dict)
    verified: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    most_context: int = 0
    most_waiting: int = 0

    @property
    def line_nanoseconds(self) -> dict[Line, int]:
        """Time of each line, in the order of LINES; the sum is that of the phases."""
        lines = Counter(self.split_nanoseconds)
        for phase, passed in self.nanoseconds.items():
            if phase in SPLITS:
                lines[SPLITS[phase][-1]] += passed - sum(lines[line] for line in SPLITS[phase])
            else:
                lines[cast(Line, phase)] += passed
        return {line: lines[line] for line in LINES if line in lines}

    def add(self, line: Line, work: Work) -> None:
        """Count work."""
        if line not in self.work:
            self.work[line] = Work()
        self.work[line] += work

    @property
    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase, in the order of PHASES."""
        return _in_seconds(self.nanoseconds)

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases together."""
        return self.nanoseconds.total() / _SECOND

    def merge(self, other: "PhaseTotals") -> None:
        """Add the totals of other steps."""
        self.num_steps += other.num_steps
        self.nanoseconds.update(other.nanoseconds)
        self.split_nanoseconds.update(other.split_nanoseconds)
        self.waited.update(other.waited)
        for line, work in other.work.items():
            self.add(line, work)
        self.verified.update(other.verified)
        self.kept.update(other.kept)
        self.most_context = max(self.most_context, other.most_context)
        self.most_waiting = max(self.most_waiting, other.most_waiting)


class PhaseTimer(Recorder):
    """Times the phases. For one thread; a failed step counts like any other: its time has passed.

    measures: whether work is to be counted too, which costs more than the clock. clock:
    nanoseconds. synchronize: called before the clock is read, to wait for a device that
    works on after a call has returned; it makes steps slower, so measure speed without it. The
    phase that gave the device its work is charged for the waiting.
    """

    def __init__(
        self,
        *,
        measures: bool = True,
        clock: Callable[[], int] = perf_counter_ns,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.measures = measures
        self._clock = clock
        self._synchronize = synchronize
        self._totals = PhaseTotals()
        self._step_ns: Counter[Phase] = Counter()
        self._step_rows: Counter[Line] = Counter()
        self._in_step = False
        # Innermost last. Empty between steps, unless a phase goes on there.
        self._open: list[Phase] = []
        self._switched_at = 0
        # Made once and used again and again: entering a phase allocates nothing.
        self._scopes = {name: _PhaseScope(self, name) for name in PHASES}

    @property
    def step_seconds(self) -> Mapping[Phase, float]:
        """Of the phases that have ended in the step that runs, or in the last one; as PHASES."""
        return _in_seconds(self._step_ns)

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Charge the time inside to a phase. Outside of a step it counts in the totals only."""
        return self._scopes[name]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; what no phase claims is the remainder."""
        assert not self._in_step, f"a step cannot begin inside phase {self._open[-1]} of another"
        depth = len(self._open)
        # First: if the begin is interrupted, the last step must not be split again.
        self._step_ns.clear()
        self._step_rows.clear()
        try:
            self.enter(_REMAINDER)
            self._in_step = True
            yield
        finally:
            # An interrupt may come anywhere, also where a phase ends: none of the step stays open.
            try:
                self._charge()
            finally:
                del self._open[depth:]
                self._in_step = False
            self._split()
            self._totals.num_steps += 1

    def add(self, line: Line, work: Work) -> None:
        """See Recorder.add."""
        self._totals.add(line, work)
        self._step_rows[line] += work.rows

    def count(self, verified: Iterable[str], kept: Iterable[str]) -> None:
        """See Recorder.count."""
        self._totals.verified.update(verified)
        self._totals.kept.update(kept)

    def hold(self, *, context: int, waiting: int) -> None:
        """See Recorder.hold."""
        self._totals.most_context = max(self._totals.most_context, context)
        self._totals.most_waiting = max(self._totals.most_waiting, waiting)

    def _split(self) -> None:
        """Split what the step has spent on phases that serve several ends."""
        for phase, lines in SPLITS.items():
            rows = [self._step_rows[line] for line in lines]
            if self._step_ns[phase] and any(rows):
                shares = split_evenly(self._step_ns[phase], rows)
                found = zip(lines, rows, shares, strict=True)
                self._totals.split_nanoseconds.update(
                    {line: share for line, num, share in found if num}
                )

    def take_totals(self) -> PhaseTotals:
        """What has been measured since the last call, but not inside a step; counting begins anew.

        A phase that is open is charged up to now, and goes on.
        """
        assert not self._in_step, "totals cannot be taken inside a step"
        self._charge()
        totals, self._totals = self._totals, PhaseTotals()
        return totals

    def enter(self, name: Phase) -> None:
        """Begin a phase; `phase` is the safe way to do it."""
        self._charge()
        self._open.append(name)

    def leave(self) -> None:
        """End the innermost phase; the one around it goes on."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        """Give the time since the last switch to the current phase, if there is one."""
        called = self._clock() if self._synchronize is not None else 0
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        if self._open:
            if self._synchronize is not None:
                self._totals.waited[self._open[-1]] += now - called
            passed = now - self._switched_at
            if self._in_step:
                self._step_ns[self._open[-1]] += passed
            self._totals.nanoseconds[self._open[-1]] += passed
        self._switched_at = now


class _PhaseScope:
    """Enters and leaves one phase. Holds no state of its own, so it may be open twice."""

    __slots__ = ("_name", "_timer")

    def __init__(self, timer: PhaseTimer, name: Phase) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._timer.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.leave()


def split_evenly(total: int, rows: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `rows`, of which one is positive; sums to `total`."""
    shares: list[int] = []
    num_before, given = 0, 0
    for num in rows:
        num_before += num
        shares.append(total * num_before // sum(rows) - given)
        given += shares[-1]
    return shares


def _in_seconds(nanoseconds: Mapping[Phase, int]) -> dict[Phase, float]:
    return {p: nanoseconds[p] / _SECOND for p in PHASES if p in nanoseconds}
