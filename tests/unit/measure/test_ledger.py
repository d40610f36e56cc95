import itertools

import pytest

from blockdraft.core.recorder import NO_RECORDER, Work
from blockdraft.measure.phases import (
    LINES,
    PHASES,
    SPLITS,
    PhaseTimer,
    PhaseTotals,
    split_evenly,
)

SECOND = 1_000_000_000


class FakeClock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 17

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def timer(clock):
    return PhaseTimer(clock=clock)


def run_step(timer, clock):
    """Ten seconds: 1 schedule, 2 draft, 3 forward, 4 of nobody."""
    with timer.step():
        with timer.phase("schedule"):
            clock.sleep(1)
        clock.sleep(1)
        with timer.phase("draft"):
            clock.sleep(2)
        with timer.phase("forward"):
            clock.sleep(3)
        clock.sleep(3)


def test_phases_and_remainder_sum_to_the_wall_time(timer, clock):
    run_step(timer, clock)
    assert timer.step_seconds == {"schedule": 1, "draft": 2, "forward": 3, "remainder": 4}
    assert list(timer.step_seconds) == [name for name in PHASES if name in timer.step_seconds]


def test_the_sum_is_exact_where_fractions_of_seconds_are_not(clock):
    times = iter(range(0, 10**12, 333_333_333))
    timer = PhaseTimer(clock=lambda: next(times))
    for _ in range(100):
        with timer.step(), timer.phase("draft"), timer.phase("choose"):
            pass
    totals = timer.take_totals()
    # Six readings a step enclose five intervals; the time between steps belongs to nobody.
    assert totals.nanoseconds.total() == 100 * 5 * 333_333_333
    assert totals.nanoseconds["choose"] * 5 == totals.nanoseconds.total()


def test_an_inner_phase_is_taken_out_of_the_outer_one(timer, clock):
    with timer.step(), timer.phase("commit"):
        clock.sleep(1)
        with timer.phase("project"):
            clock.sleep(5)
            with timer.phase("commit"):  # the same phase again, further in
                clock.sleep(10)
        clock.sleep(2)
    assert timer.step_seconds == {"commit": 13, "project": 5, "remainder": 0}


def test_an_error_leaves_the_timer_consistent(timer, clock):
    def fail():
        with timer.step():
            clock.sleep(1)
            with timer.phase("draft"), timer.phase("forward"):
                clock.sleep(2)
                raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert timer.step_seconds == {"draft": 0, "forward": 2, "remainder": 1}
    clock.sleep(100)
    run_step(timer, clock)
    assert sum(timer.step_seconds.values()) == 10
    totals = timer.take_totals()
    assert (totals.num_steps, totals.total_seconds) == (2, 13)


@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_an_interrupt_where_a_phase_ends_leaves_none_open(timer, clock, monkeypatch, num_left):
    """In the innermost phase, the one around it, or the step itself."""
    real, calls = timer._charge, itertools.count()

    def charge():
        if next(calls) == num_left:
            raise KeyboardInterrupt
        real()

    def interrupted():
        with timer.step(), timer.phase("draft"), timer.phase("forward"):
            clock.sleep(1)
            monkeypatch.setattr(timer, "_charge", charge)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    monkeypatch.undo()
    clock.sleep(100)
    run_step(timer, clock)
    assert sum(timer.step_seconds.values()) == 10


def test_an_interrupt_where_a_step_begins_splits_nothing_again(timer, clock, monkeypatch):
    def charge():
        monkeypatch.undo()
        raise KeyboardInterrupt

    with timer.step(), timer.phase("forward"):
        clock.sleep(10)
        timer.add("bonus", Work(rows=1))
    monkeypatch.setattr(timer, "_charge", charge)
    with pytest.raises(KeyboardInterrupt), timer.step():
        pass
    lines = timer.take_totals().line_nanoseconds
    assert lines == {"bonus": 10 * SECOND, "wasted": 0, "remainder": 0}


def test_an_error_caught_inside_a_step_goes_on_in_the_outer_phase(timer, clock):
    def fail():
        with timer.phase("draft"):
            clock.sleep(1)
            raise MemoryError

    with timer.step():
        with pytest.raises(MemoryError), timer.phase("choose"):
            fail()
        clock.sleep(2)
    assert timer.step_seconds == {"draft": 1, "choose": 0, "remainder": 2}


