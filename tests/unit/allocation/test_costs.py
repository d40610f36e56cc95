import itertools
import random

import numpy as np
import pytest

from blockdraft.allocation.acceptance import Acceptance
from blockdraft.allocation.cost_measurement import measure_points
from blockdraft.allocation.costs import CostCurve, StepCosts
from blockdraft.allocation.depths import DepthSearch

FORWARD = [(1, 0.016), (4, 0.0175), (16, 0.022), (64, 0.046)]


def make_costs(**changes: list[tuple[int, float]]) -> StepCosts:
    points = {
        "plain_points": FORWARD,
        "forward_points": FORWARD,
        "draft_points": [(6, 0.006), (96, 0.024)],
    }
    return StepCosts(**(points | changes))


def test_a_curve_goes_through_its_points_and_on_with_the_last_slope():
    curve = CostCurve(FORWARD)
    assert curve([0, 1, 4, 16, 64]) == pytest.approx([0, 0.016, 0.0175, 0.022, 0.046])
    assert curve([128, 256]) == pytest.approx([0.078, 0.142])
    assert float(curve(2)) == pytest.approx(0.0165)
    assert float(CostCurve([(8, 0.01)])(1000)) == pytest.approx(0.01)


@pytest.mark.parametrize("points", [FORWARD, [(8, 0.01)]])
def test_one_size_costs_the_same_alone(points):
    curve = CostCurve(points)
    curve.record(5, 0.018)
    sizes = [*range(1, 200), 24_576, 30_000]
    assert [curve.at(size) for size in sizes] == pytest.approx(curve(sizes).tolist(), rel=1e-12)


def test_noise_in_a_calibration_never_makes_more_rows_cheaper():
    curve = CostCurve([(1, 0.016), (2, 0.019), (4, 0.015), (8, 0.018)])
    seconds = curve(np.arange(1, 100))
    assert (np.diff(seconds) >= 0).all()
    assert 0.0155 < seconds[0] < 0.0175
    for _ in range(200):
        curve.record(4, 0.012)
        curve.record(1, 0.016)
    assert (np.diff(curve(np.arange(1, 100))) >= 0).all()


def test_a_busier_machine_moves_the_costs_that_nobody_measures():
    costs = make_costs()
    for _ in range(300):
        costs.record_forward(1, 0.016)
    before = float(costs.forward(8)), float(costs.draft(2, 6))
    for _ in range(150):
        costs.record_forward(1, 0.032)
    assert float(costs.forward(1)) == pytest.approx(0.032, rel=0.02)
    after = float(costs.forward(8)), float(costs.draft(2, 6))
    assert all(1.6 < new / old < 2.05 for old, new in zip(before, after, strict=True))


def test_a_wrong_calibration_is_corrected_where_the_curve_is_met():
    costs = make_costs()
    for _ in range(150):
        costs.record_forward(1, 0.016)
        costs.record_forward(6, 0.027)
        costs.record_draft(1, 6, 0.003)
    assert float(costs.forward(1)) == pytest.approx(0.016, rel=0.02)
    assert float(costs.forward(6)) == pytest.approx(0.027, rel=0.02)
    assert float(costs.draft(1, 6)) == pytest.approx(0.003, rel=0.03)


def test_a_size_that_was_not_met_for_long_is_learned_anew_quickly():
    curve = CostCurve(FORWARD)
    for size in [1, 6] * 1000 + [6] * 1000:
        curve.record(size, 0.016 if size == 1 else 0.02)
    for _ in range(8):
        curve.record(1, 0.013)
        for _ in range(30):
            curve.record(6, 0.02)
    assert float(curve(1)) == pytest.approx(0.013, rel=0.06)


def test_noisy_measurements_settle_at_their_middle():
    luck, curve = random.Random(0), CostCurve(FORWARD)
    for _ in range(2000):
        curve.record(5, 0.02 * luck.lognormvariate(0, 0.08))
    assert float(curve(5)) == pytest.approx(0.02, rel=0.03)


def test_one_outlier_moves_a_cost_by_a_few_percent_at_most():
    costs = make_costs()
    before = float(costs.forward(6)), float(costs.draft(1, 6))
    costs.record_forward(6, 5.0)
    costs.record_draft(1, 6, 5.0)
    after = float(costs.forward(6)), float(costs.draft(1, 6))
    assert all(1 < new / old < 1.1 for old, new in zip(before, after, strict=True))


def test_a_plain_step_and_a_forward_with_drafts_have_costs_of_their_own():
    costs = make_costs()
    for _ in range(300):
        costs.record_plain(8, 0.022)
        costs.record_forward(8, 0.018)
    assert costs.plain(8) == pytest.approx(0.022, rel=0.03)
    assert float(costs.forward(8)) == pytest.approx(0.018, rel=0.03)
    for _ in range(150):
        costs.record_plain(8, 0.044)
    # A machine that slows the one down slows the other down.
    assert 0.028 < float(costs.forward(8)) < 0.038


def test_the_aftermath_of_drafts_is_told_from_a_slower_machine():
    costs = make_costs()
    before = costs.plain(4)
    assert costs.aftermath(4) == 0.0
    for _ in range(200):
        costs.record_plain(4, before)
        costs.record_plain_behind_drafts(4, 1.1 * before, is_known=True)
    assert costs.plain(4) == pytest.approx(before, rel=0.01)
    assert costs.aftermath(4) == pytest.approx(0.1 * before, rel=0.1)
    for _ in range(200):
        costs.record_plain_behind_drafts(4, 2.2 * before, is_known=False)
    assert costs.plain(4) == pytest.approx(2 * before, rel=0.02)
    for _ in range(200):
        costs.record_plain(4, before)
        costs.record_plain_behind_drafts(4, 0.9 * before, is_known=True)
    assert costs.aftermath(4) == 0.0


