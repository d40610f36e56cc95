import itertools
import random

import numpy as np
import pytest

from blockdraft.allocation.cost_measurement import measure_points
from blockdraft.allocation.costs import CostCurve, KeyCosts, StepCosts
from blockdraft.allocation.prices import StepPrices

FORWARD = [(1, 0.016), (4, 0.0175), (16, 0.022), (64, 0.046)]


def make_costs(**changes: list[tuple[int, float]]) -> StepCosts:
    points = {
        "plain_points": FORWARD,
        "forward_points": FORWARD,
        "draft_points": [(6, 0.006), (96, 0.024)],
    }
    return StepCosts(**(points | changes))


def forwarded(costs: StepCosts, num_rows: int, seconds: float) -> None:
    """One sequence with candidates, behind a short context."""
    costs.record_forward(1, num_rows, costs.forward(num_rows), seconds)


def price(costs: StepCosts, num_sequences: int, num_keys: int, *candidates: int) -> list[float]:
    """Seconds of steps with so many candidates."""
    prices = StepPrices(costs, num_sequences, num_keys, 0)
    return [prices.best([0.0] * num, [0.0] * num, 0.0, least=num).seconds for num in candidates]


def test_a_curve_goes_through_its_points_and_on_with_the_last_slope():
    curve = CostCurve(FORWARD)
    found = [curve.at(size) for size in (1, 4, 16, 64)]
    assert found == pytest.approx([0.016, 0.0175, 0.022, 0.046])
    assert [curve.at(128), curve.at(256)] == pytest.approx([0.078, 0.142])
    assert curve.at(2) == pytest.approx(0.0165)
    assert CostCurve([(8, 0.01)]).at(1000) == pytest.approx(0.01)


@pytest.mark.parametrize("points", [FORWARD, [(8, 0.01)]])
def test_sizes_cost_together_what_each_costs_alone(points):
    curve = CostCurve(points)
    curve.record(5, 0.018)
    for sizes in (range(1, 200), range(5, 6), range(7, 7), range(24_000, 30_000)):
        assert curve.over(sizes) == pytest.approx([curve.at(size) for size in sizes], rel=1e-12)


def test_noise_in_a_calibration_never_makes_more_rows_cheaper():
    curve = CostCurve([(1, 0.016), (2, 0.019), (4, 0.015), (8, 0.018)])
    seconds = [curve.at(size) for size in range(1, 100)]
    assert (np.diff(seconds) >= 0).all()
    assert 0.0155 < seconds[0] < 0.0175
    for _ in range(200):
        curve.record(4, 0.012)
        curve.record(1, 0.016)
    assert (np.diff([curve.at(size) for size in range(1, 100)]) >= 0).all()


def test_a_busier_machine_moves_the_costs_that_nobody_measures():
    costs = make_costs()
    for _ in range(300):
        forwarded(costs, 2, 0.0165)
    before = costs.forward(8), costs.draft(12)
    for _ in range(150):
        forwarded(costs, 2, 0.033)
    assert costs.forward(2) == pytest.approx(0.033, rel=0.02)
    after = costs.forward(8), costs.draft(12)
    assert all(1.6 < new / old < 2.05 for old, new in zip(before, after, strict=True))


def test_a_wrong_calibration_is_corrected_where_the_curve_is_met():
    costs = make_costs()
    for _ in range(150):
        forwarded(costs, 2, 0.0165)
        forwarded(costs, 6, 0.027)
        costs.record_draft(6, costs.draft(6), 0.003)
    assert costs.forward(2) == pytest.approx(0.0165, rel=0.02)
    assert costs.forward(6) == pytest.approx(0.027, rel=0.02)
    assert costs.draft(6) == pytest.approx(0.003, rel=0.03)


def test_forwards_that_were_measured_wrongly_say_little_of_plain_steps():
    costs = make_costs()
    for _ in range(30):
        for num_rows in (5, 7, 9, 11, 14, 20):
            forwarded(costs, num_rows, 1.4 * CostCurve(FORWARD).at(num_rows))
    assert costs.forward(9) == pytest.approx(1.4 * CostCurve(FORWARD).at(9), rel=0.03)
    assert costs.plain(1) == pytest.approx(0.016, rel=0.12)


