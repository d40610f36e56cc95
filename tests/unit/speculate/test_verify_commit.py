"""verify is pure and decides; commit is the only writer."""

import copy
import itertools
import math
import random
from collections.abc import Sequence as Ids
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from blockdraft.cache.memory import Memory
from blockdraft.core.grammar import Grammar
from blockdraft.core.plan import ROOT, ForwardPlan, PlannedRow, Proposal, Tree
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target.interface import RowFeatures, TargetOutput
from blockdraft.speculate import verify as verify_module
from blockdraft.speculate.commit import StepOutput, commit
from blockdraft.speculate.proposer import Proposer
from blockdraft.speculate.sampler import choose as choose_module
from blockdraft.speculate.sampler.choose import Walk
from blockdraft.speculate.verify import Verdict, verify
from tests.fakes import TableTarget
from tests.samples import make_sample
from tests.trees import tree_around

VOCAB = 16
GRAMMAR = Grammar.regex("a")
TRUTH = [3, 5, 7, 9, 11]


class Recorder(Memory):
    """A target with its memory, and a drafter, that write down what commit tells them."""

    kind = "recorder"
    feature_layers: tuple[int, ...] = (0,)
    max_nodes = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def memory(self) -> "Recorder":
        return self

    def keep(self, planned: PlannedRow, nodes: Ids[int]) -> None:
        sequence = planned.row.sequence
        length = sequence.num_cached + len(planned.row.new_ids) + len(nodes)
        self.calls.append(("keep", sequence.key, length, list(nodes)))

    def committed(self, row: Row, token_ids: Ids[int], features: torch.Tensor | None) -> None:
        found = None if features is None else features[:, 0].tolist()
        start = row.sequence.num_cached
        self.calls.append(("committed", row.sequence.key, start, list(token_ids), found))

    def publish(self, key: int, token_ids: list[int], num_tokens: int) -> None:
        self.calls.append(("publish", key, list(token_ids), num_tokens))

    def close(self, key: int) -> None:
        self.calls.append(("close", key))


def proposer(recorder: Recorder) -> Proposer:
    return Proposer(recorder, VOCAB)


def make_row(
    *,
    key: int = 8,
    num_prompt: int = 3,
    cached: int = 3,
    output: tuple[int, ...] = (1,),
    **params: Any,
) -> Row:
    stop_ids = params.pop("stop_ids", frozenset())
    scan_stop = params.pop("scan_stop", None)
    sequence = make_sample([2] * num_prompt, output, key=key, **params)
    sequence.seed, sequence.num_cached = 1, cached
    sequence.stop_ids, sequence.scan_stop = stop_ids, scan_stop
    return Row(sequence, sequence.token_ids[cached:], 4)


def make_logits(num: int) -> torch.Tensor:
    """Rows whose argmaxes are TRUTH."""
    logits = torch.zeros(num, VOCAB)
    for index in range(num):
        logits[index, TRUTH[index]] = 1.0
    return logits


def without_number(num: int, index: int, value: float = math.nan) -> torch.Tensor:
    """The same with a logit at `index` that is no number."""
    logits = make_logits(num)
    logits[index, 2] = value
    return logits


def chains(rows: list[Row], drafts: list[list[int]]) -> ForwardPlan:
    return ForwardPlan.of_chains(rows, drafts)


def decide(row: Row, draft: list[int], logits: torch.Tensor | None = None) -> Verdict:
    logits = make_logits(1 + len(draft)) if logits is None else logits
    (verdict,) = verify(chains([row], [draft]), logits)
    return verdict


def without_features(num_rows: int) -> TargetOutput:
    """An output whose features are all alike, and whose logits are not looked at any more."""
    return TargetOutput(torch.empty(0, VOCAB), [RowFeatures(torch.ones(5, 2))] * num_rows)


def commit_one(
    row: Row, draft: list[int], recorder: Recorder, one: Proposer | None = None
) -> StepOutput:
    plan = chains([row], [draft])
    return commit_plan(plan, make_logits(1 + len(draft)), recorder, one)


