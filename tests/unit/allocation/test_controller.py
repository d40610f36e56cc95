import random

import pytest

from blockdraft.allocation.controller import AdaptiveDepth, Candidate, Controller, FixedDepth
from blockdraft.allocation.costs import StepCosts
from tests.controller_sim import Machine, Result, simulate

CPU = Machine()
STEEP = Machine(row=0.001)
SHIPPED = (0.55, 0.6, 0.6, 0.6, 0.6)
CODE, CHAT = (0.9,) * 15, (0.1,) * 15


def always(*rates: float):
    return lambda key, now: rates


def adaptive(machine: Machine, max_depth: int = 5, error: float = 0.0) -> AdaptiveDepth:
    return AdaptiveDepth(machine.costs(error), max_depth)


def fixed_over_plain(machine: Machine, rates, num: int, limit: int) -> float:
    result = simulate(FixedDepth(), machine, rates, num, limit=limit, seconds=30)
    return result.over_plain


def lost_to_plain(result: Result) -> float:
    return result.seconds - 1.03 * result.plain_seconds


@pytest.mark.parametrize("num", [1, 4, 16, 32])
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_a_drafter_that_is_no_good_costs_next_to_nothing(rate, num):
    controller = adaptive(CPU)
    result = simulate(controller, CPU, always(*[rate] * 5), num)
    assert result.seconds - result.plain_seconds < 1.0
    assert controller.summary().mean_depth < 0.1


def test_where_the_best_drafts_would_not_pay_nothing_is_probed():
    machine = Machine(base=0.004, draft_base=0.0005)
    controller = adaptive(machine)
    result = simulate(controller, machine, always(*CODE), 64, seconds=10)
    assert not any(depth for plan in result.plans for depth in plan)
    assert controller.summary().num_probes == 0
    # The same controller finds out when the crowd has gone.
    assert simulate(controller, machine, always(*CODE), 1, seconds=10).over_plain < 0.8


@pytest.mark.parametrize("num", [1, 4, 32])
def test_the_shipped_drafter_is_never_slower_than_plain(num):
    result = simulate(adaptive(CPU), CPU, always(*SHIPPED), num)
    assert lost_to_plain(result) < 0.0


@pytest.mark.parametrize(("num", "machine", "limit"), [(1, CPU, 15), (4, CPU, 15), (32, STEEP, 15)])
def test_a_good_drafter_is_used_where_it_pays(num, machine, limit):
    rates = always(*[0.85] * 15)
    best = min(1.0, *(fixed_over_plain(machine, rates, num, k) for k in (limit, 5, 2)))
    result = simulate(adaptive(machine, limit), machine, rates, num, limit=limit, seconds=40)
    assert result.over_plain < 1.03 * best


def test_a_drafter_that_becomes_good_is_found_again():
    rates = lambda key, now: (0.8,) * 5 if now > 20 else (0.0,) * 5  # noqa: E731
    controller = adaptive(CPU)
    result = simulate(controller, CPU, rates, 1)
    # Plain until then, and at the ratio of a drafter that was always good afterwards.
    ideal = 20 + 40 / fixed_over_plain(CPU, always(*[0.8] * 5), 1, 5)
    assert result.plain_seconds > 0.93 * ideal
    assert controller.summary().num_switches == 3


def test_a_text_that_turns_good_early_is_noticed_in_a_few_dozen_steps():
    rates = lambda key, now: (0.8,) * 5 if now > 0.6 else (0.0,) * 5  # noqa: E731
    result = simulate(adaptive(CPU), CPU, rates, 1, seconds=6, noise=0.0, outliers=0.0)
    start = round(0.6 / CPU.base)
    drafting = [i for i, depths in enumerate(result.plans) if depths[0] >= 4 and i > start]
    assert drafting[0] - start < 80