def test_a_slower_machine_is_noticed_by_forwards_of_many_sizes():
    costs, luck = make_costs(), random.Random(0)
    true = CostCurve(FORWARD)
    for slower, num in ((1, 600), (2, 50)):
        for _ in range(num):
            num_rows = luck.randrange(2, 10)
            forwarded(costs, num_rows, slower * true.at(num_rows))
    assert costs.plain(1) > 1.45 * 0.016


def test_a_size_that_was_not_met_for_long_is_learned_anew_quickly():
    curve = CostCurve(FORWARD)
    for size in [1, 6] * 1000 + [6] * 1000:
        curve.record(size, 0.016 if size == 1 else 0.02)
    for _ in range(8):
        curve.record(1, 0.013)
        for _ in range(30):
            curve.record(6, 0.02)
    assert curve.at(1) == pytest.approx(0.013, rel=0.06)


@pytest.mark.parametrize("truth", [(0.02, 0.02), (0.02, 0.017)], ids=["flat", "falling"])
def test_costs_of_small_sizes_that_do_not_rise_leave_others_and_the_next_machine_alone(truth):
    """As where a forward reads weights from memory; noise makes a smaller size seem dearer."""
    luck, sizes = random.Random(0), (1, 2, 3, 4, 5, 6, 8)
    curve = CostCurve([(1, 0.02), (4, 0.0205), (8, 0.021), (16, 0.03)])
    untouched = curve.at(48)
    for _ in range(30_000):
        size = luck.choice(sizes)
        curve.record(size, truth[size > 2] * luck.lognormvariate(0, 0.08))
    assert curve.at(48) == pytest.approx(untouched, rel=0.4)
    for _ in range(300):
        size = luck.choice(sizes)
        curve.record(size, (0.02 if size < 3 else 0.04) * luck.lognormvariate(0, 0.08))
    assert curve.at(2) == pytest.approx(0.02, rel=0.15)
    assert curve.at(5) == pytest.approx(0.04, rel=0.15)


def test_no_cost_moves_up_to_the_size_beyond_which_was_measured():
    curve = CostCurve([(1, 0.02), (16, 0.0201)])
    for size in (4, 6, 3) * 50:
        curve.record_shape(size, 0.017, above=2)
    assert [curve.at(size) for size in (1, 2)] == pytest.approx([0.02, 0.02], rel=0.002)
    assert curve.at(6) == pytest.approx(curve.at(2))


def test_noisy_measurements_settle_at_their_middle():
    luck, curve = random.Random(0), CostCurve(FORWARD)
    for _ in range(2000):
        curve.record(5, 0.02 * luck.lognormvariate(0, 0.08))
    assert curve.at(5) == pytest.approx(0.02, rel=0.03)


def test_plain_steps_that_were_measured_wrongly_are_known_after_a_few():
    costs = StepCosts(FORWARD, FORWARD, [(6, 0.006)], [], KeyCosts(1e-6))
    for _ in range(4):
        costs.record_plain(1, 1000, 0.8 * 0.017)
    assert costs.plain(1, 1000) == pytest.approx(0.8 * 0.017, rel=0.05)
    assert costs.forward(1) > 0.95 * 0.016  # which nobody has measured since


def test_plain_steps_between_others_that_have_changed_are_noticed_at_the_second_one():
    costs = make_costs()

    def changed(seconds: float) -> bool:
        forwarded(costs, 6, costs.forward(6))
        return costs.record_plain(1, 0, seconds)

    assert not any(changed(0.016) for _ in range(100))
    # Outliers, alone or to both sides.
    assert not any(map(changed, (0.5, 0.001, 0.016, 0.5, 0.016)))
    before = costs.forward(6)
    assert [changed(0.012) for _ in range(3)] == [False, True, True]
    for _ in range(7):
        changed(0.012)
    assert costs.plain(1) == pytest.approx(0.012, rel=0.1)
    assert costs.forward(6) > 0.85 * before
    # Where nothing comes between, it may be the machine.
    assert not any(costs.record_plain(1, 0, 0.03) for _ in range(5))


