"""Whatever trees are proposed, output has the bits of plain decoding; planted faults are caught.

The proposed trees grow around the known answer: right tokens come after wrong siblings, wrong
branches go on, and some trees miss the answer.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdraft.cache.kv import KVCache
from blockdraft.cache.memory import Memory
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.plan import PlannedRow, Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.engine.engine import Engine
from blockdraft.models.target.interface import Target
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.none import NoDrafter
from tests.batched import Request, run_alone, run_batched
from tests.fakes import PagedTableTarget, TableTarget
from tests.parity import faults
from tests.parity.checks import Generated, check_drafted_equals_plain, generate
from tests.parity.targets import WAYS, Way, make_target
from tests.tiny import KINDS, LAYER_IDS, VOCAB_SIZE, tiny_target
from tests.trees import TreeDrafter

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
PARAMS = {
    "greedy": SamplingParams(max_tokens=32, logprobs=2),
    "sampled": SamplingParams(max_tokens=32, logprobs=2, temperature=1.0, seed=11),
    "penalties": SamplingParams(
        max_tokens=32, logprobs=1, temperature=0.8, seed=5, repetition_penalty=1.2, top_p=0.9
    ),
}


def check_trees(target: Target, params: SamplingParams, prompt: Ids[int] = PROMPT) -> Generated:
    """Output equals plain decoding, log-probabilities bit for bit, and the trees were of use."""
    result = check_drafted_equals_plain(target, TreeDrafter(seed=3), prompt, params)
    assert result.acceptance.num_passes < result.acceptance.num_tokens
    return result


@pytest.mark.parametrize("name", PARAMS)
def test_trees_on_a_table(name: str) -> None:
    target = TableTarget.random(VOCAB_SIZE)
    for seed in range(8):
        params = replace(PARAMS[name], max_tokens=80, seed=seed)
        acceptance = check_trees(target, params, [1 + seed, 2]).acceptance
        assert not target.cached
        # First children and others, at several depths, were drafted and kept.
        assert {(0, 0), (0, 1), (1, 0), (1, 1)} <= acceptance.accepted_at.keys()
        assert all(acceptance.drafted_at[place] > kept for place, kept in _kept(acceptance))
        assert acceptance.num_drafted == sum(n * d for (d, _), n in acceptance.outcomes.items())
        assert acceptance.num_accepted == sum(n * a for (_, a), n in acceptance.outcomes.items())
        assert acceptance.num_accepted == sum(acceptance.accepted.values())
        assert 0.0 < acceptance.per_rank[1] < 1.0


def _kept(acceptance: Any) -> list[tuple[tuple[int, int], int]]:
    places = ((0, 0), (0, 1), (1, 0), (1, 1))
    return [(place, acceptance.accepted_at[place]) for place in places]


def test_trees_end_where_the_answer_ends() -> None:
    """At a stop token in the middle of a path, and at the most tokens, to the last one."""
    target = TableTarget.random(VOCAB_SIZE)
    plain = generate(target, NoDrafter(), PROMPT, PARAMS["greedy"]).token_ids
    in_path = 0
    for token_id in dict.fromkeys(plain):
        params = replace(PARAMS["greedy"], stop_token_ids=(token_id,))
        result = check_drafted_equals_plain(target, TreeDrafter(seed=3), PROMPT, params)
        assert result.finish_reason == "stop"
        # More was accepted than there are tokens.
        in_path += result.acceptance.num_accepted + result.acceptance.num_passes > len(
            result.token_ids[1:]
        )
    assert in_path > 3
    for num in (3, 5, 17):
        params = replace(PARAMS["sampled"], max_tokens=num)
        result = check_drafted_equals_plain(target, TreeDrafter(), PROMPT, params)
        assert result.finish_reason == "length"


def test_a_target_that_takes_no_trees_verifies_their_first_path() -> None:
    target = PagedTableTarget(TableTarget.random(VOCAB_SIZE).table, Pages(9))
    acceptance = check_trees(target, PARAMS["greedy"]).acceptance
    assert {rank for _, rank in acceptance.drafted_at} == {0}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_trees_on_a_model(way: Way, kind: str, name: str) -> None:
    with make_target(way, tiny_target(kind)).released_after() as target:
        # The answer begins in one page and ends in the next.
        acceptance = check_trees(target, PARAMS[name], PROMPT * 6).acceptance
        assert any(rank for _, rank in acceptance.accepted_at)
        if isinstance(target, SequentialTarget):
            assert not target._caches
            assert not target._node_kv
        else:
            target.memory.check_integrity()
            assert target.memory.num_available == target.memory.num_pages - 1


def batched_requests() -> list[Request]:
    draw = random.Random(7)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "repetition_penalty": 1.2},
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 3},
        {"presence_penalty": 0.5},
    ]
    return [
        Request(
            tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 30, 55, 61)))),
            SamplingParams(
                max_tokens=draw.randint(8, 24), seed=index, logprobs=1, **options[index % 6]
            ),
            arrival=index,
        )
        for index in range(9)
    ]


TARGETS: dict[str, Callable[[], Any]] = {
    "table": lambda: TableTarget.random(VOCAB_SIZE),
    "model": lambda: SequentialTarget(tiny_target()),
    "pages": lambda: PagedTarget(tiny_target(), Pages(17)),
    "few pages": lambda: PagedTarget(tiny_target(), Pages(4)),
}


@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
def test_trees_of_many_requests(make: Callable[[], Target]) -> None:
    """Each has its lone plain run's tokens, and so have those left when others are taken away."""
    target, requests = make(), batched_requests()
    expected = run_alone(target, requests)
    known = [answer.token_ids for answer in expected]
    batched = run_batched(target, TreeDrafter(), requests, known=known, prefill_chunk=40)
    assert (
        type(target.memory) is Memory
        or target.memory.num_pages > 4
        or (batched.engine.scheduler.num_preempted > 0)
    )
    assert batched.answers == expected
    assert batched.engine.proposer.failures.num_failures == 0
    assert any(rank for answer in batched.answers for _, rank in answer.acceptance.accepted_at)

    drafter, draw = TreeDrafter(), random.Random(1)
    engine = Engine(target, drafter, max_running=4)
    keys = [engine.add(request.prompt, request.params) for request in requests]
    drafter.known = dict(zip(keys, known, strict=True))
    left = dict(zip(keys, known, strict=True))
    num_aborted = 0
    while engine.has_work:
        engine.step()
        if len(left) > 5 and draw.random() < 0.5:
            key = draw.choice(sorted(left))
            output_ids = engine.take(key).sequence.output_ids
            assert output_ids == left.pop(key)[: len(output_ids)]
            num_aborted += 1
    assert num_aborted == 4
    for key, tokens in left.items():
        assert engine.take(key).sequence.output_ids == tokens
    assert engine.proposer.failures.num_failures == 0