def commit_plan(
    plan: ForwardPlan, logits: torch.Tensor, recorder: Recorder, one: Proposer | None = None
) -> StepOutput:
    """Verify and commit a plan of one row; the feature of each position is its number."""
    (planned,) = plan
    num = planned.num_positions
    features = torch.arange(num, dtype=torch.float32)[:, None].expand(num, 2)
    output = TargetOutput(logits, [RowFeatures(features)])
    verdicts = verify(plan, logits)
    (result,) = commit(plan, verdicts, output, recorder, one or proposer(recorder))
    return result


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ([], [3]),
        ([3, 5, 7, 9], [3, 5, 7, 9, 11]),
        ([3, 5, 0, 9], [3, 5, 7]),
        ([0, 5, 7, 9], [3]),
        ([3, 5, 7, 0], [3, 5, 7, 9]),
    ],
)
def test_drafts_are_kept_up_to_the_first_difference(draft: list[int], expected: list[int]) -> None:
    row = make_row()
    before = copy.deepcopy(row)
    verdict = decide(row, draft)
    assert verdict.token_ids == expected
    assert verdict.num_accepted == len(expected) - 1
    for name in ("token_ids", "num_cached", "output_counts", "finish_reason"):
        assert getattr(row.sequence, name) == getattr(before.sequence, name)


def test_a_row_without_logits_gets_no_verdict() -> None:
    sequence = make_row(num_prompt=5, cached=0, output=()).sequence
    row = Row(sequence, sequence.token_ids[:4], 0, is_prompt=True)
    assert decide(row, [], torch.empty(0, VOCAB)) == Verdict()


def test_logprobs_belong_to_the_kept_tokens() -> None:
    verdict = decide(make_row(logprobs=1), [3, 0, 0])
    assert [entry.top[0][0] for entry in verdict.logprobs] == verdict.token_ids == [3, 5]


def test_both_caches_end_before_the_anchor() -> None:
    recorder, row = Recorder(), make_row()
    output = commit_one(row, [3, 5, 0, 9], recorder)
    assert row.sequence.token_ids == [2, 2, 2, 1, 3, 5, 7]
    assert row.sequence.num_cached == 6
    # The rejected slot's features are cut, and those of the bonus do not exist yet.
    assert recorder.calls == [
        ("keep", 8, 6, [0, 1]),
        ("committed", 8, 3, [1, 3, 5], [0.0, 1.0, 2.0]),
        ("publish", 8, [2, 2, 2, 1, 3, 5, 7], 6),
    ]
    assert (output.num_drafted, output.num_accepted) == (4, 2)
    assert output.finish_reason is None


def test_a_chunk_of_the_prompt_commits_its_tokens_only() -> None:
    recorder = Recorder()
    sequence = make_row(num_prompt=6, cached=2, output=()).sequence
    row = Row(sequence, sequence.token_ids[2:4], 0)
    found = TargetOutput(torch.empty(0, VOCAB), [RowFeatures(torch.ones(2, 2))])
    plan = chains([row], [[]])
    (output,) = commit(plan, [Verdict()], found, recorder, proposer(recorder))
    assert (output.token_ids, sequence.num_cached, sequence.num_output) == ([], 4, 0)
    assert recorder.calls == [
        ("keep", 8, 4, []),
        ("committed", 8, 2, [2, 2], [1.0, 1.0]),
    ]


@pytest.mark.parametrize("way", ["no drafter", "plain request"])
def test_without_a_draft_context_all_that_is_cached_is_published(way: str) -> None:
    recorder, params = Recorder(), {}
    if way == "no drafter":
        recorder.feature_layers = ()
    else:
        params = {"num_draft_tokens": 0}
    commit_one(make_row(**params), [3, 5, 0, 9], recorder)
    assert recorder.calls == [
        ("keep", 8, 6, [0, 1]),
        ("committed", 8, 3, [1, 3, 5], None),
        ("publish", 8, [2, 2, 2, 1, 3, 5, 7], 6),
    ]