def test_one_outlier_moves_a_cost_by_a_few_percent_at_most():
    costs = make_costs()
    before = costs.forward(6), costs.draft(6)
    forwarded(costs, 6, 5.0)
    costs.record_draft(6, costs.draft(6), 5.0)
    after = costs.forward(6), costs.draft(6)
    assert all(1 < new / old < 1.1 for old, new in zip(before, after, strict=True))


def test_outliers_in_a_row_are_believed_ever_more():
    """Else drafts that take a hundred times as long would be paid for forty times."""
    curve = CostCurve(FORWARD)
    found = []
    for _ in range(10):
        curve.record(6, 1.8)
        found.append(curve.at(6))
    assert found[0] < 1.1 * 0.01825
    assert found[-1] > 6 * 0.01825
    alternating = CostCurve(FORWARD)
    for seconds in (1.8, 0.001) * 5:
        alternating.record(6, seconds)
    assert alternating.at(6) == pytest.approx(0.01825, rel=0.15)
    calm = CostCurve(FORWARD)
    for seconds in (1.8, 0.01825) * 5:  # what is between them ends the row
        calm.record(6, seconds)
    assert calm.at(6) < 1.4 * 0.01825


@pytest.mark.parametrize("part", ["draft", "project", "forward"])
def test_what_drafts_cost_in_a_bad_moment_is_forgotten_while_none_are_made(part):
    costs = make_costs(project_points=[(256, 0.0256)])
    cost, size = getattr(costs, part), {"draft": 6, "project": 256, "forward": 6}[part]
    before = cost(size)
    for _ in range(8):  # from these is learned what the measurement left out
        costs.record_plain(1, 0, 0.016)
    for _ in range(40):
        if part == "project":
            costs.record_project(256, 5.0)
        else:
            args = (6,) if part == "draft" else (1, 6)
            getattr(costs, f"record_{part}")(*args, cost(6), 5.0)
    learned = cost(size)
    assert learned > 2.0
    for num_steps, least, most in ((256, 0.02, 1.0), (20_000, 0.0, 1.5 * before / learned)):
        for _ in range(num_steps):
            costs.record_plain(1, 0, 0.016)
        assert least < cost(size) / learned < most


def test_a_plain_step_and_a_forward_with_drafts_have_costs_of_their_own():
    costs = make_costs()
    for _ in range(300):
        costs.record_plain(8, 0, 0.022)
        forwarded(costs, 8, 0.018)
    assert costs.plain(8) == pytest.approx(0.022, rel=0.03)
    assert costs.forward(8) == pytest.approx(0.018, rel=0.03)
    for _ in range(150):
        costs.record_plain(8, 0, 0.044)
    # A machine that slows the one down slows the other down.
    assert 0.028 < costs.forward(8) < 0.038


def test_candidates_cost_what_they_add_to_a_plain_step_of_as_many_sequences():
    """Sequences take longer than rows of one; what more rows take is all that candidates add."""
    costs = make_costs(plain_points=[(1, 0.017), (8, 0.022), (16, 0.030)])
    assert price(costs, 16, 0, 0, 16) == pytest.approx([0.030, 0.030 + 0.008])
    assert price(costs, 1, 0, 3, 15) == pytest.approx([0.017 + 0.0015, 0.017 + 0.006])
    for num, few, many in ((16, 17, 20), (23, 25, 31), (7, 9, 40), (1, 2, 9)):
        costs = make_costs()
        for num_rows in (few, many):
            before = price(costs, num, 0, few - num, many - num)
            expected = before[num_rows == many]
            costs.record_forward(num, num_rows, expected, 1.2 * expected)
            plain = costs.plain(num)
            after = price(costs, num, 0, few - num, many - num)
            # What a step took beyond its prediction is what its candidates took.
            assert after[num_rows == many] / plain > expected / make_costs().plain(num)
    for _ in range(400):
        for num_rows, took in ((17, 0.033), (20, 0.036), (32, 0.048)):
            (expected,) = price(costs, 16, 0, num_rows - 16)
            costs.record_forward(16, num_rows, expected, took)
            costs.record_plain(16, 0, 0.030)
    assert price(costs, 16, 0, 0, 1, 4, 16) == pytest.approx([0.030, 0.033, 0.036, 0.048], rel=0.05)