def test_few_sequences_are_planned_by_looking_at_all_plans():
    luck = np.random.default_rng(5)
    for num in (1, 2):
        for _ in range(20):
            survival = luck.uniform(0.2, 0.95, (num, 5)).cumprod(axis=1)
            best = DepthSearch(make_costs(), survival.tolist(), 0).best()
            assert best.rate == pytest.approx(exhaustive_rate(make_costs(), survival, 0))


def test_costs_of_one_number_are_those_of_arrays():
    costs = make_costs()
    costs.record_project(4, 0.002)
    costs.record_forward(8, 0.03)
    for rows, num, slots in ((1, 1, 2), (7, 1, 6), (40, 3, 6), (500, 32, 16)):
        assert costs.forward_at(rows) == pytest.approx(float(costs.forward(rows)))
        both = float(costs.draft(num, slots) + costs.project(num))
        assert costs.drafting_at(num, slots) == pytest.approx(both)


def test_two_sequences_are_planned_within_their_limits_beside_a_prompt():
    survival = np.array([[0.9, 0.8, 0.7, 0.6], [0.95, 0.0, 0.0, 0.0]])
    best = DepthSearch(make_costs(), survival.tolist(), 100).best()
    assert best.rate == pytest.approx(exhaustive_rate(make_costs(), survival, 100))
    assert best.depths[0] > 1
    assert best.depths[1] <= 1


def test_projecting_is_free_until_it_was_measured():
    costs = make_costs()
    assert float(costs.project(8)) == 0.0
    costs.record_project(4, 0.002)
    assert float(costs.project(8)) == pytest.approx(0.004)
    costs.record_project(4, 0.5)
    assert float(costs.project(8)) < 0.0042


def test_measuring_takes_turns_and_the_median():
    ticks, runs = itertools.count(), []
    points = measure_points(runs.append, [1, 8], clock=lambda: float(next(ticks)))
    assert runs == [1, 8, 1, 8, 1, 8]
    assert points == [(1, 1.0), (8, 1.0)]
    times = iter([0, 9, 10, 11, 20, 22])
    assert measure_points(len, [], clock=lambda: 0.0) == []
    assert measure_points(runs.append, [3], clock=lambda: float(next(times))) == [(3, 2.0)]


def exhaustive_rate(costs: StepCosts, survival: np.ndarray, num_other_rows: int) -> float:
    search = DepthSearch(costs, survival.tolist(), num_other_rows)
    depths = itertools.product(range(survival.shape[1] + 1), repeat=len(survival))
    return max(search.price(list(some)).rate for some in depths)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_plan_is_nearly_the_best_of_all(seed):
    luck = np.random.default_rng(seed)
    rates = luck.uniform(0.1, 0.98, (4, 1)) ** luck.uniform(0.5, 1.5, (4, 5))
    row, slot = luck.uniform(0.0001, 0.003), luck.uniform(0.00002, 0.001)
    forward = [(1, 0.016), (64, 0.016 + 63 * row)]
    costs = StepCosts(forward, forward, [(1, 0.004), (200, 0.004 + 199 * slot)])
    survival = rates.cumprod(axis=1)
    num_other_rows = 100 * (seed % 2)
    search = DepthSearch(costs, survival.tolist(), num_other_rows)
    best, plain = search.best(), search.price([0] * 4)
    found = max(best.rate, plain.rate)
    assert found >= 0.985 * exhaustive_rate(costs, survival, num_other_rows)


def test_prompt_rows_do_not_change_what_pays():
    survival = np.array([[0.5, 0.3, 0.1]] * 3)
    forward = [(1, 0.016), (512, 0.272)]
    costs = StepCosts(forward, forward, [(6, 0.006), (96, 0.024)])
    alone, beside = (DepthSearch(costs, survival.tolist(), rows).best() for rows in (0, 400))
    assert alone.depths == beside.depths
    assert alone.seconds == pytest.approx(beside.seconds)


def test_only_the_sequence_that_is_guessed_well_drafts():
    survival = np.array([[0.9, 0.8, 0.7, 0.6, 0.5]] + [[0.05, 0.0, 0.0, 0.0, 0.0]] * 7)
    depths = DepthSearch(make_costs(), survival.tolist(), 0).best().depths
    assert depths[0] >= 4
    assert depths[1:] == [0] * 7


def test_rates_are_conditional_on_all_earlier_positions():
    acceptance = Acceptance(3, memory=1000.0)
    for _ in range(100):
        acceptance.record(3, 0)
        acceptance.record(3, 1)
    first, second, third = acceptance.rates
    assert first == pytest.approx(0.5, abs=0.05)
    assert second < 0.05
    assert third == second  # never tested: like the last position that was


def test_a_copy_learns_alone_and_a_faded_rate_learns_quickly():
    everyone = Acceptance(2, memory=100.0)
    for _ in range(100):
        everyone.record(2, 0)
    own = everyone.start(memory=100.0)
    own.record(1, 1)
    assert own.rates[0] > 0.15
    assert everyone.rates[0] < 0.05
    before = everyone.rates[0]
    everyone.fade(10_000)
    everyone.record(1, 1)
    assert everyone.rates[0] - before > 0.15