@pytest.mark.parametrize(
    ("params", "expected", "reason"),
    [
        ({"stop_ids": frozenset({5})}, [3, 5], "stop"),
        ({"stop_ids": frozenset({3, 5})}, [3], "stop"),
        ({"stop_ids": frozenset({11})}, TRUTH, "stop"),
        ({"max_tokens": 4}, [3, 5, 7], "length"),
        ({"max_tokens": 4, "stop_ids": frozenset({7})}, [3, 5, 7], "stop"),
        ({"scan_stop": lambda token_id: token_id == 7}, [3, 5, 7], "stop"),
    ],
)
def test_nothing_is_committed_after_the_end(
    params: dict[str, Any], expected: list[int], reason: str
) -> None:
    recorder, row = Recorder(), make_row(logprobs=0, **params)
    output = commit_one(row, TRUTH[:4], recorder)
    assert output.token_ids == expected
    assert output.num_accepted == min(len(expected), 4)
    assert len(output.logprobs) == len(expected)
    assert output.finish_reason == row.sequence.finish_reason == reason
    assert row.sequence.output_ids == [1, *expected]
    (kept, committed, published, *closed) = recorder.calls
    num_cached = row.sequence.num_cached
    # Its last keys too: others may read what is published.
    assert kept == ("keep", 8, num_cached, list(range(num_cached - 4)))
    # What is published, others may draft from.
    token_ids = [1, *expected][: num_cached - 3]
    assert committed == ("committed", 8, 3, token_ids, [float(i) for i in range(num_cached - 3)])
    assert published == ("publish", 8, row.sequence.token_ids, num_cached)
    assert num_cached == 3 + len(expected)
    assert closed == [("close", 8), ("close", 8)]


def test_the_stop_scanner_hears_committed_tokens_only_and_a_stop_token_too() -> None:
    heard: list[int] = []

    def scan(token_id: int) -> bool:
        heard.append(token_id)
        return False

    commit_one(make_row(scan_stop=scan), [3, 5, 0, 9], Recorder())
    assert heard == [3, 5, 7]
    heard.clear()
    commit_one(make_row(scan_stop=scan, stop_ids=frozenset({5})), TRUTH[:4], Recorder())
    assert heard == [3, 5]


CHOOSERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1e-3, "seed": 1},
    {"temperature": 1e-3, "seed": 1, "top_k": 3, "min_p": 0.1},
    {"logit_bias": {3: 0.5}},
)


@pytest.mark.parametrize("params", CHOOSERS, ids=str)
@pytest.mark.parametrize("index", range(5))
def test_logits_that_are_no_numbers_end_the_row_with_the_tokens_before(
    index: int, params: dict[str, Any]
) -> None:
    recorder, row = Recorder(), make_row(logprobs=1, **params)
    verdict = decide(row, TRUTH[:4], without_number(5, index))
    assert verdict.token_ids == TRUTH[:index]
    assert verdict.num_accepted == len(verdict.logprobs) == index
    (output,) = commit(
        chains([row], [TRUTH[:4]]), [verdict], without_features(1), recorder, proposer(recorder)
    )
    # The sequence had four tokens.
    message = f"the target's logits for the token at position {4 + index} are not numbers"
    assert row.sequence.error == message
    assert output.finish_reason == row.sequence.finish_reason == "error"
    assert output.token_ids == TRUTH[:index]
    assert row.sequence.output_ids == [1, *TRUTH[:index]]
    row.sequence.check()
    assert recorder.calls[-2:] == [("close", 8), ("close", 8)]


def test_what_follows_a_rejected_draft_may_be_no_number() -> None:
    verdict = decide(make_row(), [3, 0, 7, 9], without_number(5, 2))
    assert verdict == Verdict([3, 5], [0])


def test_an_end_before_the_missing_number_is_no_error() -> None:
    for params in ({"stop_ids": frozenset({5})}, {"max_tokens": 3}):
        recorder, row = Recorder(), make_row(**params)
        plan = chains([row], [TRUTH[:4]])
        verdicts = verify(plan, without_number(5, 2))
        (output,) = commit(plan, verdicts, without_features(1), recorder, proposer(recorder))
        assert output.finish_reason in ("stop", "length")
        assert (row.sequence.error, output.token_ids) == (None, [3, 5])


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_logits_are_ordered_like_any_others(value: float) -> None:
    verdict = decide(make_row(), [], without_number(1, 0, value))
    assert verdict == Verdict([2 if value > 0 else 3])