def test_more_sequences_than_were_measured_take_longer_as_rows_do():
    costs = make_costs(plain_points=[(1, 0.017), (4, 0.018)])
    assert costs.plain(16) == pytest.approx(0.018 + 0.022 - 0.0175)
    assert costs.plain(64) == pytest.approx(0.018 + 0.046 - 0.0175)


@pytest.mark.parametrize("stalled", [0.05, 0.5, 3.0])
def test_a_stall_while_forwards_were_measured_never_makes_plain_steps_free(stalled):
    forward = [(1, 0.01), (4, 0.011), (8, stalled), (12, 0.012), (48, 0.017)]
    costs = StepCosts([(1, 0.01), (8, 0.024)], forward, [(6, 0.006)])
    found = [costs.plain(num) for num in (1, 8, 12, 48, 1000)]
    assert found == sorted(found)
    assert found[:2] == pytest.approx([0.01, 0.024])


def test_measuring_takes_turns_and_the_median():
    ticks, runs = itertools.count(), []
    points = measure_points(runs.append, [1, 8], clock=lambda: float(next(ticks)))
    assert runs == [1, 8] * 5
    assert points == [(1, 1.0), (8, 1.0)]
    times = iter([0, 9, 10, 11, 20, 22, 30, 33, 40, 41])
    assert measure_points(len, [], clock=lambda: 0.0) == []
    assert measure_points(runs.append, [3], clock=lambda: float(next(times))) == [(3, 2.0)]


def test_keys_and_branches_cost_what_they_were_measured_to():
    costs = StepCosts(FORWARD, FORWARD, [(6, 0.006)], [], KeyCosts(1e-6, 1e-4, 2e-6))
    assert costs.plain(1, 1000) == pytest.approx(0.017)
    assert costs.branch(1000) == pytest.approx(0.0021)
    for _ in range(8):  # from these is learned what the measurement left out
        costs.record_plain(1, 1000, 0.017)
    for _ in range(150):
        costs.record_plain(1, 1000, 0.034)
    assert costs.branch(1000) > 0.0026


def test_longer_contexts_are_no_slower_machine():
    costs = StepCosts(FORWARD, FORWARD, [(6, 0.006)], [], KeyCosts(1e-5))
    before = costs.draft(6)
    for num_keys in range(0, 3000, 10):
        costs.record_plain(1, num_keys, 0.016 + 1e-5 * num_keys)
        (expected,) = price(costs, 1, num_keys, 3)
        costs.record_forward(1, 4, expected, 0.0175 + 1e-5 * num_keys)
    assert costs.draft(6) == pytest.approx(before, rel=0.01)


def test_projecting_is_free_until_it_was_measured():
    costs = make_costs()
    assert costs.project(8) == 0.0
    costs.record_project(4, 0.002)
    assert costs.project(4) == pytest.approx(0.002)
    costs.record_project(4, 0.5)
    assert costs.project(4) < 0.0022
    measured = make_costs(project_points=[(256, 0.0256)])
    assert measured.project(256) == pytest.approx(0.0256)
    assert measured.project(0) == 0.0


def test_projecting_that_was_measured_on_a_slow_machine_costs_what_it_did():
    costs = make_costs()
    costs.record_slowdown(4.0, 4.0)
    costs.record_project(4, 0.002)
    assert costs.project(4) == pytest.approx(0.002)


def test_what_is_a_little_more_than_was_measured_is_not_the_machine():
    costs = make_costs()
    before = costs.plain(1)
    assert costs.record_slowdown(1.15, 1.19) == 1.0
    assert costs.plain(1) == before