def test_time_between_steps_counts_only_in_a_phase(timer, clock):
    run_step(timer, clock)
    clock.sleep(50)
    with timer.phase("wait"):
        clock.sleep(7)
    assert "wait" not in timer.step_seconds
    run_step(timer, clock)
    assert sum(timer.step_seconds.values()) == 10
    totals = timer.take_totals()
    assert totals.seconds["wait"] == 7
    assert (totals.num_steps, totals.total_seconds) == (2, 27)


def test_a_step_does_not_begin_inside_another(timer):
    with pytest.raises(AssertionError, match="remainder"), timer.step(), timer.step():
        pass


def test_an_unknown_phase_is_refused(timer):
    with pytest.raises(KeyError):
        timer.phase("lunch")


def test_the_device_is_waited_for_at_every_switch(clock):
    timer = PhaseTimer(clock=clock, synchronize=lambda: clock.sleep(3))
    with timer.step(), timer.phase("forward"):
        clock.sleep(1)
    # What a device still worked on when the phase was left belongs to that phase.
    assert timer.step_seconds == {"forward": 4, "remainder": 6}


def test_totals_count_merge_and_begin_anew(timer, clock):
    for _ in range(3):
        run_step(timer, clock)
    first = timer.take_totals()
    run_step(timer, clock)
    second = timer.take_totals()
    assert (first.num_steps, second.num_steps) == (3, 1)
    first.merge(second)
    assert first.num_steps == 4
    assert first.seconds == {"schedule": 4, "draft": 8, "forward": 12, "remainder": 16}
    assert second.total_seconds == 10


def test_without_measurement_phases_are_timed_all_the_same(clock):
    timer = PhaseTimer(measures=False, clock=clock)
    run_step(timer, clock)
    assert timer.step_seconds == {"schedule": 1, "draft": 2, "forward": 3, "remainder": 4}
    assert PhaseTimer().measures
    assert not timer.measures
    assert not NO_RECORDER.measures


def test_entering_a_phase_allocates_no_scope(timer):
    assert timer.phase("draft") is timer.phase("draft")


def split_step(timer, clock, nanoseconds, **rows):
    """A step whose forward takes a number of nanoseconds, with rows for the lines."""
    with timer.step():
        with timer.phase("schedule"):
            clock.now += 5
        with timer.phase("forward"):
            clock.now += nanoseconds
        for line, num in rows.items():
            timer.add(line, Work(rows=num))


def test_every_phase_is_a_line_or_split_into_lines():
    inside = [line for lines in SPLITS.values() for line in lines]
    assert sorted([*inside, *(phase for phase in PHASES if phase not in SPLITS)]) == sorted(LINES)


def test_a_forward_is_split_by_rows_and_nothing_is_lost(timer, clock):
    split_step(timer, clock, 1000, prefill=3, accepted=2, bonus=1, wasted=4)
    split_step(timer, clock, 100, bonus=3)
    totals = timer.take_totals()
    lines = totals.line_nanoseconds
    assert lines["prefill"] == 300
    assert lines["accepted"] == 200
    assert lines["bonus"] == 100 + 100
    assert lines["wasted"] == 400
    assert lines["schedule"] == 10
    assert list(lines) == [line for line in LINES if line in lines]
    assert sum(lines.values()) == totals.nanoseconds.total() == 1110


def test_siblings_have_a_line_where_there_are_any(timer, clock):
    split_step(timer, clock, 1000, accepted=2, bonus=1, siblings=3, wasted=4)
    split_step(timer, clock, 100, bonus=1)
    lines = timer.take_totals().line_nanoseconds
    assert (lines["accepted"], lines["siblings"], lines["wasted"]) == (200, 300, 400)
    assert sum(lines.values()) == 1110
    split_step(timer, clock, 100, bonus=1, wasted=1)
    assert "siblings" not in timer.take_totals().line_nanoseconds


