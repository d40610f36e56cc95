"""Who drafts, what is verified, and that it never costs much: on machines whose truth is known."""

import itertools
import random
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from blockdraft.allocation.account import Account
from blockdraft.allocation.allocator import Allocator
from blockdraft.allocation.backoff import Backoff
from blockdraft.allocation.best_rate import BestRate
from blockdraft.allocation.candidates import ordered, taken
from blockdraft.allocation.costs import KeyCosts, StepCosts
from blockdraft.allocation.expectation import Trust
from blockdraft.allocation.free_worth import FreeWorth
from blockdraft.allocation.offers import Offers
from blockdraft.allocation.policy import Asked, Outcome, VerifyAll
from blockdraft.allocation.prices import StepPrices
from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree
from blockdraft.core.sequence import Row
from tests.allocation_sim import (
    KIND,
    Machine,
    Result,
    Text,
    always,
    best_rate,
    limited,
    make_row,
    num_branches,
    simulate,
)

CPU = Machine()
STEEP = Machine(row=0.001)
SHIPPED = (0.55, 0.6, 0.6, 0.6, 0.6)
CODE, CHAT = (0.9,) * 15, (0.1,) * 15


def sure(rate: float) -> float:
    """Of a drafter that is as sure of nonsense as of the rest."""
    return 0.7


def lost(result: Result, num: int) -> float:
    """Plain steps that were lost beyond a small share of the time, as the account promises."""
    return (result.seconds - 1.015 * result.plain_seconds) / CPU.forward(num)


def all_over_plain(machine: Machine, rates, num: int, limit: int) -> float:
    result = simulate(VerifyAll(), machine, rates, num, limit=limit, depth=limit, seconds=5)
    return result.over_plain


# The best number of candidates.


def random_tree(luck: random.Random, num: int) -> Proposal:
    parents, probabilities = [], []
    for node in range(num):
        parent = luck.randrange(-1, node)
        above = 1.0 if parent == ROOT else probabilities[parent]
        parents.append(parent)
        probabilities.append(above * luck.random())
    return Proposal(Tree(tuple(range(num)), tuple(parents)), tuple(probabilities), (KIND,) * num)