def test_each_row_of_a_batch_gets_its_own_logits() -> None:
    """Greedy, sampled and incomplete rows mixed, packed row after row; one ends with an error."""
    prompt = make_row(key=4, num_prompt=9, cached=2, output=()).sequence
    batch = [
        make_row(key=0),
        make_row(key=1, temperature=1e-3, seed=2),
        Row(prompt, prompt.token_ids[2:5], 0, is_prompt=True),
        make_row(key=2),
        make_row(key=3, logit_bias={11: 0.5}),
    ]
    block = [[3, 5, 0], [3], [], [0, 5, 7, 9], TRUTH[:4]]
    own = [make_logits(4), make_logits(2), make_logits(0), without_number(5, 0), make_logits(5)]
    verdicts = verify(chains(batch, block), torch.cat(own))
    assert [v.token_ids for v in verdicts] == [[3, 5, 7], [3, 5], [], [], TRUTH]
    assert [v.num_accepted for v in verdicts] == [2, 1, 0, 0, 4]
    assert [v.error is not None for v in verdicts] == [False, False, False, True, False]
    for row, draft, logits, verdict in zip(batch, block, own, verdicts, strict=True):
        assert decide(row, draft, logits) == verdict


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "^C"])
def test_a_stop_scanner_that_fails_leaves_every_row_consistent(error: BaseException) -> None:
    """Its own row ends, the others are committed; those behind an interrupt are untouched."""

    def fail(token_id: int) -> bool:
        if token_id == 5:
            raise error
        return False

    is_interrupt = isinstance(error, KeyboardInterrupt)
    recorder = Recorder()
    batch = [make_row(key=0), make_row(key=1, scan_stop=fail), make_row(key=2)]
    block = [TRUTH[:4]] * 3
    plan = chains(batch, block)
    verdicts = verify(plan, torch.cat([make_logits(5)] * 3))
    found = without_features(3)
    outputs: list[StepOutput] = []
    with pytest.raises(KeyboardInterrupt) if is_interrupt else nullcontext():
        outputs.extend(commit(plan, verdicts, found, recorder, proposer(recorder)))
    num_done = 2 if is_interrupt else 3
    expected = [(0, TRUTH, None), (1, [3, 5], "error"), (2, TRUTH, None)][:num_done]
    assert [(o.key, o.token_ids, o.finish_reason) for o in outputs] == expected
    for row in batch:
        row.sequence.check()
    last = [1] if is_interrupt else [1, *TRUTH]
    assert [row.sequence.output_ids for row in batch] == [[1, *TRUTH], [1, 3, 5], last]
    assert [row.sequence.num_cached for row in batch] == [8, 3, 3 if is_interrupt else 8]
    kept = [("keep", 0), ("committed", 0), ("publish", 0), ("close", 1), ("close", 1)]
    if not is_interrupt:
        kept += [("keep", 2), ("committed", 2), ("publish", 2)]
    assert [call[:2] for call in recorder.calls] == kept


@pytest.mark.parametrize("failing", ["keep", "publish", "close"])
def test_a_cache_that_fails_ends_its_row_alone(failing: str) -> None:
    class Failing(Recorder):
        def keep(self, planned: PlannedRow, nodes: Ids[int]) -> None:
            self.meet("keep", planned.row.sequence.key)

        def publish(self, key: int, token_ids: list[int], num_tokens: int) -> None:
            self.meet("publish", key)

        def close(self, key: int) -> None:
            self.meet("close", key)

        def meet(self, name: str, key: int) -> None:
            if (name, key) == (failing, 1):
                raise RuntimeError("boom")

    recorder = Failing()
    # A sequence that ends is closed.
    num_tokens = 6 if failing == "close" else 256
    batch = [make_row(key=key, max_tokens=num_tokens) for key in range(3)]
    block = [TRUTH[:4]] * 3
    plan = chains(batch, block)
    verdicts = verify(plan, torch.cat([make_logits(5)] * 3))
    found = without_features(3)
    outputs = list(commit(plan, verdicts, found, recorder, proposer(recorder)))
    assert [output.token_ids for output in outputs] == [TRUTH] * 3
    # With its last token an answer is whole, whatever fails then.
    expected = ["length"] * 3 if failing == "close" else [None, "error", None]
    assert [output.finish_reason for output in outputs] == expected


