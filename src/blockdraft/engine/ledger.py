"""Where the time of a step goes: phases whose sum is the wall time. No torch.

One clock runs all the time. Entering a phase charges what has passed since the last switch to the
phase that was current, leaving it returns to the outer one. So no moment is counted twice or
lost, and what no phase claims is the remainder. Times are whole nanoseconds: the sum is exact.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import Literal, Protocol, get_args

Phase = Literal[
    "schedule",  # who runs
    "draft",  # the drafter's forward and its guesses
    "absorb",  # the target's features become keys and values of the drafter
    "forward",  # the target's forward
    "choose",  # the target's choices, and where the guesses end
    "commit",  # tokens appended, caches cut
    "controller",  # how many tokens to draft next
    "wait",  # nothing to do, or waiting for others
    "remainder",  # what no phase claims
]
PHASES: tuple[Phase, ...] = get_args(Phase)

_REMAINDER: Phase = "remainder"
_SECOND = 1_000_000_000


@dataclass(slots=True)
class PhaseTotals:
    """Time and entries of each phase over many steps. A phase that was never entered is absent.

    `nanoseconds` sum to the wall time of the steps, and of phases entered between steps.
    """

    num_steps: int = 0
    nanoseconds: Counter[Phase] = field(default_factory=Counter)
    counts: Counter[Phase] = field(default_factory=Counter)

    @property
    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase, in the order of PHASES."""
        return _in_seconds(self.nanoseconds)

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases together."""
        return self.nanoseconds.total() / _SECOND

    @property
    def shares(self) -> dict[Phase, float]:
        """Part of the total time that each phase took; they sum to 1. Empty without any time."""
        total = self.nanoseconds.total()
        return {p: self.nanoseconds[p] / total for p in PHASES if self.nanoseconds[p]}

    def merge(self, other: "PhaseTotals") -> None:
        """Add the totals of other steps."""
        self.num_steps += other.num_steps
        self.nanoseconds.update(other.nanoseconds)
        self.counts.update(other.counts)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "num_steps": self.num_steps,
            "total_seconds": self.total_seconds,
            "seconds": self.seconds,
            "shares": self.shares,
            "counts": {p: self.counts[p] for p in PHASES if p in self.counts},
        }


class Timer(Protocol):
    """What the loop needs of a timer; PhaseTimer measures, NO_TIMER does not."""

    def step(self) -> AbstractContextManager[None]:
        """Time one step: `with timer.step(): ...`. Steps do not nest."""
        ...

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Charge the time inside to a phase: `with timer.phase("forward"): ...`. May nest."""
        ...

    def take_totals(self) -> PhaseTotals:
        """What has been measured since the last call; counting begins anew."""
        ...


class PhaseTimer:
    """Measures. For one thread; a failed step counts like any other, as its time has passed.

    clock: nanoseconds. synchronize: called before the clock is read, to wait for a device that
    works on after a call has returned; it makes steps slower, so measure speed without it.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], int] = perf_counter_ns,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._totals = PhaseTotals()
        self._step_ns: Counter[Phase] = Counter()
        self._last_step: dict[Phase, float] = {}
        # Innermost last. Empty between steps: that time belongs to nobody.
        self._open: list[Phase] = []
        self._switched_at = 0
        # Made once and used again and again: entering a phase allocates nothing.
        self._scopes = {name: _PhaseScope(self, name) for name in PHASES}

    @property
    def last_step(self) -> Mapping[Phase, float]:
        """Seconds of each phase of the last finished step; empty before the first."""
        return self._last_step

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Charge the time inside to a phase. Outside of a step it counts in the totals only."""
        return self._scopes[name]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; what no phase claims is the remainder."""
        assert not self._open, f"a step cannot begin inside phase {self._open[-1]}"
        self._step_ns.clear()
        self.enter(_REMAINDER)
        try:
            yield
        finally:
            self.leave()
            self._totals.num_steps += 1
            self._last_step = _in_seconds(self._step_ns)

    def take_totals(self) -> PhaseTotals:
        """What has been measured since the last call; counting begins anew.

        Inside a step, what has been charged so far.
        """
        totals, self._totals = self._totals, PhaseTotals()
        return totals

    def enter(self, name: Phase) -> None:
        """Begin a phase; `phase` is the safe way to do it."""
        self._charge()
        self._open.append(name)
        self._totals.counts[name] += 1

    def leave(self) -> None:
        """End the innermost phase; the one around it goes on."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        """Give the time since the last switch to the current phase, if there is one."""
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        if self._open:
            passed = now - self._switched_at
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


_NOTHING = nullcontext()


class NoTimer:
    """Measures nothing and holds nothing; use the one instance NO_TIMER."""

    __slots__ = ()

    def step(self) -> AbstractContextManager[None]:
        """A scope that does nothing."""
        return _NOTHING

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A scope that does nothing."""
        return _NOTHING

    def take_totals(self) -> PhaseTotals:
        """Empty totals."""
        return PhaseTotals()


NO_TIMER = NoTimer()
"""The timer of an engine that is not measured."""


def _in_seconds(nanoseconds: Mapping[Phase, int]) -> dict[Phase, float]:
    return {p: nanoseconds[p] / _SECOND for p in PHASES if p in nanoseconds}