def test_what_slows_target_and_drafter_alike_is_the_machine():
    costs = make_costs()
    before = costs.plain(1), costs.draft(6), costs.forward(64)
    for _ in range(12):
        forward, draft = costs.forward(6), costs.draft(6)
        slower = costs.record_slowdown(0.054 / forward, 0.018 / draft)
        costs.record_draft(6, draft, 0.018 / slower)
        costs.record_forward(1, 6, forward, 0.054 / slower)
    after = costs.plain(1), costs.draft(6), costs.forward(64)
    assert all(2.6 < new / old < 3.1 for old, new in zip(before, after, strict=True))
    for _ in range(12):
        assert costs.record_slowdown(3.0, 1.0) == 1.0
        assert costs.record_slowdown(0.5, 1.2) == 1.0
        assert costs.record_slowdown(0.5, 0.8) == 0.8
        assert costs.record_slowdown(1.25, 5.0) == 1.25


def test_a_machine_counts_as_at_most_four_times_slower_at_once():
    costs = make_costs()
    before = costs.plain(1)
    assert costs.record_slowdown(1000.0, 2000.0) == 4.0
    assert costs.plain(1) == pytest.approx(4**0.25 * before)
    assert costs.record_slowdown(0.001, 0.002) == 0.25
    assert costs.plain(1) == pytest.approx(before)


def test_keys_follow_what_the_first_plain_steps_correct():
    costs = StepCosts(FORWARD, FORWARD, [(6, 0.006)], [], KeyCosts(1e-5))
    for _ in range(8):
        costs.record_plain(1, 0, 0.8 * 0.016)
    ratio = costs.plain(1, 1000) / costs.plain(1)
    assert ratio == pytest.approx(0.026 / 0.016, rel=0.04)


def test_a_block_goes_one_deeper_than_pays_and_a_draft_by_level_does_not():
    """Not all of a draft is verified, and one depth more is no forward more."""
    flat, survival = [(1, 0.02), (64, 0.02)], [0.9, 0.1, 0.01, 0.001]
    block = StepCosts(flat, flat, [(2, 0.0001), (64, 0.3)])
    level = StepCosts(flat, flat, [(1, 0.005)], drafts_by_level=True)
    depths = [StepPrices(costs, 1, 0, 0).best_depth(survival, 1) for costs in (block, level)]
    assert depths == [2, 1]


def test_a_drafter_that_runs_for_each_depth_is_priced_by_depth() -> None:
    """Twice as deep takes twice as long, and what one depth was measured at serves all."""
    costs = StepCosts(FORWARD, FORWARD, [(1, 0.002), (8, 0.004)], drafts_by_level=True)
    assert costs.draft_forwards(8, 3) == (8, 3)
    for depth in (1, 2, 7):
        assert costs.draft(*costs.draft_forwards(1, depth)) == pytest.approx(0.002 * depth)
        assert costs.draft(*costs.draft_forwards(8, depth)) == pytest.approx(0.004 * depth)
    for depth in (2, 5) * 100:
        slots, num_forwards = costs.draft_forwards(1, depth)
        expected = costs.draft(slots, num_forwards)
        costs.record_draft(slots, expected, 0.001 * depth)
    assert costs.draft(1, 7) == pytest.approx(0.007, rel=0.03)
    block = StepCosts(FORWARD, FORWARD, [(6, 0.006)])
    assert block.draft_forwards(2, 5) == (12, 1)


def test_shallow_drafts_where_each_depth_costs_a_forward() -> None:
    """A block goes as deep as tokens are likely; level by level only as deep as that pays."""
    survival = 0.75 ** np.arange(1.0, 8)
    flat = [(1, 0.02), (64, 0.0201)]
    block = StepCosts(flat, flat, [(2, 0.006), (64, 0.0061)])
    level = StepCosts(flat, flat, [(1, 0.006)], drafts_by_level=True)
    cheap = StepCosts(flat, flat, [(1, 0.0001)], drafts_by_level=True)
    depths = [StepPrices(c, 1, 0, 0).best_depth(survival, 1) for c in (block, level, cheap)]
    assert depths[0] == depths[2] == 7
    assert depths[1] < 5