def check_drafts_alone_end(recorder: Recorder) -> None:
    """What fails as this drafter is told of committed tokens ends its drafts, and no request."""
    row, one = make_row(), proposer(recorder)
    output = commit_one(row, TRUTH[:4], recorder, one)
    assert (output.token_ids, row.sequence.error) == (TRUTH, None)
    assert one.failures.num_failures == 1
    assert row.sequence.has_lost_context
    assert not row.sequence.may_draft
    # Nobody may take over pages whose draft context is missing.
    assert [call[0] for call in recorder.calls] == ["keep", "close"]


def test_features_that_the_drafter_does_not_take_end_its_drafts_and_no_request() -> None:
    class Failing(Recorder):
        def committed(self, row: Row, token_ids: Ids[int], features: torch.Tensor | None) -> None:
            raise RuntimeError("boom")

    check_drafts_alone_end(Failing())


def test_features_that_cannot_be_taken_end_drafts_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(RowFeatures, "at", fail)
    check_drafts_alone_end(Recorder())


@pytest.mark.parametrize("params", CHOOSERS, ids=str)
def test_logits_without_any_chance_end_the_row(params: dict[str, Any]) -> None:
    logits = make_logits(5)
    logits[2] = -math.inf
    verdict = decide(make_row(**params), TRUTH[:4], logits)
    assert verdict.token_ids == TRUTH[:2]
    assert verdict.error == "the target's logits for the token at position 6 are all minus infinity"


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_an_infinite_logit_outweighs_all_noise(filters: dict[str, Any]) -> None:
    for seed in range(20):
        row = make_row(temperature=1.0, seed=seed, **filters)
        assert decide(row, [], without_number(1, 0, math.inf)) == Verdict([2])


def test_more_logprobs_than_tokens_are_those_of_all_tokens() -> None:
    verdict = decide(make_row(logprobs=20), [])
    assert verdict.error is None
    assert sorted(token_id for token_id, _ in verdict.logprobs[0].top) == list(range(VOCAB))


@pytest.mark.parametrize("failing", ["without_noise", "token_logprobs"])
@pytest.mark.parametrize("index", range(3))
def test_what_fails_while_a_token_is_chosen_ends_its_row_alone(
    index: int, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [make_row(key=key, logprobs=1, temperature=1e-3, seed=1) for key in range(3)]
    draft = TRUTH[:4]
    expected = [decide(row, draft) for row in batch]
    module = verify_module if failing == "token_logprobs" else choose_module
    real, calls = getattr(module, failing), itertools.count()

    def fail(*args: Any) -> Any:
        if failing == "without_noise":
            if args[1].sequence is batch[index].sequence:
                raise RuntimeError("boom")
        elif next(calls) == 5 * index:
            raise RuntimeError("boom")
        return real(*args)

    monkeypatch.setattr(module, failing, fail)
    if failing == "without_noise":
        monkeypatch.setattr(choose_module, "sampled", lambda *_: None)  # or nobody else is asked
    verdicts = verify(chains(batch, [draft] * 3), torch.cat([make_logits(5)] * 3))
    reason = "the token at position 4 could not be chosen: RuntimeError('boom')"
    expected[index] = Verdict(error=reason)
    assert verdicts == expected


def test_a_prompt_that_cannot_be_scored_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"output": (), "cached": 0, "logprobs": 1, "prompt_logprobs": True}
    batch = [make_row(key=0, **changes), make_row(key=1), make_row(key=2, **changes)]
    logits = torch.cat([make_logits(3), make_logits(1), make_logits(3)])
    plan = chains(batch, [[]] * 3)
    expected = verify(plan, logits)
    real = verify_module._score

    def fail(planned: PlannedRow, own: torch.Tensor) -> Any:
        if planned.row.sequence.key == 0:
            raise RuntimeError("boom")
        return real(planned, own)

    monkeypatch.setattr(verify_module, "_score", fail)
    first, *others = verify(plan, logits)
    assert "log-probabilities could not be found: RuntimeError('boom')" in str(first.error)
    assert others == expected[1:]