def test_each_step_is_split_by_its_own_rows(timer, clock):
    split_step(timer, clock, 900, prefill=9)
    split_step(timer, clock, 100, bonus=1)
    lines = timer.take_totals().line_nanoseconds
    assert (lines["prefill"], lines["bonus"]) == (900, 100)


@pytest.mark.parametrize("total", [0, 1, 7, 1000, 10**15 + 1])
@pytest.mark.parametrize("rows", [(1, 1, 1), (0, 3, 0), (5, 0, 7), (1, 2, 3, 4)])
def test_whole_parts_sum_to_the_whole(total, rows):
    shares = split_evenly(total, rows)
    assert sum(shares) == total
    for share, num in zip(shares, rows, strict=True):
        assert abs(share - total * num / sum(rows)) <= 1
        assert num or not share


def test_a_forward_of_which_nothing_came_is_wasted(timer, clock):
    split_step(timer, clock, 400)
    with timer.step(), timer.phase("project"):
        clock.now += 6
    lines = timer.take_totals().line_nanoseconds
    assert (lines["wasted"], lines["inject"]) == (400, 6)


def test_a_step_may_be_inside_a_phase_that_goes_on_between_steps(timer, clock):
    with timer.phase("stream"):
        clock.sleep(1)
        run_step(timer, clock)
        assert sum(timer.step_seconds.values()) == 10
        clock.sleep(2)
        first = timer.take_totals()
        clock.sleep(4)
    assert first.seconds["stream"] == 3
    assert first.total_seconds == 13
    assert timer.take_totals().seconds == {"stream": 4}


def test_totals_are_not_taken_inside_a_step(timer):
    with timer.step(), pytest.raises(AssertionError, match="inside a step"):
        timer.take_totals()


def test_waiting_for_the_device_is_told_apart(clock):
    timer = PhaseTimer(clock=clock, synchronize=lambda: clock.sleep(3))
    with timer.step(), timer.phase("forward"):
        clock.sleep(1)
    totals = timer.take_totals()
    assert totals.waited == {"forward": 3 * SECOND, "remainder": 6 * SECOND}
    assert totals.nanoseconds["forward"] == 4 * SECOND


def test_work_and_the_most_that_was_held_merge(timer):
    timer.add("draft", Work(rows=2, forwards=1))
    timer.add("draft", Work(rows=3, pairs=7))
    timer.hold(context=10, waiting=3)
    timer.hold(context=4, waiting=5)
    totals = timer.take_totals()
    assert totals.work == {"draft": Work(rows=5, pairs=7, forwards=1)}
    assert (totals.most_context, totals.most_waiting) == (10, 5)
    other = PhaseTotals(most_context=1, most_waiting=9)
    other.merge(totals)
    other.merge(totals)
    assert other.work["draft"].rows == 10
    assert (other.most_context, other.most_waiting) == (10, 9)


def assert_adds_up(timer, clock):
    """What passes on the clock is what the lines sum to."""
    begin = clock.now
    with timer.phase("stream"):
        clock.sleep(1)
        run_step(timer, clock)
        split_step(timer, clock, 101, accepted=1, bonus=1, wasted=1)
    assert sum(timer.take_totals().line_nanoseconds.values()) == clock.now - begin


class CountsTwice(PhaseTimer):
    """Charges the phase around as well as the one that is left."""

    def leave(self):
        passed = self._clock() - self._switched_at
        super().leave()
        if self._open:
            self._totals.nanoseconds[self._open[-1]] += passed


class ForgetsRemainders(PhaseTimer):
    """Splits into whole parts one by one, as if rounding did not matter."""

    def _split(self):
        for line in SPLITS["forward"]:
            num, total = self._step_rows[line], self._step_rows.total()
            part = self._step_ns["forward"] * num // max(1, total)
            self._totals.split_nanoseconds[line] += part
            self._totals.nanoseconds["forward"] -= self._step_ns["forward"] % 3 and num


def test_the_lines_sum_to_the_wall_time(timer, clock):
    assert_adds_up(timer, clock)


@pytest.mark.parametrize("fault", [CountsTwice, ForgetsRemainders])
def test_a_timer_that_counts_wrongly_is_caught(fault, clock):
    with pytest.raises(AssertionError):
        assert_adds_up(fault(clock=clock), clock)