def closed_sets(tree: Tree):
    """All sets of nodes that have each node's parent."""
    for size in range(len(tree) + 1):
        for nodes in itertools.combinations(range(len(tree)), size):
            if all(tree.parents[node] in (ROOT, *nodes) for node in nodes):
                yield nodes


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_rows", [1, 2])
def test_no_choice_of_candidates_gives_more_tokens_per_second(seed, num_rows):
    luck = random.Random(seed)
    # Costs with steps, as where rows are filled up to a multiple.
    multiple = luck.choice([1, 3, 4])
    points = [(n, 0.01 + 0.004 * -(-n // multiple)) for n in range(1, 24)]
    costs = StepCosts(points, points, [(6, luck.choice([0.0005, 0.004, 0.02]))])
    policy = BestRate(costs, 6, 6, model_kind=KIND)
    rows = [make_row(key, 6, 6) for key in range(num_rows)]
    able = [row.for_model() for row in limited(policy, rows)]
    assert [(row.num_draft_tokens, row.max_depth) for row in able] == [(6, 6)] * num_rows
    drafting = policy._step.decision.offer.drafting
    proposals = [random_tree(luck, 6 // num_rows + 1) for _ in rows]
    prices, decision = policy._step.prices, policy._step.decision
    policy._step.decision = replace(decision, forced={})
    chosen = policy.choose(rows, proposals)
    chances = [policy.calibration.probabilities(0, own, sampled=False) for own in proposals]

    def rate(sets):
        num = sum(map(len, sets))
        seconds = costs.forward(num_rows + num) if num else prices.plain_seconds
        gained = sum(own[node] for own, nodes in zip(chances, sets, strict=True) for node in nodes)
        return (num_rows + gained) / (max(seconds, prices.plain_seconds) + drafting)

    found = [
        [own.tree.tokens.index(token) for token in some.tree.tokens]
        for own, some in zip(proposals, chosen, strict=True)
    ]
    best = max(map(rate, itertools.product(*(list(closed_sets(own.tree)) for own in proposals))))
    assert rate(found) == pytest.approx(best)


def test_every_number_is_looked_at():
    # One row more is worth nothing, three more are.
    points = [(1, 0.01), (2, 0.0138), (3, 0.0139), (4, 0.014), (6, 0.04)]
    prices = StepPrices(StepCosts(points, points, [(6, 1e-6)]), 1, 0, 0)
    gains = [0.3] * 5
    nothing = [0.0] * 5
    assert prices.best(gains, nothing, 0.0).num_candidates == 3
    assert prices.best(gains[:1], nothing[:1], 0.0).num_candidates == 0
    assert prices.best(gains[:1], nothing[:1], 0.0, least=1).num_candidates == 1
    assert prices.best(gains, nothing, 0.0, trust=0.3).num_candidates == 0
    branches = [0.0, 0.0, 0.01, 0.0, 0.0]
    assert prices.best(gains, branches, 0.0).num_candidates == 2


def test_batches_leave_out_candidates_that_raise_the_rate_by_next_to_nothing():
    points = [(1, 0.010), (2, 0.0105), (3, 0.011), (4, 0.0115)]
    costs = StepCosts(points, points, [(6, 1e-6)])
    for num, gain, num_taken in (
        (2, 0.14, 0),
        (2, 0.18, 1),
        (1, 0.06, 1),
    ):  # 1.02, 1.04, 1.01 times
        price = StepPrices(costs, num, 0, 0).best([gain], [0.0], 0.0)
        assert price.num_candidates == num_taken
    # Of those that are verified in any case it is not asked what they raise.
    forced = StepPrices(costs, 2, 0, 0).best([0.3, 0.15], [0.0, 0.0], 0.0, least=1)
    assert forced.num_candidates == 1
    more = StepPrices(costs, 2, 0, 0).best([0.3, 0.5], [0.0, 0.0], 0.0, least=1)
    assert more.num_candidates == 2
    # Rows that cost nothing: two candidates raise the rate by 0.21, 0.19 and 0.21.
    flat = StepCosts([(1, 1.0), (64, 1.0)], [(1, 1.0), (64, 1.0)], [(6, 1e-6)])
    for num, gains, num_taken in ((8, [0.9, 0.8], 2), (9, [0.9, 0.8], 0), (9, [0.95, 0.95], 2)):
        price = StepPrices(flat, num, 0, 0).best(gains, [0.0, 0.0], 0.0)
        assert price.num_candidates == num_taken


def test_keys_cost_the_same_with_candidates_and_without():
    points = [(1, 0.010), (2, 0.0105), (3, 0.011), (4, 0.0115)]
    costs = StepCosts(points, points, [(6, 1e-6)], [], KeyCosts(key=1e-6))
    few, many = StepPrices(costs, 1, 0, 0), StepPrices(costs, 1, 5000, 0)
    for num in range(4):
        gains = [1.0] * num
        price, dear = (own.best(gains, [0.0] * num, 0.0, least=num) for own in (few, many))
        assert dear.seconds == pytest.approx(price.seconds + 0.005)


def test_prompt_rows_do_not_change_what_pays():
    forward = [(1, 0.016), (512, 0.272)]
    costs = StepCosts(forward, forward, [(6, 0.006), (96, 0.024)])
    gains = [0.5, 0.4, 0.3, 0.2, 0.1]
    alone, beside = (StepPrices(costs, 3, 0, num).best(gains, [0.0] * 5, 0.001) for num in (0, 400))
    assert alone.num_candidates == beside.num_candidates
    assert alone.seconds == pytest.approx(beside.seconds)


def test_where_branches_are_dear_chains_are_verified():
    text = Text(always(*[0.7] * 5), width=3)
    found = {}
    for branch in (0.0, 0.02):
        machine = Machine(branch=branch, row=0.0001)
        policy = best_rate(machine, 15)
        policy.account.allows = lambda loss: True
        row = make_row(0, 15)
        limited(policy, [row])
        proposal, _ = text.proposal(row, 0.0)
        found[branch] = policy.choose([row], [proposal])[0]
    assert num_branches(found[0.0]) > 3
    assert num_branches(found[0.02]) == 0
    assert len(found[0.02]) == 5


def test_trees_pay_where_rows_are_cheap():
    chain = simulate(best_rate(CPU), CPU, always(*SHIPPED), 1, seconds=6)
    text = Text(always(*SHIPPED), width=3)
    tree = simulate(best_rate(CPU, 15), CPU, text, 1, limit=15, seconds=6)
    assert tree.over_plain < 0.95 * chain.over_plain


# Never slower.


@pytest.mark.parametrize("num", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(
    ("rate", "believed"), [(0.0, sure), (0.05, sure), (0.0, lambda rate: 1.0)],
    ids=["wrong", "noise", "certain"],
)  # fmt: skip
def test_a_drafter_that_is_no_good_costs_next_to_nothing(rate, believed, num):
    text = Text(always(*[rate] * 5), width=2, believed=believed)
    result = simulate(best_rate(CPU, 10), CPU, text, num, limit=10, seconds=12)
    assert lost(result, num) < 10
    assert result.share_drafted < 0.15


@pytest.mark.parametrize("num", [1, 4, 32])
@pytest.mark.parametrize("rate", [0.2, 0.35, 0.55])
def test_no_drafter_is_slower_than_plain(num, rate):
    result = simulate(best_rate(CPU), CPU, always(*[rate] * 5), num, seconds=10)
    assert lost(result, num) < 10


@pytest.mark.parametrize("aftermath", [1.15, 1.3])
@pytest.mark.parametrize("rate", [0.25, 0.3])
def test_what_drafts_leave_behind_is_paid_for(rate, aftermath):
    # A step behind drafts is slower; taken for the usual one, it makes drafting look better.
    machine = Machine(base=0.0075, row=0.0004, draft_base=0.002, slot=0.0001, aftermath=aftermath)
    result = simulate(best_rate(machine), machine, always(*[rate] * 5), 1, seconds=15)
    assert result.over_plain < 1.02


def test_a_plain_step_behind_drafts_is_booked_and_not_learned_from():
    policy, row = best_rate(CPU), make_row(0, 5)
    assert play(policy, [0], 5, 1) == [5]
    plain, credit = policy._costs.plain(1), policy.account.credit
    slow = {"forward": 1.2 * plain}
    for num_steps, behind in ((1, True), (4, False)):
        for _ in range(num_steps):
            limited(policy, [row.limited(0)])
            policy.choose([row], [NOTHING])
            policy.record([Outcome(row, NOTHING, [])], slow)
        assert (policy.account.credit < credit - 0.1 * plain) == behind
        assert (policy._costs.plain(1) == plain) == behind
        credit = policy.account.credit


def test_a_plain_step_that_is_cheaper_than_believed_is_found_out():
    # Believed: plain 20 ms, so that 1.6 tokens in 27 ms are a gain. In truth 16, and they are not.
    costs = StepCosts([(1, 0.02)], [(1, 0.02), (2, 0.0202), (64, 0.045)], [(2, 0.0068)])
    machine = Machine(row=0.0042, draft_base=0.0068, slot=0.0, project_base=0.0, project_row=0.0)
    result = simulate(
        BestRate(costs, 1, 1, model_kind=KIND),
        machine,
        always(0.6),
        1,
        limit=1,
        depth=1,
        seconds=30,
    )
    assert result.over_plain < 1.025


@pytest.mark.parametrize("error", [-0.25, 0.25])
def test_a_wrong_measurement_is_overcome(error):
    result = simulate(best_rate(CPU, error=error), CPU, always(*SHIPPED), 1, seconds=8)
    assert result.over_plain < 0.72
    wrong = simulate(best_rate(CPU, error=error), CPU, always(*[0.0] * 5), 1, seconds=8)
    assert wrong.over_plain < 1.03


def test_steps_that_cost_more_than_they_should_are_not_paid_for_long():
    # All that is drafted comes true, and the drafts take three times as long as they were said to.
    machine = Machine(draft_base=0.09)
    result = simulate(best_rate(CPU), machine, always(*[0.95] * 5), 1, seconds=20)
    assert result.over_plain < 1.03


# Used where it pays.


@pytest.mark.parametrize(("num", "machine", "limit"), [(1, CPU, 15), (4, CPU, 15), (32, STEEP, 15)])
def test_a_good_drafter_is_used_where_it_pays(num, machine, limit):
    rates = always(*[0.85] * 15)
    best = min(1.0, *(all_over_plain(machine, rates, num, k) for k in (limit, 5, 2)))
    ratios = []
    for seed in range(8):  # by chance one may need 3 % more time than another
        policy = best_rate(machine, limit, max_depth=limit)
        result = simulate(
            policy, machine, rates, num, limit=limit, depth=limit, seconds=12, seed=seed
        )
        ratios.append(result.over_plain)
    assert mean(ratios) < 1.04 * best


def test_a_gain_of_a_few_percent_is_found_and_kept():
    result = simulate(best_rate(CPU), CPU, always(*SHIPPED), 4, seconds=12)
    assert result.over_plain < 0.94


def test_a_drafter_that_becomes_good_is_taken_up_again():
    rates = lambda key, now: (0.8,) * 5 if now > 8 else (0.0,) * 5  # noqa: E731
    for believed in (lambda rate: rate, sure):
        text = Text(rates, believed=believed)
        # By chance it takes a few seconds more or less.
        done = mean(
            simulate(best_rate(CPU), CPU, text, 1, seconds=24, seed=seed).plain_seconds
            for seed in range(4)
        )
        # Plain until then, and at the ratio of a drafter that was always good afterwards.
        ideal = 8 + 16 / all_over_plain(CPU, always(*[0.8] * 5), 1, 5)
        assert done > 0.85 * ideal


def test_a_text_that_turns_good_early_is_noticed_in_a_few_dozen_steps():
    rates = lambda key, now: (0.8,) * 5 if now > 0.6 else (0.0,) * 5  # noqa: E731
    result = simulate(best_rate(CPU), CPU, rates, 1, seconds=6, noise=0.0, outliers=0.0)
    start = round(0.6 / CPU.base)
    drafting = [i for i, nums in enumerate(result.plans) if nums[0] >= 4 and i > start]
    assert drafting[0] - start < 120


def test_code_drafts_and_chat_beside_it_does_not():
    rates = lambda key, now: CODE if key == 0 else CHAT  # noqa: E731
    result = simulate(best_rate(CPU), CPU, rates, 3, seconds=15)
    settled = result.plans[len(result.plans) // 2 :]
    code, *chat = (sum(nums) / len(settled) for nums in zip(*settled, strict=True))
    assert code > 3
    assert max(chat) < 0.7
    assert result.over_plain < 0.95


def test_limits_are_honored():
    limits = [0, 1, 3, 5]
    result = simulate(
        best_rate(CPU), CPU, always(*[0.95] * 5), 4, limits=limits, noise=0.02, seconds=5
    )
    assert [max(nums) for nums in zip(*result.plans, strict=True)] == limits
    nobody = simulate(best_rate(CPU), CPU, always(*CODE), 3, limits=[0, 0, 0], seconds=2)
    assert {tuple(nums) for nums in nobody.plans} == {(0, 0, 0)}


@pytest.mark.parametrize("slower", [3.0, 0.5])
def test_another_load_of_the_machine_changes_little(slower):
    machine = Machine(slowdown=lambda now: slower if now > 4 else 1.0)
    result = simulate(best_rate(machine), machine, always(*SHIPPED), 1, seconds=12)
    assert result.over_plain < 0.76


def test_candidates_that_have_become_dear_do_not_make_plain_steps_seem_dear():
    """From the 40th second on each row takes a third of a plain step, and nothing pays any more."""
    policy = best_rate(CPU)
    simulate(policy, CPU, always(*[0.6] * 5), 1, seconds=40)
    dear = Machine(row=0.006)
    simulate(policy, dear, always(*[0.6] * 5), 1, seconds=30)
    assert policy._costs.plain(1) == pytest.approx(dear.base, rel=0.06)
    settled = simulate(policy, dear, always(*[0.6] * 5), 1, seconds=20)
    assert settled.over_plain < 1.05


@pytest.mark.parametrize("row", [CPU.row, 0.00002])
def test_costs_stay_where_they_are_while_noise_is_all_that_changes(row):
    """Where rows cost next to nothing too: the level sank, and what nobody met with it."""
    machine = Machine(row=row)
    policy, draw = best_rate(machine), random.Random(0)
    chances = [draw.choice([0.3, 0.5, 0.7, 0.9]) for _ in range(800)]
    text = lambda key, now: (chances[int(now / 0.5) % 800],) * 5  # noqa: E731
    simulate(policy, machine, text, 1, seconds=400, noise=0.08)
    found, costs = policy._costs, machine.costs()
    ratios = [
        found.plain(1) / costs.plain(1),
        found.plain(8) / costs.plain(8),
        found.forward(6) / costs.forward(6),
    ]
    assert ratios == pytest.approx([1.0] * 3, abs=0.15)


def test_plain_steps_are_frequent_again_once_their_cost_has_changed():
    account = Account()
    account.open_step(0.01)

    def drafts_until_control() -> int:
        num = 0
        while not account.wants_control:
            account.count(drafted=True, is_control=False)
            num += 1
        account.count(drafted=False, is_control=True)
        return num

    assert [drafts_until_control() for _ in range(7)] == [4, 8, 16, 32, 64, 126, 126]
    account.control_soon()
    assert [drafts_until_control() for _ in range(2)] == [4, 8]

    policy, told = best_rate(CPU), []
    policy._costs.record_plain = lambda num, num_keys, seconds: True
    policy.account.control_soon = lambda: told.append("soon")
    row = make_row(0, 5).limited(0)
    for _ in range(4):  # of steps in which nobody can draft one in four is learned from
        limited(policy, [row])
        policy.record([Outcome(row, NOTHING, [])], {"forward": CPU.base})
    assert told == ["soon"]


def test_sequences_are_tried_in_turns():
    machine = Machine(project_row=1e-7)
    result = simulate(best_rate(machine), machine, always(*[0.0] * 5), 4, seconds=20)
    counts = [sum(num > 0 for num in nums) for nums in zip(*result.limits[100:], strict=True)]
    assert min(counts) > 0
    assert max(counts) - min(counts) <= 2


def test_deep_candidates_that_were_given_up_are_tried_again():
    # At first nothing behind the second token is ever right, so that nobody would verify it.
    rates = lambda key, now: (0.9,) * 5 if now > 8 else (0.9, 0.9, 0.0, 0.0, 0.0)  # noqa: E731
    result = simulate(best_rate(STEEP), STEEP, Text(rates, believed=sure), 1, seconds=20)
    before = [nums[0] for nums in result.plans if result.plans][200:400]
    after = [nums[0] for nums in result.plans][-200:]
    assert sum(before) / len(before) < 3.5
    assert sum(after) / len(after) > 4


def test_one_step_in_64_is_plain():
    result = simulate(best_rate(CPU), CPU, always(*CODE), 1, seconds=40)
    settled = [any(nums) for nums in result.limits[-1280:]]
    assert settled.count(False) == 20


def test_no_step_with_prompt_rows_is_plain_for_control():
    """It would teach nothing."""
    policy, row, drafted = best_rate(CPU), make_row(0, 5), []
    for num_prompt_tokens in (*[100] * 30, *[0] * 3, 100):
        limited(policy, [row], num_prompt_tokens)
        (chosen,) = policy.choose([row], [Proposal.chain([1] * 5, KIND, [0.9] * 5)])
        drafted.append(len(chosen) > 0)
        seconds = {"forward": CPU.forward(1 + len(chosen)), "draft": CPU.draft(6) * drafted[-1]}
        policy.record([Outcome(row, chosen, range(len(chosen)))], seconds)
    assert drafted == [True] * 30 + [False] * 2 + [True] * 2


def test_the_plain_step_that_is_learned_from_waits_for_one_without_prompt_rows():
    policy, row, drafted = best_rate(CPU), make_row(0, 5), []
    for num_prompt_tokens in (*[0] * 5, 100, 0, 0, 0):
        limited(policy, [row], num_prompt_tokens)
        (chosen,) = policy.choose([row], [Proposal.chain([1] * 5, KIND, [0.9] * 5)])
        drafted.append(len(chosen) > 0)
        seconds = {"forward": CPU.forward(1 + len(chosen)), "draft": CPU.draft(6) * drafted[-1]}
        policy.record([Outcome(row, chosen, range(len(chosen)))], seconds)
    # After four drafts the first plain step shows their aftermath; the next one has prompt rows.
    assert drafted == [True] * 4 + [False, True, False, False, True]


def test_a_long_prompt_is_not_projected_for_a_few_tokens():
    row = make_row(0, 5)
    for lag, expected in ((100_000, 0), (100, 5)):  # two seconds, and two milliseconds
        policy = BestRate(CPU.costs(), 5, 5, lambda row, lag=lag: lag, model_kind=KIND)
        assert limited(policy, [row])[0].for_model().num_draft_tokens == expected


def test_rows_that_the_model_proposes_nothing_for_do_not_speak_for_others():
    # As where a text is too long for the model.
    policy, row = best_rate(CPU), make_row(99, 5)
    for _ in range(300):
        able = limited(policy, [row])[0].for_model()
        policy.choose([able], [NOTHING])
        policy.record([Outcome(able, NOTHING, [])], {"forward": CPU.forward(1)})
    policy.close(99)
    result = simulate(policy, CPU, always(*CODE), 1, seconds=10)
    assert result.share_drafted > 0.95


def test_a_model_that_was_outbid_is_believed_as_before():
    policy, row = best_rate(CPU), make_row(0, 5)
    simulate(policy, CPU, always(*CODE), 1, seconds=2)
    believed, outbid = list(policy._model._expectation(row).gains), 0
    for _ in range(20):
        able = limited(policy, [row])[0].for_model()
        outbid += able.num_draft_tokens > 0
        proposal = Proposal.chain([1, 2, 3], "lookup")
        (chosen,) = policy.choose([able], [proposal])
        policy.record([Outcome(able, chosen, [])], {"forward": CPU.forward(1 + len(chosen))})
    assert outbid > 10
    assert policy._model._expectation(row).gains == believed


def test_a_choice_that_failed_is_not_taken_for_one_that_was_verified(monkeypatch):
    """The allocator verifies nothing then; as a forward of six rows it would seem very cheap."""
    policy = best_rate(CPU)
    rows = [row.for_model() for row in limited(policy, [make_row(0, 5)])]
    monkeypatch.setattr(policy._model, "record_proposals", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.choose(rows, [Proposal.chain([0] * 5, KIND, [0.9] * 5)])
    before = policy._costs.forward(6)
    seconds = {"forward": CPU.forward(1), "draft": CPU.draft(6)}
    policy.record([Outcome(rows[0], NOTHING, [])], seconds)
    assert policy._costs.forward(6) == before


def test_no_more_candidates_are_forced_than_there_are_on_the_first_path():
    tree = Tree((1, 2, 3), (ROOT, ROOT, ROOT))
    order = ordered([Proposal(tree, (0.5, 0.3, 0.1), (KIND,) * 3)], [[0.5, 0.3, 0.1]], [0.0], [3])
    assert order.num_forced == 1
    assert order.nodes == [0, 1, 2]


# Beside the simulated machine.


def play(policy, keys, kept, num_steps):
    """Steps in which all that is verified is kept, up to `kept`; what was verified last."""
    nums: list[int] = []
    for _ in range(num_steps):
        rows = [row.for_model() for row in limited(policy, [make_row(key, 5) for key in keys])]
        chances = [[0.9**k for k in range(row.num_slots)] for row in rows]
        proposals = [Proposal.chain([0] * len(own), KIND, own) for own in chances]
        chosen = policy.choose(rows, proposals)
        nums = [len(own) for own in chosen]
        outcomes = [
            Outcome(row, own, list(range(min(kept, len(own)))))
            for row, own in zip(rows, chosen, strict=True)
        ]
        drafting = sum(row.num_draft_tokens > 0 for row in rows)
        policy.record(
            outcomes,
            {"draft": CPU.draft(6 * drafting), "forward": CPU.forward(len(rows) + sum(nums))},
        )
    return nums


def test_what_a_sequence_did_long_ago_is_forgotten():
    policy = best_rate(CPU)
    play(policy, range(2), 0, 60)
    play(policy, range(1, 2), 5, 200)
    known = sum(policy._model._expectation(make_row(0, 5)).gains)
    play(policy, range(1, 2), 5, 400)
    assert sum(policy._model._expectation(make_row(0, 5)).gains) > known + 1.0


def test_no_model_drafts_where_it_says_that_it_cannot():
    def lag(row: Row) -> int | None:
        return None if row.sequence.key == 0 else 0

    policy = BestRate(CPU.costs(), 5, 5, lag, model_kind=KIND)
    rows = limited(policy, [make_row(0, 5), make_row(1, 5)])
    assert [row.for_model().num_draft_tokens > 0 for row in rows] == [False, True]


def test_a_try_that_was_too_dear_is_weighed_again_once_something_has_changed():
    policy = best_rate(CPU)
    model, needed = policy._model, 0.05

    def rests(num_able: int = 1, credit: float = 0.0, step: int = 0) -> bool:
        model._rest = 1, needed, 64
        policy.account.credit, model._num_steps = credit, step
        return model._is_resting(num_able)

    assert not rests(num_able=2)
    assert not rests(credit=needed)
    assert not rests(step=64)
    assert rests()
    model.record_drafted()
    assert not model._is_resting(1)


def test_drafts_that_do_not_come_are_not_paid_for_long():
    policy = best_rate(CPU)
    num_drafted = 0
    for _ in range(400):
        rows = limited(policy, [make_row(0, 5)])
        num_drafted += rows[0].for_model().num_draft_tokens > 0
        policy.choose(rows, [NOTHING])
        policy.record([Outcome(rows[0], NOTHING, [])], {"draft": 0.006, "forward": 0.016})
    assert num_drafted < 40


def test_the_same_history_gives_the_same_plans():
    text = Text(always(*SHIPPED), width=2)
    first, second = (
        simulate(best_rate(CPU, 10), CPU, text, 5, limit=10, seconds=4, seed=3) for _ in range(2)
    )
    assert first.plans == second.plans
    assert first.limits == second.limits


def test_a_step_that_failed_may_be_planned_again():
    policy = best_rate(CPU)
    rows = [make_row(0, 5), make_row(1, 5)]
    assert limited(policy, rows) == limited(policy, rows)
    policy.close(0)
    policy.close(99)
    before = policy.account.credit, policy._costs.plain(2), policy._costs.forward(9)
    assert limited(policy, [], 64) == []
    assert policy.choose([], []) == []
    policy.record([], {"forward": 0.03})
    # Of the step that failed nothing is learned, nor from the seconds of the next one.
    assert (policy.account.credit, policy._costs.plain(2), policy._costs.forward(9)) == before


def test_steps_with_prompt_rows_teach_no_times():
    costs = CPU.costs()
    policy = BestRate(costs, 5, 5, model_kind=KIND)
    before = costs.forward(101), costs.draft(6)
    for _ in range(50):
        row = make_row(0, 5)
        limited(policy, [row], 100)
        policy.choose([row], [Proposal.chain([1] * 5, KIND)])
        policy.record([Outcome(row, NOTHING, [])], {"forward": 1.0, "draft": 1.0, "project": 1.0})
    assert (costs.forward(101), costs.draft(6)) == before


def test_the_account_allows_a_share_of_the_time_and_no_more():
    account, lost, tries = Account(), 0.0, 0
    for step in range(10_000):
        account.open_step(0.01)
        if account.allows_try(0.004):
            account.book(0.004)
            lost += 0.004
            tries += step > 5000
    assert 0.009 < lost / (10_000 * 0.01) < 0.011
    assert tries > 100
    account.book(-100.0)  # a long gain
    account.open_step(0.01)
    assert not account.allows(1.0)  # excuses no long loss
    account.book(10.0)
    assert not account.allows(-0.01)
    assert not account.allows_try(0.0)


def test_steps_that_nobody_watched_earn_too_and_each_step_once():
    account = Account()
    account.open_step(0.01)
    before = account.credit
    account.open_step(0.01, 10)
    assert account.credit - before == pytest.approx(10 * 0.0001)

    policy, opened = best_rate(CPU), []
    policy.account.open_step(0.01)
    policy.account.credit = -1.0  # nobody proposes
    policy.account.open_step = lambda plain_seconds, num_steps: opened.append(num_steps)
    policy._model.is_weighed = lambda num_sequences, num_steps: False
    for _ in range(40):
        limited(policy, [make_row(0, 5)])
    assert opened == [4] * 10


def test_a_try_is_allowed_from_the_credit_on_that_it_is_said_to_need():
    account = Account()
    account.open_step(0.01)
    account.credit = account.credit_for_try(0.004)
    assert account.allows_try(0.004)
    account.book(1e-6)
    assert not account.allows_try(0.004)


def test_a_moment_in_which_the_machine_stood_still_is_paid_back_soon():
    account = Account()
    account.open_step(0.01)
    account.book(100.0)
    blocked = 0
    while not account.may_lose:
        account.open_step(0.01)
        blocked += 1
    assert 90 < blocked <= 101


def test_predictions_are_corrected_by_what_they_brought():
    trust = Trust()
    assert trust(1) == trust(8) == 1.0
    for _ in range(100):
        trust.record(8, 4.0, 2.0)
    assert trust(8) == pytest.approx(0.5, abs=0.03)
    assert trust(1) == 1.0
    for _ in range(1000):
        trust.record(8, 4.0, 0.0)
    assert trust(8) == 0.25


def test_what_takes_no_trees_verifies_the_first_path():
    proposal = Proposal(Tree((1, 2, 3), (ROOT, ROOT, 0)), (0.6, 0.4, 0.3), (KIND,) * 3)
    row = make_row(0, 5)
    for takes_trees, expected in ((True, (1, 2, 3)), (False, (1, 3))):
        allocator = Allocator(VerifyAll(), takes_trees=takes_trees)
        assert allocator.plan([row], [proposal]).rows[0].tree.tokens == expected


class Broken(VerifyAll):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def __getattribute__(self, name):
        if name in ("limit", "choose", "record") and name == self.place:
            raise RuntimeError(name)
        return super().__getattribute__(name)


def test_a_step_that_cannot_be_asked_about_drafts_nothing(monkeypatch):
    """Whatever was said of the step before."""
    allocator, row = Allocator(VerifyAll(), takes_trees=True), make_row(0, 5)
    assert allocator.ask([row]).anybody
    monkeypatch.setattr(VerifyAll, "ask", lambda self, num: 1 / 0)
    assert not allocator.ask([row]).anybody
    assert allocator.failures.num_failures == 1


@pytest.mark.parametrize("place", ["limit", "choose", "record"])
def test_what_fails_drops_proposals_and_no_request(place):
    allocator = Allocator(Broken(place), takes_trees=True)
    prompt = make_row(1, 0)
    batch = [make_row(0, 5), prompt]
    batch = allocator.limit(batch, [NOTHING] * 2)
    assert [row.for_model().num_draft_tokens for row in batch] == [0 if place == "limit" else 5, 0]
    plan = allocator.plan(batch, [Proposal.chain([1], KIND), NOTHING])
    assert [len(own.tree) for own in plan] == [0 if place == "choose" else 1, 0]
    allocator.record(plan, [[], []], {})
    assert allocator.failures.num_failures == 1


def test_keys_make_branches_dear():
    costs = StepCosts(
        [(1, 0.014)],
        [(1, 0.014), (16, 0.02)],
        [(6, 0.0034)],
        [],
        KeyCosts(key=1e-6, branch=1e-5, branch_key=3e-6),
    )
    text = Text(always(*[0.5] * 5), width=3)
    found = []
    for num_cached in (10, 5000):
        policy = BestRate(costs, 15, 5, model_kind=KIND)
        policy.account.allows = lambda loss: True
        row = make_row(0, 15, num_cached=num_cached)
        limited(policy, [row])
        proposal, _ = text.proposal(row, 0.0)
        found.append(num_branches(policy.choose([row], [proposal])[0]))
    assert found[0] > 2
    assert found[1] == 0


def test_a_request_that_is_guessed_badly_does_not_spend_what_others_gained():
    """Ten seconds of a good request fill the account; what follows is never guessed right."""
    rates = [[0.9] * 5, [0.03] * 5]
    policy = best_rate(CPU)
    simulate(policy, CPU, lambda key, now: rates[0], 1, seconds=10)
    policy.close(0)
    bad = simulate(policy, CPU, lambda key, now: rates[1], 1, seconds=1)
    assert bad.over_plain < 1.12


def free_chain(num: int, share: float) -> Proposal:
    return Proposal.chain(list(range(num)), "lookup", [share**depth for depth in range(1, num + 1)])


def test_a_model_drafts_only_where_others_leave_it_something_to_gain():
    """What is proposed without a model costs nothing to draft, and is known before."""
    for share, drafts in ((0.1, True), (0.97, False)):
        policy = best_rate(CPU, 5)
        policy.account.allows_try = lambda loss: False
        row = make_row(0, 16, 16).limited(5, 5)
        (found,) = limited(policy, [row], 0, [free_chain(16, share)])
        assert (found.for_model().num_draft_tokens > 0) == drafts
        if drafts:
            continue
        (chosen,) = policy.choose([row], [policy._step.free.by_key[0].proposal])
        assert len(chosen) > 5
        policy.record([Outcome(row, chosen, range(len(chosen)))], {"forward": 0.02})
        assert policy._model._num_drafted == 1


def test_nothing_is_verified_where_the_account_is_empty_or_a_plain_step_is_due():
    for name, value in (("credit", -1.0), ("_num_drafted", 1000)):
        policy = best_rate(CPU, 5)
        rows = [make_row(0, 16, 16)]
        limited(policy, rows)  # opens the account
        setattr(policy.account, name, value)
        limited(policy, rows, 0, [free_chain(16, 0.97)])
        assert policy._step.decision.offer is None
        assert policy.choose(rows, [free_chain(16, 0.97)]) == [NOTHING]


def test_what_was_not_verified_is_learned_from_the_token_of_a_plain_step():
    policy, row = best_rate(CPU, 5), make_row(0, 16, 16)
    guess = Proposal(Tree((7, 8, 9), (ROOT, ROOT, 0)), (0.3, 0.2, 0.1), ("ngram",) * 3)

    def chances() -> list[float]:
        return policy.calibration.probabilities(0, guess, sampled=False)

    limited(policy, [row])  # opens the account
    for token_id in (7, 99):
        before = chances()
        policy.account.credit = -1.0
        limited(policy, [row.limited(0)], 0, [guess])
        assert policy.choose([row], [guess]) == [NOTHING]
        row.sequence.token_ids.append(token_id)
        policy.record([Outcome(row, NOTHING, [])], {"forward": 0.02})
        assert chances() != before
    assert chances()[0] < before[0]


def free_run(policy: BestRate, share: float, num_rows: int, took: float, num_steps: int) -> float:
    """The share of steps in which what needs no model is asked for; a model never drafts."""
    policy.account.allows = policy.account.allows_try = lambda loss: False
    rows = [make_row(key, 8, 8).limited(0) for key in range(num_rows)]
    num_asked = 0
    for _ in range(num_steps):
        asks = policy.ask(num_rows).free
        num_asked += asks
        free = [free_chain(1, share) if asks else NOTHING for _ in rows]
        chosen = policy.choose(policy.limit(rows, 0, free), free)
        outcomes = [
            Outcome(row, own, list(range(len(own)))) for row, own in zip(rows, chosen, strict=True)
        ]
        forward = CPU.forward(num_rows + sum(map(len, chosen)))
        policy.record(outcomes, {"free": took * asks, "forward": forward})
    return num_asked / num_steps


def test_what_needs_no_model_is_asked_for_where_it_saves_more_than_it_takes():
    assert free_run(best_rate(CPU, 5), 0.9, 1, 0.0005, 400) > 0.9
    hopeless = best_rate(CPU, 5)
    assert free_run(hopeless, 0.01, 1, 0.0005, 400) < 0.12
    # What is likely from now on is found again.
    assert free_run(hopeless, 0.9, 1, 0.0005, 400) > 0.5


def test_what_does_not_pay_is_asked_for_ever_more_seldom_until_it_does():
    worth = FreeWorth()

    def pause() -> int:
        num = 1
        while not worth.asks(1):
            num += 1
        return num

    while worth.asks(1):
        worth.record(1, 0.0, 1.0, 1000.0)
    pauses = []
    for saved in (0.0, 0.0, 0.0, 0.0, 1.5, 0.0):
        pauses.append(pause() + 1 if not pauses else pause())
        worth.record(1, saved, 1.0, 1000.0)
    assert pauses == [8, 16, 32, 32, 32, 8]


def test_a_machine_that_stood_still_keeps_nobody_from_being_asked():
    worth, plain = FreeWorth(), 0.01
    for _ in range(200):
        worth.record(1, 0.004, 0.0005, plain)
    worth.record(1, 0.004, 30.0, plain)
    assert worth.asks(1)
    hopeless = FreeWorth()
    for _ in range(200):
        hopeless.record(1, 0.0, 30.0, plain)
    assert sum(hopeless.asks(1) for _ in range(1000)) > 500  # from the 128th on, as nobody answers


def test_what_takes_long_is_asked_for_in_vain_for_a_small_share_of_the_time():
    worth, plain, took, num_asked = FreeWorth(), 1.0, 0.3, 0
    for _ in range(100):  # until it is learned
        if worth.asks(32):
            worth.record(32, 0.0, took, plain)
    for _ in range(3000):
        if worth.asks(32):
            worth.record(32, 0.0, took, plain)
            num_asked += 1
    assert 0.004 < num_asked * took / (3000 * plain) < 0.0051


def test_what_it_takes_to_propose_without_a_model_is_booked():
    policy = best_rate(CPU, 5)
    took = CPU.base / 2
    policy._free_worth.asks = lambda num: True
    asked = free_run(policy, 0.01, 1, took, 1000)
    # The account holds eight plain steps, and gets one in a hundred.
    assert asked * 1000 * took < (8 + 1000 / 100 + 1) * CPU.base
    policy.account.credit = -1.0
    assert not policy.ask(1).free


def test_what_it_takes_to_decide_counts_against_what_is_proposed_without_a_model():
    def deciding(took: float) -> float:
        policy, record = best_rate(CPU, 5), BestRate.record
        policy.record = lambda outcomes, seconds: record(
            policy, outcomes, {**seconds, "controller": took * (seconds["free"] > 0)}
        )
        return free_run(policy, 0.5, 1, 0.0001, 400)

    assert deciding(0.0) > 0.9
    assert deciding(2 * CPU.base) < 0.5


def test_with_an_empty_account_and_nothing_proposed_nothing_is_weighed():
    policy, row = best_rate(CPU, 5), make_row(0, 8, 8)
    limited(policy, [row])  # opens the account
    policy.account.credit = -1.0
    policy._model.decide = policy._order = lambda *given: pytest.fail("it was weighed")
    (own,) = limited(policy, [row], 0, [NOTHING])
    assert own.num_model_tokens == 0
    assert policy.choose([own], [NOTHING]) == [NOTHING]
    before = policy.account.credit
    policy.record([Outcome(own, NOTHING, [])], {"forward": CPU.base, "controller": 0.001})
    assert policy.account.credit == before


def test_free_worth_is_told_apart_by_how_many_share_a_step():
    policy = best_rate(CPU, 5)
    assert free_run(policy, 0.01, 16, 0.004, 200) < 0.3
    policy.account.credit = 1.0
    assert policy.ask(1).free
    worth = FreeWorth()
    for _ in range(100):
        worth.record(16, saved=0.0, took=0.01, plain=0.02)
    assert (worth.asks(16), worth.asks(1)) == (False, True)


def tries(policy: BestRate, share: float | None, num_steps: int) -> list[int]:
    """The steps in which a model was asked though nothing was expected, and brought nothing.

    share: of what is known without the model, and right if it is likely. None: nothing is known.
    """
    policy.account.allows, policy.account.allows_try = lambda loss: False, lambda loss: True
    policy.account.count = lambda **said: None  # no step is plain for control
    row = make_row(0, 8, 8).limited(5, 5)
    free = NOTHING if share is None else free_chain(1, share)
    model = Proposal.chain(list(range(100, 105)), KIND, [0.05] * 5)
    found = []
    for step in range(num_steps):
        (own,) = limited(policy, [row], 0, [free])
        drafts = own.for_model().num_draft_tokens > 0
        if drafts:
            found.append(step)
        (chosen,) = policy.choose([row], [model if drafts else free])
        kept = range(len(chosen)) if share is not None and share > 0.5 and not drafts else ()
        policy.record([Outcome(row, chosen, list(kept))], {"forward": CPU.base})
    return found


def test_beside_what_is_known_without_a_model_it_is_tried_less_and_less():
    found = tries(best_rate(CPU, 5), 0.1, 600)
    pauses = np.diff(found)
    assert list(pauses[:3]) == [16, 32, 64]
    assert (pauses[3:] == 64).all()
    assert len(pauses) > 5
    # Without it nothing else could draft.
    assert (np.diff(tries(best_rate(CPU, 5), None, 600)) <= 17).all()


def test_a_model_is_not_tried_where_much_is_known_without_it():
    assert tries(best_rate(CPU, 5), 0.95, 200) == []


def test_but_seldom_it_is_for_it_may_have_become_better():
    found = tries(best_rate(CPU, 5), 0.95, 2000)
    assert len(found) >= 3
    assert min(np.diff([0, *found])) >= 500


def share_drafted(policy: BestRate, right: float, num_steps: int) -> float:
    """Share of steps in which the model drafts; looked-up tokens are each right half the time.

    right: the chance of each of the model's tokens, which claims 0.9.
    """
    luck, row, num_drafted = random.Random(3), make_row(0, 15, 5), 0
    free = Proposal.chain(list(range(8)), "lookup", [0.5**depth for depth in range(1, 9)])
    model = Proposal.chain(list(range(100, 105)), KIND, [0.9**depth for depth in range(1, 6)])
    for _ in range(num_steps):
        (own,) = limited(policy, [row], 0, [free])
        drafts = own.for_model().num_draft_tokens > 0
        num_drafted += drafts
        (chosen,) = policy.choose([own], [model if drafts else free])
        rate, kept = right if drafts else 0.5, 0
        while kept < len(chosen) and luck.random() < rate:
            kept += 1
        seconds = {"forward": CPU.forward(1 + len(chosen)), "draft": CPU.draft(6 * drafts)}
        policy.record([Outcome(own, chosen, list(range(kept)))], seconds)
    return num_drafted / num_steps


def test_a_model_that_has_become_good_is_found_out_beside_what_is_always_known():
    policy = best_rate(CPU, 15)
    assert share_drafted(policy, 0.0, 400) < 0.1
    share_drafted(policy, 0.9, 4000)
    assert share_drafted(policy, 0.9, 500) > 0.9


def test_an_offer_that_pays_ends_the_pause_between_tries(monkeypatch):
    policy = best_rate(CPU, 5)
    tries(policy, 0.1, 200)
    policy.account.allows = lambda loss: True
    row, offer = make_row(0, 8, 8).limited(5, 5), Offers.of
    with monkeypatch.context() as patch:
        patch.setattr(Offers, "of", lambda *own, **how: replace(offer(*own, **how), rate=1e9))
        patch.setattr(Offers, "may_pay", lambda *_: True)
        limited(policy, [row], 0, [free_chain(1, 0.1)])
    assert policy._step.decision.offer is not None
    policy.choose([row], [NOTHING])
    policy.record([Outcome(row, NOTHING, [])], {"forward": CPU.base})
    pauses = np.diff(tries(policy, 0.1, 200))
    assert pauses[0] < 32 == pauses[1]


def test_beside_what_is_known_without_a_model_tries_take_little_of_the_time():
    """Where a try takes four steps, since a long prompt would have to be projected."""
    policy = best_rate(CPU, 5)
    policy._model._lag, record = lambda row: 1, policy.record
    taken = {"forward": CPU.base, "project": 4 * CPU.base}
    policy.record = lambda outcomes, seconds: record(
        outcomes, taken if policy._step.decision.offer is not None else seconds
    )
    pauses = np.diff(tries(policy, 0.1, 6000))
    assert len(pauses) > 1
    assert 4 / 0.002 <= pauses.min() <= pauses.max() < 5 / 0.002


def test_a_machine_that_stood_still_in_a_try_puts_no_end_to_tries():
    policy = best_rate(CPU, 5)
    policy._model._lag, record = lambda row: 1, policy.record
    pauses = [60.0]

    def stalled(outcomes, seconds):
        if policy._step.decision.offer is not None and pauses:
            seconds = {**seconds, "project": pauses.pop()}
        record(outcomes, seconds)

    policy.record = stalled
    assert len(tries(policy, 0.1, 2500)) > 2


def test_tries_of_a_batch_take_little_and_follow_each_other_where_one_surprises():
    """Nobody knows before that the drafter has become good."""
    policy = best_rate(CPU)
    bad = simulate(policy, CPU, lambda key, now: [0.03] * 5, 8, seconds=40)
    assert 1.0 < bad.over_plain < 1.006
    again = [
        simulate(policy, CPU, lambda key, now: [0.85] * 5, 8, seconds=5, seed=seed).over_plain
        for seed in range(6)
    ]
    assert max(again) < 1.02
    assert again[-1] < 0.75


def test_luck_of_other_drafters_does_not_make_the_tries_of_a_model_more_frequent():
    """Of many sequences whole paths are looked up right, now many and now few of them."""
    machine, luck = Machine(row=0.0001), random.Random(0)
    policy, num_tries = best_rate(machine), 0
    rows = [make_row(key, 8, 8).limited(5, 5) for key in range(16)]
    model = Proposal.chain(list(range(100, 105)), KIND, [0.9**depth for depth in range(1, 6)])
    for _ in range(2000):
        free = [free_chain(5, 0.8) if key % 2 else NOTHING for key in range(16)]
        drafting = limited(policy, rows, free=free)
        drafts = [row.for_model().num_draft_tokens > 0 for row in drafting]
        num_tries += any(drafts)
        made = [model if own else other for own, other in zip(drafts, free, strict=True)]
        outcomes, verified = [], policy.choose(drafting, made)
        for row, chosen, is_wrong in zip(drafting, verified, drafts, strict=True):
            kept = 0
            while kept < len(chosen) and not is_wrong and luck.random() < 0.8:
                kept += 1
            outcomes.append(Outcome(row, chosen, list(range(kept))))
        num_slots = 6 * sum(drafts)
        forward = machine.forward(16 + sum(map(len, verified)))
        policy.record(outcomes, {"forward": forward, "draft": machine.draft(num_slots)})
    assert 0 < num_tries < 45


@pytest.mark.parametrize(("num", "asks_often"), [(4, True), (16, False)])
def test_most_steps_of_a_batch_ask_nobody_where_nothing_pays(num, asks_often):
    policy, asked = best_rate(CPU), []
    ask = policy.ask

    def noted(num_sequences: int) -> Asked:
        asked.append(ask(num_sequences))
        return asked[-1]

    policy.ask = noted
    free_run(policy, 0.01, num, 0.004, 400)
    num_asked = sum(one.anybody for one in asked[100:])
    assert num_asked == 300 if asks_often else 0 < num_asked < 75


def test_in_a_batch_weighing_pauses_where_it_finds_nothing(monkeypatch):
    may_pay = Offers.may_pay

    def weighed(num: int, num_steps: int) -> list[int]:
        policy, found = best_rate(STEEP, 5), []
        rows = [make_row(key, 8, 8).limited(5, 5) for key in range(num)]
        free = [free_chain(1, 0.95) for _ in rows]
        policy.account.allows = lambda loss: False
        for step in range(num_steps):
            noted = lambda *own, step=step: found.append(step) or may_pay(*own)  # noqa: E731
            monkeypatch.setattr(Offers, "may_pay", noted)
            own = limited(policy, rows, 0, free)
            assert not any(row.num_model_tokens for row in own)
            chosen = policy.choose(rows, free)
            outcomes = [
                Outcome(row, own, list(range(len(own))))
                for row, own in zip(rows, chosen, strict=True)
            ]
            policy.record(outcomes, {"forward": STEEP.forward(num + sum(map(len, chosen)))})
        return sorted(set(found))

    assert len(weighed(4, 30)) > 20
    assert np.diff(weighed(5, 120))[-3:].tolist() == [16, 16, 16]


def test_attempts_that_lead_to_nothing_come_ever_more_seldom():
    backoff, made = Backoff(2, 8), []
    for step in range(40):
        if backoff.is_due(step):
            backoff.attempt(step)
            made.append(step)
    assert made == [0, 2, 6, 14, 22, 30, 38]
    backoff.succeed()
    backoff.attempt(46)
    assert not backoff.is_due(47)
    assert backoff.is_due(48)
    backoff.wait_until(60)
    assert not backoff.is_due(59)
    assert backoff.is_due(60)


def test_what_is_held_against_predictions_fades_while_none_is_used():
    """In a batch one step of many sure candidates that are all wrong is much."""
    trust = Trust()
    trust.record(16, 80.0, 0.0)
    low = trust(16)
    for _ in range(1500):
        trust.fade(16)
    assert low < 0.3
    assert trust(16) > 0.75


def test_a_bad_moment_of_a_batch_does_not_end_all_drafts_for_good():
    policy = best_rate(CPU, 15)
    policy._model._trust[False].record(8, 200.0, 0.0)
    result = simulate(policy, CPU, always(*[0.9] * 5), 8, seconds=60)
    assert sum(map(any, result.plans[-100:])) > 90


def test_trust_starts_where_it_is_told():
    assert Trust()(1) == 1.0
    assert Trust(0.7)(1) == pytest.approx(0.7)


def test_no_offer_that_is_not_looked_at_would_pay(monkeypatch):
    """Over plays of all kinds, and both answers come often."""
    seen = {False: 0, True: 0}
    may_pay = Offers.may_pay

    def checked(offers: Offers, rows):
        answer = may_pay(offers, rows)
        seen[answer] += 1
        if not answer:
            assert offers.of(rows).rate <= offers._least_rate * (1 + 1e-9)
        return answer

    monkeypatch.setattr(Offers, "may_pay", checked)
    luck = random.Random(0)
    for machine in (CPU, STEEP):
        for num in (1, 2, 5):
            policy = best_rate(machine, 5)
            for _ in range(200):
                rows = [make_row(key, 8, 8).limited(5, 5) for key in range(num)]
                free = [free_chain(luck.randrange(1, 5), luck.random()) for _ in rows]
                drafting = limited(policy, rows, 0, free)
                drafts = [row.for_model().num_draft_tokens > 0 for row in drafting]
                own = [
                    Proposal.chain(range(3), KIND, [0.9, 0.6, 0.4]) if drafts[i] else free[i]
                    for i in range(num)
                ]
                chosen = policy.choose(rows, own)
                kept = [list(range(luck.randrange(len(one) + 1))) for one in chosen]
                outcomes = [Outcome(*one) for one in zip(rows, chosen, kept, strict=True)]
                took = machine.forward(num + sum(map(len, chosen)))
                policy.record(outcomes, {"forward": took, "draft": 0.001 * sum(drafts)})
    assert min(seen.values()) > 50


# What a single rule is there for.


class Noting(VerifyAll):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked = []

    def ask(self, num_sequences):
        self.asked.append(num_sequences)
        return super().ask(num_sequences)

    def limit(self, rows, num_prompt_tokens, free):
        self.asked.append((len(rows), num_prompt_tokens))
        return super().limit(rows, num_prompt_tokens, free)


def prompt_row(key: int, num_tokens: int) -> Row:
    sample = make_row(key, 0).sequence
    sample.token_ids = list(range(num_tokens))
    sample.num_prompt, sample.num_cached = num_tokens, 0
    return Row(sample, list(range(num_tokens)), 0, is_prompt=True)


def test_a_policy_is_told_of_the_tokens_of_prompts_and_asked_about_the_other_rows():
    policy, batch = Noting(), [prompt_row(0, 7), make_row(1, 5), prompt_row(2, 4)]
    allocator = Allocator(policy, takes_trees=True)
    assert allocator.ask(batch) == Asked(free=True, model=True)
    assert [row.num_draft_tokens for row in allocator.limit(batch, [NOTHING] * 3)] == [0, 5, 0]
    assert policy.asked == [1, (1, 11)]
    assert not allocator.ask([prompt_row(0, 7)]).anybody


def test_candidates_that_are_taken_in_another_order_stand_behind_their_parents():
    proposal = Proposal(Tree((1, 2, 3), (ROOT, ROOT, 0)), (0.5, 0.4, 0.3), (KIND,) * 3)
    order = ordered([proposal], [[0.5, 0.3, 0.4]], [0.0], [0])
    assert order.nodes == [0, 2, 1]
    assert taken([proposal], order, 2)[0].tree.tokens == (1, 3)
    bushy = Proposal(Tree((1, 2, 3, 4), (ROOT, ROOT, 1, 0)), (0.5, 0.4, 0.3, 0.2), (KIND,) * 4)
    order = ordered([bushy], [[0.3, 0.5, 0.4, 0.1]], [0.0], [0])
    assert order.nodes == [1, 2, 0, 3]
    (chosen,) = taken([bushy], order, 3)
    assert chosen.tree.tokens == (1, 2, 3)
    assert chosen.tree.parents == (ROOT, ROOT, 1)


def test_an_ended_sequence_leaves_nothing_behind():
    policy = best_rate(CPU)
    play(policy, range(3), 2, 40)
    assert set(policy.calibration._offsets) == {0, 1, 2}
    assert set(policy._model._expectations._known) == {0, 1, 2}
    for key in range(3):
        policy.close(key)
    assert not policy.calibration._offsets
    assert not policy._model._expectations._known


def drafted_step(policy: BestRate, row: Row, **times: float) -> float:
    """What a step with five sure candidates, all kept, takes off the credit."""
    limited(policy, [row])
    (chosen,) = policy.choose([row], [Proposal.chain([1] * 5, KIND, [0.9] * 5)])
    assert len(chosen) == 5
    before = policy.account.credit
    policy.record([Outcome(row, chosen, range(5))], times)
    return before - policy.account.credit


def test_a_step_on_a_slower_machine_is_compared_with_plain_steps_on_it():
    """Three times as slow in all, drafting gains three times as much."""
    policy, row = best_rate(CPU), make_row(0, 5)
    normal = drafted_step(policy, row, forward=CPU.forward(6), draft=CPU.draft(6))
    assert normal < 0
    costs = policy._costs.draft(6), policy._costs.forward(6)
    slow = drafted_step(policy, row, forward=3 * CPU.forward(6), draft=3 * CPU.draft(6))
    assert slow == pytest.approx(3 * normal, rel=0.05)
    # All costs follow the machine, and those of drafts no further than others.
    ratios = policy._costs.draft(6) / costs[0], policy._costs.forward(6) / costs[1]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.02)


def test_a_prediction_that_did_not_come_true_is_held_against_the_next():
    policy, row = best_rate(CPU), make_row(0, 5)
    limited(policy, [row])
    (chosen,) = policy.choose([row], [Proposal.chain([1] * 5, KIND, [0.9] * 5)])
    policy.record([Outcome(row, chosen, [])], {"forward": CPU.forward(6), "draft": CPU.draft(6)})
    assert policy._trust(1) < 0.9


def test_what_a_drafted_step_loses_is_booked_whole_but_for_a_stall():
    row, times = make_row(0, 5), {"forward": CPU.forward(6), "draft": CPU.draft(6)}
    usual = drafted_step(best_rate(CPU), row, **times)
    projecting = drafted_step(best_rate(CPU), row, **times, project=0.5)
    assert projecting - usual == pytest.approx(0.5)
    stalled = drafted_step(best_rate(CPU), row, forward=30.0, draft=CPU.draft(6))
    assert stalled == pytest.approx(4 * CPU.forward(1))


def test_a_stall_in_a_step_behind_drafts_is_booked_as_a_quarter_of_a_plain_step():
    policy, row = best_rate(CPU), make_row(0, 5)
    drafted_step(policy, row, forward=CPU.forward(6), draft=CPU.draft(6))
    plain = policy._costs.plain(1)
    limited(policy, [row.limited(0)])
    before = policy.account.credit
    policy.record([Outcome(row, NOTHING, [])], {"forward": 30.0})
    assert before - policy.account.credit == pytest.approx(0.25 * plain)


def test_one_draft_in_32_is_verified_along_its_whole_first_path():
    policy, row, whole = best_rate(STEEP), make_row(0, 5), []
    policy.account.count = lambda **said: None  # no step is plain for control
    for step in range(96):
        limited(policy, [row])
        (chosen,) = policy.choose([row], [Proposal.chain([1] * 5, KIND, [0.9, 0.8, 1e-3, 1e-4, 0])])
        if len(chosen) == 5:
            whole.append(step)
        seconds = {"forward": STEEP.forward(1 + len(chosen)), "draft": STEEP.draft(6)}
        policy.record([Outcome(row, chosen, range(min(len(chosen), 2)))], seconds)
    assert np.diff(whole).tolist() == [32, 32]


def test_the_features_of_a_long_prompt_are_paid_over_several_drafts():
    rates = []
    for lag in (4, 250, 500):
        policy = BestRate(CPU.costs(), 5, 5, lambda row, lag=lag: lag, model_kind=KIND)
        limited(policy, [make_row(0, 5)])
        rates.append(policy._step.decision.offer.rate)
    # 500 tokens take 10 ms more at once, and a sixteenth of that counts.
    offer = policy._step.decision.offer
    assert 1 / rates[2] - 1 / rates[0] == pytest.approx(0.00992 / 16 / offer.tokens, rel=0.2)