# Trees.


def tree_of(*nodes: tuple[int, int]) -> Tree:
    """Pairs of a token and its parent."""
    return Tree(tuple(token for token, _ in nodes), tuple(parent for _, parent in nodes))


def planned_tree(row: Row, tree: Tree) -> PlannedRow:
    return PlannedRow(row, Proposal(tree, (1.0,) * len(tree), ("test",) * len(tree)))


def tree_plan(row: Row, tree: Tree) -> ForwardPlan:
    return ForwardPlan([planned_tree(row, tree)])


BRANCHES = tree_of((8, ROOT), (3, ROOT), (9, 1), (5, 1), (6, 0), (7, 3), (5, 0))
"""Under the anchor 8 and 3; 3 is right, and behind it 5 and then 7. The kept path is 1, 3, 5."""
KEPT = [1, 3, 5]


def branch_logits() -> torch.Tensor:
    """The anchor and the nodes of BRANCHES: TRUTH along the path, and token 0 elsewhere."""
    logits = torch.zeros(1 + len(BRANCHES), VOCAB)
    logits[:, 0] = 1.0
    for row, token_id in zip([0, *(1 + node for node in KEPT)], TRUTH, strict=False):
        logits[row, token_id] = 2.0
    return logits


@pytest.mark.parametrize("params", CHOOSERS, ids=str)
def test_the_walk_takes_the_branch_that_the_target_chooses(params: dict[str, Any]) -> None:
    row = make_row(**params)
    before = copy.deepcopy(row.sequence)
    # At a temperature near 0 the largest logit wins, however close the others are.
    (verdict,) = verify(tree_plan(row, BRANCHES), 100.0 * branch_logits())
    assert verdict == Verdict(TRUTH[:4], KEPT)
    assert verdict.num_accepted == 3
    for name in ("token_ids", "num_cached", "output_counts", "finish_reason"):
        assert getattr(row.sequence, name) == getattr(before, name)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, (TRUTH[:4], KEPT)),
        (1, ([3, 2], [1])),
        (0, (TRUTH[:4], KEPT)),
        (2, (TRUTH[:4], KEPT)),
        (5, ([3, 5, 7, 2], KEPT)),
        (ROOT, ([2], [])),
    ],
)
def test_only_choices_on_the_path_count(
    node: int | None, expected: tuple[list[int], list[int]]
) -> None:
    """Behind `node` the target wants 2, which is no candidate."""
    logits = branch_logits()
    if node is not None:
        logits[1 + node, 2] = 9.0
    (verdict,) = verify(tree_plan(make_row(), BRANCHES), logits)
    assert (verdict.token_ids, verdict.nodes) == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("params", CHOOSERS, ids=str)
@pytest.mark.parametrize("node", range(-1, len(BRANCHES)))
def test_a_sibling_without_numbers_costs_nothing(node: int, params: dict[str, Any]) -> None:
    logits = 100.0 * branch_logits()
    logits[1 + node, 4] = math.nan
    (verdict,) = verify(tree_plan(make_row(**params), BRANCHES), logits)
    if node in (ROOT, *KEPT):
        depth = [ROOT, *KEPT].index(node)
        assert (verdict.token_ids, verdict.nodes) == (TRUTH[:depth], KEPT[:depth])
        assert f"position {4 + depth} are not numbers" in str(verdict.error)
    else:
        assert verdict == Verdict(TRUTH[:4], KEPT)


