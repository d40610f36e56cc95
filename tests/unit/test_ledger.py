import json

import pytest

from blockdraft.engine.ledger import NO_TIMER, PHASES, PhaseTimer, PhaseTotals

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
    assert timer.last_step == {"schedule": 1, "draft": 2, "forward": 3, "remainder": 4}
    assert list(timer.last_step) == [name for name in PHASES if name in timer.last_step]


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
        with timer.phase("absorb"):
            clock.sleep(5)
            with timer.phase("commit"):  # the same phase again, further in
                clock.sleep(10)
        clock.sleep(2)
    assert timer.last_step == {"commit": 13, "absorb": 5, "remainder": 0}


def test_an_error_leaves_the_timer_consistent(timer, clock):
    def fail():
        with timer.step():
            clock.sleep(1)
            with timer.phase("draft"), timer.phase("forward"):
                clock.sleep(2)
                raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert timer.last_step == {"draft": 0, "forward": 2, "remainder": 1}
    clock.sleep(100)
    run_step(timer, clock)
    assert sum(timer.last_step.values()) == 10
    totals = timer.take_totals()
    assert (totals.num_steps, totals.total_seconds) == (2, 13)


def test_an_error_caught_inside_a_step_goes_on_in_the_outer_phase(timer, clock):
    def fail():
        with timer.phase("draft"):
            clock.sleep(1)
            raise MemoryError

    with timer.step():
        with pytest.raises(MemoryError), timer.phase("choose"):
            fail()
        clock.sleep(2)
    assert timer.last_step == {"draft": 1, "choose": 0, "remainder": 2}


def test_time_between_steps_counts_only_in_a_phase(timer, clock):
    run_step(timer, clock)
    clock.sleep(50)
    with timer.phase("wait"):
        clock.sleep(7)
    assert "wait" not in timer.last_step
    run_step(timer, clock)
    assert sum(timer.last_step.values()) == 10
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
    assert timer.last_step == {"forward": 4, "remainder": 6}


def test_totals_count_merge_and_begin_anew(timer, clock):
    for _ in range(3):
        run_step(timer, clock)
    first = timer.take_totals()
    assert first.counts == {"schedule": 3, "draft": 3, "forward": 3, "remainder": 3}
    run_step(timer, clock)
    second = timer.take_totals()
    assert (first.num_steps, second.num_steps) == (3, 1)
    first.merge(second)
    assert first.num_steps == first.counts["draft"] == 4
    assert first.seconds == {"schedule": 4, "draft": 8, "forward": 12, "remainder": 16}
    assert first.shares == {"schedule": 0.1, "draft": 0.2, "forward": 0.3, "remainder": 0.4}
    assert second.total_seconds == 10


def test_totals_are_plain_values(timer, clock):
    run_step(timer, clock)
    totals = timer.take_totals().to_dict()
    assert json.loads(json.dumps(totals)) == totals
    assert totals["counts"] == {"schedule": 1, "draft": 1, "forward": 1, "remainder": 1}
    assert PhaseTotals().to_dict()["shares"] == {}


def test_switched_off_there_is_one_scope_and_no_state():
    scopes = [NO_TIMER.step(), NO_TIMER.phase("draft"), NO_TIMER.phase("forward")]
    assert all(scope is scopes[0] for scope in scopes)
    with NO_TIMER.step(), NO_TIMER.phase("draft"):
        pass
    assert NO_TIMER.take_totals() == PhaseTotals()
    assert not hasattr(NO_TIMER, "__dict__")


def test_entering_a_phase_allocates_no_scope(timer):
    assert timer.phase("draft") is timer.phase("draft")
