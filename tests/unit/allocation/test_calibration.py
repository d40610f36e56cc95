import math
import random

import pytest

from blockdraft.allocation.calibration import Calibration, Line, Offset, logit
from blockdraft.core.plan import ROOT, Proposal, Tree


def chain(beliefs, source="sim"):
    """Path probabilities of conditional ones."""
    paths, above = [], 1.0
    for belief in beliefs:
        above *= belief
        paths.append(above)
    return Proposal.chain(range(len(paths)), source, paths)


def conditional(calibration, belief, *, depth=1, source="sim", sampled=False, key=0):
    proposal = chain([*[1.0] * (depth - 1), belief], source)
    paths = calibration.probabilities(key, proposal, sampled=sampled)
    return paths[-1] / (paths[-2] if depth > 1 else 1.0)


def judged(calibration, truth, luck, num, *, learns=True, sampled=False):
    """Predictions, and whether they came true, of a drafter whose beliefs are true by `truth`."""
    told = []
    for index in range(num):
        beliefs = [luck.uniform(0.05, 0.98) for _ in range(4)]
        proposal = chain(beliefs)
        kept = []
        while len(kept) < 4 and luck.random() < truth(beliefs[len(kept)]):
            kept.append(len(kept))
        paths = calibration.probabilities(index // 50, proposal, sampled=sampled)
        above = 1.0
        for node in range(min(4, len(kept) + 1)):
            told.append((paths[node] / above, node < len(kept)))
            above = paths[node]
        if learns:
            calibration.record(index // 50, proposal, kept, sampled=sampled)
    return told


def error(told):
    """Mean distance of predicted and kept, in ten bins."""
    bins = {}
    for predicted, kept in told:
        bins.setdefault(min(int(predicted * 10), 9), []).append(predicted - kept)
    return sum(abs(sum(values)) for values in bins.values()) / len(told)


@pytest.mark.parametrize(
    ("truth", "before", "after"),
    [
        (lambda belief: belief**2, 0.12, 0.03),
        (lambda belief: belief**0.5, 0.12, 0.04),
        (lambda belief: 0.02, 0.45, 0.02),
        (lambda belief: belief, 0.0, 0.03),
    ],
    ids=["overconfident", "too modest", "noise", "right"],
)
def test_beliefs_that_do_not_hold_are_mended(truth, before, after):
    luck = random.Random(0)
    calibration = Calibration()
    assert error(judged(calibration, truth, luck, 300, learns=False)) >= before
    judged(calibration, truth, luck, 300)
    assert error(judged(calibration, truth, luck, 1000)) <= after


def test_a_drafter_that_changes_is_followed():
    luck, calibration = random.Random(1), Calibration()
    judged(calibration, lambda belief: belief**4, luck, 3000)
    judged(calibration, lambda belief: belief, luck, 1500)
    assert error(judged(calibration, lambda belief: belief, luck, 1500)) < 0.05


@pytest.mark.parametrize("belief", [0.5, 0.9, 1.0])
def test_a_drafter_that_always_believes_the_same_is_followed_too(belief):
    """As lookup does where matches are long: nothing tells scale and bias apart."""
    calibration = Calibration()
    for request in range(400):
        for kept in ([0], [0], [0], [0], []) * 10:
            calibration.record(request, chain([belief]), kept, sampled=False)
    assert conditional(calibration, belief, key=-1) == pytest.approx(0.8, abs=0.03)
    for request in range(400, 440):
        for _ in range(50):
            calibration.record(request, chain([belief]), [], sampled=False)
    assert conditional(calibration, belief, key=-1) < 0.2


def test_certainty_that_is_always_wrong_is_mended_in_a_few_verdicts():
    calibration, proposal = Calibration(), Proposal.chain([1, 2], "sim")
    assert calibration.probabilities(0, proposal, sampled=False)[0] > 0.99
    for _ in range(8):
        calibration.record(0, proposal, [], sampled=False)
    first, second = calibration.probabilities(0, proposal, sampled=False)
    assert first < 0.3
    assert second <= first


def test_each_source_and_depth_and_kind_of_request_is_learned_apart():
    calibration = Calibration()
    for _ in range(50):
        calibration.record(0, chain([0.5, 0.5]), [], sampled=False)
    calibration.close(0)
    assert conditional(calibration, 0.5) < 0.12  # a part was that request's, which has ended
    assert conditional(calibration, 0.5, depth=2) == pytest.approx(0.5)
    assert conditional(calibration, 0.5, sampled=True) == pytest.approx(0.5)
    assert conditional(calibration, 0.5, source="sim+lookup") == pytest.approx(0.5)


def test_a_request_that_is_guessed_badly_is_told_from_others():
    calibration = Calibration()
    for index in range(400):
        calibration.record(index % 2, chain([0.5]), [0] if index % 2 else [], sampled=False)
    assert conditional(calibration, 0.5, key=0) < 0.4
    assert conditional(calibration, 0.5, key=1) > 0.6
    calibration.close(0)
    assert 0.4 < conditional(calibration, 0.5, key=0) < 0.6


def test_siblings_are_judged_only_where_their_parent_was_kept():
    tree = Tree((1, 2, 3, 4), (ROOT, ROOT, 0, 1))
    proposal = Proposal(tree, (0.5, 0.3, 0.25, 0.15), ("sim",) * 4)
    calibration = Calibration()
    for _ in range(60):
        calibration.record(0, proposal, [1, 3], sampled=False)
    first, second, under_first, under_second = calibration.probabilities(0, proposal, sampled=False)
    assert 0.4 < second <= first < 0.55  # the wrong way round, which a line cannot mend
    assert under_second / second > 0.8
    assert under_first <= first


@pytest.mark.parametrize("seed", range(10))
def test_order_within_a_slot_and_along_a_path_is_kept(seed):
    luck, calibration = random.Random(seed), Calibration()
    truth = luck.choice([lambda p: p**3, lambda p: 1 - p, lambda p: 0.0, lambda p: 1.0])
    judged(calibration, truth, luck, 400)
    beliefs = sorted(luck.random() for _ in range(20))
    found = [conditional(calibration, belief, depth=2) for belief in beliefs]
    assert found == sorted(found)
    paths = calibration.probabilities(7, chain([luck.random() for _ in range(12)]), sampled=False)
    assert paths == sorted(paths, reverse=True)
    assert all(0.0 <= path <= 1.0 for path in paths)


@pytest.mark.parametrize("seed", range(20))
def test_no_history_breaks_it(seed):
    luck, calibration = random.Random(seed), Calibration()
    odd = [0.0, 1.0, 1e-320, 1 - 1e-16, 0.5]
    for _ in range(300):
        proposal = chain([luck.choice(odd) for _ in range(3)], luck.choice("ab"))
        kept = luck.choice([[], [0], [0, 1], [0, 1, 2]])
        calibration.record(luck.randrange(3), proposal, kept, sampled=luck.random() < 0.5)
    for belief in odd:
        assert 0.0 < conditional(calibration, belief) < 1.0
    for line in calibration._lines.values():
        assert line.scale > 0
        assert math.isfinite(line.bias)


@pytest.mark.parametrize("probability", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1.0, 2.0])
def test_logits_are_in_bounds(probability):
    assert -6.0 <= logit(probability) <= 6.0


def test_a_request_is_at_most_so_much_better_than_others():
    offset = Offset()
    for chance in (0.01, 0.5) * 200:
        offset.record(True, chance)
    assert offset.value == 2.0
    for chance in (0.99, 0.5) * 400:
        offset.record(False, chance)
    assert offset.value == -2.0


def test_a_line_believes_the_drafter_at_first():
    assert Line().at(1.5) == 1.5


def test_one_verdict_moves_a_belief_by_one_at_most():
    line = Line()
    before = line.at(6.0)
    line.record(6.0, False, 0.9975)
    assert 0.9 < before - line.at(6.0) <= 1.0


def test_a_request_that_changes_is_followed():
    offset = Offset()
    for kept in (True, False) * 500:
        offset.record(kept, 0.5)
    for _ in range(200):
        offset.record(False, 1 / (1 + math.exp(-offset.value)))
    assert offset.value < -1.0