class FeatureKeeper(TreeDrafter):
    """Keeps the features of each position as they were committed."""

    feature_layers = LAYER_IDS

    def __init__(self, *, drafts: bool) -> None:
        super().__init__(seed=3)
        self.drafts = drafts
        self.features: list[Tensor] = []

    def propose(self, rows: Ids[Row]) -> list[Proposal]:
        if self.drafts:
            return super().propose(rows)
        return [Proposal.chain([], self.kind) for _ in rows]

    def committed(self, row: Row, token_ids: Ids[int], features: Tensor | None) -> None:
        assert features is not None
        start = row.sequence.num_cached
        assert list(token_ids) == row.sequence.token_ids[start : start + len(token_ids)]
        assert len(self.features) == start
        assert len(features) == len(token_ids)
        self.features += list(features)


def check_features(way: Way, kind: str) -> None:
    """The drafter gets of each committed token the features of plain decoding, bit for bit."""
    with make_target(way, tiny_target(kind)).released_after() as target:
        if isinstance(target, PagedTarget):
            target.memory.reuse = False  # what is taken over has no features
        plainly, drafted = FeatureKeeper(drafts=False), FeatureKeeper(drafts=True)
        plain = generate(target, plainly, PROMPT, PARAMS["sampled"])
        found = generate(target, drafted, PROMPT, PARAMS["sampled"], known=plain.token_ids)
    assert found == plain
    assert any(rank for _, rank in found.acceptance.accepted_at)
    num = min(len(plainly.features), len(drafted.features))
    assert num >= len(PROMPT) + len(plain.token_ids) - 1
    for position in range(num):
        same = torch.equal(plainly.features[position], drafted.features[position])
        assert same, f"other features at position {position}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_features_of_the_kept_path_are_those_of_plain_decoding(way: Way, kind: str) -> None:
    check_features(way, kind)