def test_code_drafts_and_chat_beside_it_does_not():
    rates = lambda key, now: CODE if key == 0 else CHAT  # noqa: E731
    result = simulate(adaptive(CPU), CPU, rates, 3, seconds=30)
    settled = result.plans[len(result.plans) // 2 :]
    code, *chat = (sum(depths) / len(settled) for depths in zip(*settled, strict=True))
    assert code > 3
    assert max(chat) < 0.7
    assert result.over_plain < 0.95


def test_limits_are_honored():
    limits = [0, 1, 3, 5]
    result = simulate(
        adaptive(CPU), CPU, always(*[0.95] * 5), 4, limits=limits, noise=0.02, seconds=10
    )
    used = [set(depths) for depths in zip(*result.plans, strict=True)]
    assert [max(depths) for depths in used] == limits
    nobody = simulate(adaptive(CPU), CPU, always(*CODE), 3, limits=[0, 0, 0], seconds=2)
    assert {tuple(depths) for depths in nobody.plans} == {(0, 0, 0)}


def test_nothing_flaps_at_break_even():
    # One draft that is kept half of the time is worth exactly what it costs.
    machine = Machine(row=0.002, draft_base=0.0055, slot=0.0, project_base=0.0005, project_row=0.0)
    num_switches = 0
    for seed in range(3):
        controller = adaptive(machine, 1)
        result = simulate(controller, machine, always(0.5), 1, limit=1, seed=seed)
        assert len(result.plans) > 2500
        assert result.over_plain < 1.02
        num_switches += controller.summary().num_switches
    assert num_switches <= 36  # in three minutes; 59 if the margin stays what it is


@pytest.mark.parametrize("rates", [SHIPPED, (0.0,) * 5], ids=["good", "wrong"])
def test_outliers_in_the_timing_do_not_switch(rates):
    controller = adaptive(CPU)
    simulate(controller, CPU, always(*rates), 4, seconds=30, outliers=0.03)
    calm = adaptive(CPU)
    simulate(calm, CPU, always(*rates), 4, seconds=30, outliers=0.0)
    assert controller.summary().num_switches == calm.summary().num_switches
    assert controller.summary().mean_depth == pytest.approx(calm.summary().mean_depth, abs=0.5)


@pytest.mark.parametrize("slower", [3.0, 0.5])
def test_another_load_of_the_machine_changes_little(slower):
    machine = Machine(slowdown=lambda now: slower if now > 10 else 1.0)
    controller = adaptive(machine)
    result = simulate(controller, machine, always(*SHIPPED), 1, seconds=40)
    assert controller.summary().num_switches <= 3  # off and on again, if at all
    assert result.over_plain < 0.75


@pytest.mark.parametrize("error", [-0.25, 0.25])
def test_a_wrong_calibration_is_overcome(error):
    result = simulate(adaptive(CPU, error=error), CPU, always(*SHIPPED), 1)
    assert result.over_plain < 0.72
    wrong = simulate(adaptive(CPU, error=error), CPU, always(*[0.0] * 5), 1)
    assert lost_to_plain(wrong) < 1.0


def test_a_plain_step_that_is_cheaper_than_believed_is_found_out():
    # Believed: plain 20 ms, so that 1.6 tokens in 27 ms are a gain. In truth 16, and they are not.
    costs = StepCosts([(1, 0.02)], [(1, 0.02), (2, 0.0202), (64, 0.045)], [(2, 0.0068)])
    machine = Machine(row=0.0042, draft_base=0.0068, slot=0.0, project_base=0.0, project_row=0.0)
    result = simulate(AdaptiveDepth(costs, 1), machine, always(0.6), 1, limit=1)
    assert result.over_plain < 1.025


@pytest.mark.parametrize("rate", [0.25, 0.3])
def test_probes_pay_for_what_they_leave_behind(rate):
    # A step behind drafts is slower; taken for the usual one, it makes drafting look better.
    machine = Machine(base=0.0075, row=0.0004, draft_base=0.002, slot=0.0001, aftermath=1.15)
    lost = [
        simulate(adaptive(machine), machine, always(*[rate] * 5), 1, seconds=30, seed=seed)
        for seed in range(3)
    ]
    assert sum(result.over_plain for result in lost) / 3 < 1.015  # 1.02 to 1.024 otherwise


def test_probes_take_turns():
    result = simulate(adaptive(CPU), CPU, always(*[0.0] * 5), 24, seconds=40)
    counts = [sum(depth > 0 for depth in depths) for depths in zip(*result.plans, strict=True)]
    assert max(counts) - min(counts) <= 1


def play(controller: Controller, keys: range, kept: int, num_steps: int) -> list[int]:
    """Steps in which all that is drafted is kept, up to `kept`; the last depths."""
    depths: list[int] = []
    for _ in range(num_steps):
        depths = controller.limits([Candidate(key, 5) for key in keys], 0)
        num_drafting = sum(depth > 0 for depth in depths)
        for key, depth in zip(keys, depths, strict=True):
            controller.record(key, depth, min(kept, depth))
        controller.record_times(
            limits=0.0,
            draft=CPU.draft(num_drafting, 1 + max(depths)),
            forward=CPU.forward(len(depths) + sum(depths)),
            project=0.0,
        )
    return depths


def test_what_a_sequence_did_long_ago_is_forgotten():
    controller = adaptive(CPU)
    play(controller, range(2), 0, 50)
    play(controller, range(1, 2), 5, 200)
    assert play(controller, range(2), 5, 1)[0] <= 3
    play(controller, range(1, 2), 5, 400)
    assert play(controller, range(2), 5, 1) == [5, 5]


def test_drafts_that_do_not_come_are_not_paid_for_long():
    # The drafter gives one good token instead of five: the rates are fine, the steps are not.
    controller = AdaptiveDepth(StepCosts([(1, 0.016)], [(1, 0.016), (64, 0.04)], [(6, 0.016)]), 5)
    for _ in range(200):
        depth = controller.limits([Candidate(0, 5)], 0)[0]
        controller.record(0, min(depth, 1), min(depth, 1))
        controller.record_times(
            limits=0.0, draft=0.016, forward=0.016 + 0.0004 * depth, project=0.0
        )
    assert controller.summary().num_switches > 1


def test_a_backlog_of_features_is_not_taken_for_the_cost_of_a_step():
    costs = CPU.costs()
    controller = AdaptiveDepth(costs, 5)
    for project in (0.5, 0.002, 0.002):
        depth = controller.limits([Candidate(0, 5)], 0)[0]
        assert depth > 0
        controller.record(0, depth, depth)
        controller.record_times(limits=0.0, draft=0.006, forward=0.018, project=project)
    assert float(costs.project(1)) == pytest.approx(0.002, rel=0.2)


def test_short_requests_do_not_switch_drafting_off():
    controller, luck = adaptive(CPU), random.Random(0)
    for key in range(40):
        left = 24
        while left > 0:
            depth = controller.limits([Candidate(key, min(5, left - 1))], 0)[0]
            kept = 0
            while kept < depth and luck.random() < 0.8:
                kept += 1
            controller.record(key, depth, kept)
            seconds = CPU.draft(bool(depth), 1 + depth)
            controller.record_times(
                limits=0.0, draft=seconds, forward=CPU.forward(1 + depth), project=0.0
            )
            left -= 1 + kept
        controller.close(key)
    assert controller.summary().num_switches == 1
    assert controller.summary().mean_depth > 3.0


def test_the_same_history_gives_the_same_plans():
    first, second = (
        simulate(adaptive(CPU), CPU, always(*SHIPPED), 5, seconds=8, seed=3).plans for _ in range(2)
    )
    assert first == second


def test_a_step_that_failed_may_be_planned_again():
    controller = adaptive(CPU)
    candidates = [Candidate(0, 5), Candidate(1, 5)]
    assert controller.limits(candidates, 0) == controller.limits(candidates, 0)
    controller.close(0)
    controller.close(99)
    assert controller.limits([], 64) == []
    controller.record_times(limits=0.0, draft=0.0, forward=0.03, project=0.0)


def test_steps_with_prompt_rows_teach_no_times():
    costs = CPU.costs()
    controller = AdaptiveDepth(costs, 5)
    before = float(costs.forward(101))
    for _ in range(50):
        depths = controller.limits([Candidate(0, 5)], 100)
        controller.record(0, depths[0], depths[0])
        controller.record_times(limits=0.0, draft=1.0, forward=1.0, project=1.0)
    assert float(costs.forward(101)) == before


@pytest.mark.parametrize("make", [FixedDepth, lambda: adaptive(CPU)], ids=["fixed", "adaptive"])
def test_the_summary_says_which_depths_were_used(make):
    controller: Controller = make()
    empty = controller.summary()
    assert (empty.num_passes, empty.mean_depth, empty.shares) == (0, 0.0, {})
    result = simulate(controller, CPU, always(*SHIPPED), 3, seconds=2)
    used = [depth for depths in result.plans for depth in depths]
    summary = controller.summary()
    assert summary.num_passes == len(used)
    assert summary.mean_depth == pytest.approx(sum(used) / len(used))
    assert summary.shares == {k: used.count(k) / len(used) for k in sorted(set(used))}


def test_a_fixed_depth_is_the_limit():
    assert FixedDepth().limits([Candidate(1, 5), Candidate(2, 0), Candidate(3, 2)], 40) == [5, 0, 2]