@pytest.mark.parametrize("cached", [3, 1])
def test_of_a_tree_the_kept_path_enters_the_caches(cached: int) -> None:
    recorder, row = Recorder(), make_row(cached=cached)
    output = commit_plan(tree_plan(row, BRANCHES), branch_logits(), recorder)
    num_new = 4 - cached
    assert row.sequence.token_ids == [2, 2, 2, 1, 3, 5, 7, 9]
    assert row.sequence.num_cached == 7
    assert recorder.calls == [
        ("keep", 8, 7, KEPT),
        (
            "committed",
            8,
            cached,
            [2, 2, 2, 1, 3, 5, 7][cached:],
            # Of the new tokens, and of the path: not of what stands between its nodes.
            [float(i) for i in range(num_new)] + [float(num_new + node) for node in KEPT],
        ),
        ("publish", 8, [2, 2, 2, 1, 3, 5, 7, 9], 7),
    ]
    assert (output.token_ids, output.num_kept) == ([3, 5, 7, 9], 4)
    assert (output.num_drafted, output.num_accepted) == (len(BRANCHES), 3)
    # 8 and 9 are the first children of their parents.
    assert output.num_siblings_kept == 2


@pytest.mark.parametrize(
    ("params", "num_kept", "reason"),
    [
        ({"stop_ids": frozenset({3})}, 1, "stop"),
        ({"stop_ids": frozenset({5})}, 2, "stop"),
        ({"stop_ids": frozenset({9})}, 4, "stop"),
        ({"max_tokens": 4}, 3, "length"),
        ({"scan_stop": lambda token_id: token_id == 5}, 2, "stop"),
    ],
)
def test_a_path_is_cut_where_the_sequence_ends(
    params: dict[str, Any], num_kept: int, reason: str
) -> None:
    recorder, row = Recorder(), make_row(logprobs=1, **params)
    output = commit_plan(tree_plan(row, BRANCHES), branch_logits(), recorder)
    assert output.token_ids == TRUTH[:num_kept]
    assert [entry.top[0][0] for entry in output.logprobs] == output.token_ids
    assert output.finish_reason == row.sequence.finish_reason == reason
    # What the target agreed with behind the cut does not count.
    assert (output.num_drafted, output.num_accepted) == (len(BRANCHES), min(num_kept, 3))
    in_cache = KEPT[: num_kept - 1]
    committed = (
        "committed",
        8,
        3,
        [1, *TRUTH[: num_kept - 1]],
        [0.0, *(1.0 + n for n in in_cache)],
    )
    assert recorder.calls[0] == ("keep", 8, 4 + len(in_cache), in_cache)
    assert recorder.calls[1] == committed
    assert recorder.calls[2] == ("publish", 8, row.sequence.token_ids, 4 + len(in_cache))


class AlongThePath:
    """A grammar that forbids two tokens, depending on all tokens so far; it must see the path."""

    def __init__(self, expected: list[int] | None = None) -> None:
        self.expected = expected

    def allowed(self, output_ids: list[int], ahead: list[int]) -> Any:
        ahead = list(ahead)
        assert self.expected is None or ahead == self.expected[: len(ahead)], "not the path"
        mask = np.ones(VOCAB, dtype=bool)
        mask[[(sum(output_ids) + sum(ahead)) % VOCAB, len(output_ids) + len(ahead)]] = False
        return mask


WALKS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.8, "min_tokens": 5},
    {"grammar": GRAMMAR},
    {"grammar": GRAMMAR, "temperature": 1.0, "seed": 7},
)


def sequence_of(index: int, params: dict[str, Any]) -> Sequence:
    sequence = make_row(key=index, logprobs=2, **params).sequence
    sequence.sample_index, sequence.seed = index, params.get("seed", 0)
    if "grammar" in params:
        sequence.constraint = AlongThePath()
    return sequence