def check_reuse() -> None:
    """Whoever goes on where a request ended takes over pages that its trees have filled."""
    target, prompt = PagedTarget(tiny_target(), Pages(17)), [*PROMPT * 6, 7, 7]
    plain_target = SequentialTarget(tiny_target())
    with target.released_after(), plain_target.released_after():
        for seed in range(16):
            params = SamplingParams(max_tokens=40, seed=seed, temperature=1.0)
            future = generate(plain_target, NoDrafter(), prompt, params).token_ids
            # The last token but one fills the page; trees go on behind it.
            first = future[: PAGE_SIZE + 1 - len(prompt)]
            if first[-1] in first[:-1]:
                continue
            params = replace(params, stop_token_ids=(first[-1],))
            found = generate(target, TreeDrafter(seed), prompt, params, known=future)
            assert found.token_ids == first
            behind = [*prompt, *first, 5]
            params = SamplingParams(max_tokens=8, logprobs=0)
            num_reused = target.memory.num_reused_tokens
            again = generate(target, NoDrafter(), behind, params)
            assert target.memory.num_reused_tokens == num_reused + PAGE_SIZE
            plain = generate(plain_target, NoDrafter(), behind, params)
            assert again == plain, "another answer behind a page that was taken over"


def test_pages_that_trees_have_filled_are_reused() -> None:
    check_reuse()


# Planted faults.


def sibling_stays_visible() -> AbstractContextManager[object]:
    """Between two paths the first node of the one before stays in the cache."""
    truncate, run_paths = KVCache.truncate, SequentialTarget._run_paths

    def leaking(target: SequentialTarget, cache: KVCache, planned: PlannedRow) -> Any:
        base = cache.length + len(planned.row.new_ids)

        def leaky(cache: KVCache, length: int) -> None:
            truncate(cache, min(length + (length == base), cache.length))

        with patch.object(KVCache, "truncate", leaky):
            return run_paths(target, cache, planned)

    return patch.object(SequentialTarget, "_run_paths", leaking)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("nodes", [faults.other_branch, faults.in_wrong_order])
@pytest.mark.parametrize("make", list(TARGETS.values())[:3], ids=list(TARGETS)[:3])
def test_the_check_finds_other_nodes_kept(
    make: Callable[[], Target], nodes: faults.Nodes, name: str
) -> None:
    target = make()
    with (
        faults.keeping(type(target), nodes),
        pytest.raises(AssertionError, match="drafted differs from plain"),
    ):
        check_trees(target, PARAMS[name])


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_the_check_finds_a_sibling_in_the_cache(name: str) -> None:
    with (
        SequentialTarget(tiny_target()).released_after() as target,
        sibling_stays_visible(),
        pytest.raises(AssertionError, match="drafted differs from plain"),
    ):
        check_trees(target, PARAMS[name])


@pytest.mark.parametrize("way", WAYS)
def test_the_check_finds_features_of_the_wrong_branch(way: Way) -> None:
    """The first positions of the row, as if its tree were a chain."""

    def kept_positions(planned: PlannedRow, nodes: Ids[int]) -> list[int]:
        return list(range(len(planned.row.new_ids) + len(nodes)))

    with (
        patch.object(PlannedRow, "kept_positions", kept_positions),
        pytest.raises(AssertionError, match="other features"),
    ):
        check_features(way, "llama")


def test_the_check_finds_a_path_left_where_it_was_when_a_request_ends() -> None:
    real = PagedTarget.keep

    def keep(target: PagedTarget, planned: PlannedRow, nodes: Ids[int]) -> None:
        if planned.row.sequence.finish_reason is None:
            real(target, planned, nodes)

    with (
        patch.object(PagedTarget, "keep", keep),
        pytest.raises(AssertionError, match="another answer behind a page"),
    ):
        check_reuse()