def one_by_one(target: TableTarget, sequence: Sequence, num: int) -> list[Verdict]:
    """Plain decoding of a copy."""
    sequence, verdicts = copy.deepcopy(sequence), []
    for _ in range(num):
        plan = ForwardPlan(
            [PlannedRow(Row(sequence, sequence.token_ids[sequence.num_cached :], 0))]
        )
        (verdict,) = verify(plan, target.forward(plan).logits)
        target.keep(plan.rows[0], [])
        sequence.append(verdict.token_ids[0])
        sequence.num_cached += 1
        verdicts.append(verdict)
    target.close(sequence.key)
    return verdicts


@pytest.mark.parametrize("params", WALKS, ids=str)
def test_the_walk_over_a_tree_is_plain_decoding(params: dict[str, Any]) -> None:
    """The tokens, and the log-probabilities one a token, are those of one token at a time."""
    target, draw = TableTarget.random(VOCAB, seed=3), random.Random(1)
    depths = set()
    num_siblings = 0
    for index in range(40):
        sequence = sequence_of(index, params)
        target.cached[sequence.key] = [2] * 3
        plain = one_by_one(target, sequence, 6)
        truth = [verdict.token_ids[0] for verdict in plain]
        tree = tree_around(truth[:5], draw, draw.randint(1, 12), VOCAB)
        if "grammar" in params:
            sequence.constraint = AlongThePath(truth)
        target.cached[sequence.key] = [2] * 3
        plan = tree_plan(Row(sequence, [1], 12), tree)
        (verdict,) = verify(plan, target.forward(plan).logits)
        nodes: list[int] = []
        while (child := tree.child(nodes[-1] if nodes else ROOT, truth[len(nodes)])) is not None:
            nodes.append(child)
        assert verdict.nodes == nodes
        assert verdict.token_ids == truth[: len(nodes) + 1]
        assert verdict.logprobs == [one.logprobs[0] for one in plain[: len(nodes) + 1]]
        depths.add(len(nodes))
        num_siblings += sum(tree.ranks[node] > 0 for node in nodes)
    assert {0, 1, 2, 3} <= depths
    assert num_siblings > 5


def test_siblings_share_the_noise_of_their_position() -> None:
    tree = tree_of((1, ROOT), (2, ROOT), (3, 0), (3, 1), (4, 0), (5, 2), (6, 3))
    logits = torch.zeros(1 + len(tree), VOCAB)
    by_depth: dict[int, set[int]] = {}
    for index in range(30):
        sequence = sequence_of(index, {"temperature": 1.0, "seed": 1})
        (choice_at,) = choose_module.choose([Walk.tree(logits, sequence, tree)])
        choices = [choice_at(row) for row in range(1 + len(tree))]
        for depth in range(4):
            at_depth = {
                choice for choice, d in zip(choices, (0, *tree.depths), strict=True) if d == depth
            }
            assert len(at_depth) == 1
            by_depth.setdefault(depth, set()).update(at_depth)
    assert all(len(found) > 5 for found in by_depth.values())


def test_each_tree_of_a_batch_gets_its_own_logits() -> None:
    """Trees, a chain, a prompt and a row without candidates, packed row after row."""
    prompt = make_row(key=4, num_prompt=9, cached=2, output=()).sequence
    rows = [
        planned_tree(make_row(key=0), BRANCHES),
        PlannedRow(Row(prompt, prompt.token_ids[2:5], 0, is_prompt=True)),
        PlannedRow(make_row(key=1), Proposal.chain([3, 5, 0], "test")),
        planned_tree(make_row(key=2, temperature=1e-3, seed=2), BRANCHES),
        PlannedRow(make_row(key=3)),
    ]
    own = [
        branch_logits(),
        make_logits(0),
        make_logits(4),
        100.0 * branch_logits(),
        make_logits(1),
    ]
    verdicts = verify(ForwardPlan(rows), torch.cat(own))
    assert [v.token_ids for v in verdicts] == [TRUTH[:4], [], [3, 5, 7], TRUTH[:4], [3]]
    assert [v.nodes for v in verdicts] == [KEPT, [], [0, 1], KEPT, []]
    for planned, logits, verdict in zip(rows, own, verdicts, strict=True):
        assert verify(ForwardPlan([planned]), logits) == [verdict]
