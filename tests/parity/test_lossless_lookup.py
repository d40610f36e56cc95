"""Whatever is looked up or predicted, output has the bits of plain decoding; faults are caught."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from blockdraft.allocation.policy import Asked, VerifyAll
from blockdraft.cache.pages import Pages
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.engine.engine import Engine
from blockdraft.models.target.interface import Target
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate import merge as merge_module
from blockdraft.speculate import proposer as proposer_module
from blockdraft.speculate.drafters.lookup import LookupDrafter
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.drafters.prediction import Follower, PredictionDrafter
from tests.batched import Request, run_alone, run_batched
from tests.fakes import ConstantDrafter, NoisyOracleDrafter, PagedTableTarget, TableTarget
from tests.parity.checks import Generated, generate, generate_plain
from tests.parity.lookups import changed, check_read, free_drafters
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.sources import num_accepted_by, num_drafted_by
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target

PARAMS = {
    "greedy": SamplingParams(max_tokens=40, logprobs=1),
    "sampled": SamplingParams(max_tokens=40, logprobs=1, temperature=0.7, seed=3),
    "penalties": SamplingParams(
        max_tokens=40, logprobs=1, temperature=0.8, seed=5, presence_penalty=-1.0, top_p=0.9
    ),
}
SHAPES = {"chains": 0, "trees": 24}


def repetitive_table(seed: int = 0) -> TableTarget:
    """A target that says the same again and again, but not always."""
    generator = torch.Generator().manual_seed(seed)
    return TableTarget(2.5 * torch.randn((12,) * 3, generator=generator))


def run_checked(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        check_read(engine)


def decode(
    target: Target,
    drafter: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    prediction: Sequence[int] = (),
    *,
    num_nodes: int = 0,
    known: list[int] | None = None,
) -> Generated:
    engine_options: dict[str, Any] = {"free_drafters": free_drafters()}
    with patch.object(Engine, "__init__", _with_trees(Engine.__init__, num_nodes)):
        return generate(
            target,
            drafter,
            prompt,
            params,
            known=known,
            engine_options=engine_options,
            after_step=lambda engine, _: check_read(engine),
            prediction_ids=prediction,
        )


def _with_trees(init: Callable[..., None], num_nodes: int) -> Callable[..., None]:
    def wrapped(engine: Engine, *args: Any, **options: Any) -> None:
        init(engine, *args, **options)
        if num_nodes:
            engine.use_fixed_drafting(num_nodes)

    return wrapped


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_nodes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PARAMS)
def test_lookup_and_predictions_on_a_table(name: str, num_nodes: int) -> None:
    target, draw = repetitive_table(), random.Random(1)
    sources: set[str] = set()
    for seed in range(6):
        params = replace(PARAMS[name], max_tokens=150, seed=seed)
        prompt = [draw.randrange(12) for _ in range(30)]
        plain = generate_plain(target, prompt, params)
        prediction = changed(plain.token_ids, draw) if seed % 2 else ()
        drafters = (NoDrafter(), NoisyOracleDrafter(5, 12, chance=0.6, seed=seed))
        for drafter in drafters:
            found = decode(
                target,
                drafter,
                prompt,
                params,
                prediction,
                num_nodes=num_nodes,
                known=plain.token_ids,
            )
            assert found == plain
            assert found.acceptance.acceptance_length > 1.1
            sources |= set(found.acceptance.accepted_by)
            drafted = found.acceptance.drafted_at
            assert any(rank for _, rank in drafted) <= bool(num_nodes)
    assert {"lookup", "prediction", "fake"} <= {
        one for source in sources for one in source.split("+")
    }
    assert any("+" in source for source in sources)


@pytest.mark.parametrize("num_nodes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(2)
def test_lookup_and_predictions_beside_dflash(way: Way, name: str, num_nodes: int) -> None:
    with make_target(way, tiny_target()).released_after() as target:
        prompt, draw = [3, 1, 4, 1, 5, 9, 2, 6] * 4, random.Random(2)
        plain = generate_plain(target, prompt, PARAMS[name])
        drafter = make_dflash(target, tiny_drafter())
        prediction = changed(plain.token_ids, draw)
        found = decode(target, drafter, prompt, PARAMS[name], prediction, num_nodes=num_nodes)
        assert found == plain
        assert num_accepted_by(found.acceptance, "prediction") > 5


def batched_requests() -> list[Request]:
    draw = random.Random(5)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 2},
        {"drafters": ("lookup",)},
        {"drafters": ()},
    ]
    return [
        Request(
            tuple(draw.randrange(12) for _ in range(draw.choice((1, 40, 70)))),
            SamplingParams(max_tokens=40, seed=index, logprobs=0, **options[index % 6]),
            arrival=index,
        )
        for index in range(12)
    ]


def plainly(requests: Sequence[Request]) -> list[Request]:
    """The same of an engine that has no drafters to choose from."""
    return [replace(one, params=replace(one.params, drafters=())) for one in requests]


@pytest.mark.parametrize("num_pages", [0, 5])
def test_many_requests_with_preemption(num_pages: int) -> None:
    table = repetitive_table()
    target = PagedTableTarget(table.table, Pages(num_pages)) if num_pages else table
    requests = batched_requests()
    expected = run_alone(target, plainly(requests))
    batched = run_batched(
        target,
        ConstantDrafter(4, 7),
        requests,
        after_step=check_read,
        free_drafters=free_drafters(),
        prefill_chunk=40,
    )
    assert batched.answers == expected
    assert bool(batched.engine.scheduler.num_preempted) == bool(num_pages)
    assert batched.engine.proposer.failures.num_failures == 0
    by = [answer.acceptance.drafted_by for answer in batched.answers]
    assert all(not by[index] for index in (2, 5, 8, 11)), "plain decoding drafts nothing"
    assert all(set(by[index]) <= {"lookup"} for index in (4, 10))
    assert sum(own["lookup"] for own in by) > 0
    for drafter in batched.engine.proposer.free:
        if isinstance(drafter, LookupDrafter):
            assert not drafter._searched
            assert not drafter._samples


def test_pages_with_lookup_alone_are_given_back() -> None:
    target, requests = PagedTarget(tiny_target(), Pages(5)), batched_requests()[:6]
    with target.released_after():
        expected = run_alone(target, plainly(requests))
        batched = run_batched(target, NoDrafter(), requests, free_drafters=free_drafters())
        assert batched.answers == expected
        target.memory.check_integrity()


# What goes wrong in one drafter.


class Broken(LookupDrafter):
    """Fails for one sequence in some method."""

    def __init__(self, method: str, key_of: list[int]) -> None:
        super().__init__()
        self.method, self.keys = method, key_of

    def _meet(self, method: str, row: Row) -> None:
        if method == self.method and row.sequence.key in self.keys:
            raise RuntimeError("boom")

    def open(self, row: Row, num_reused: int) -> None:
        self._meet("open", row)
        super().open(row, num_reused)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        for row in rows:
            self._meet("propose", row)
        found = super().propose(rows)
        if self.method == "foreign token":
            return [
                Proposal.chain([VOCAB_SIZE * 9], "lookup") if row.sequence.key in self.keys else own
                for row, own in zip(rows, found, strict=True)
            ]
        return found

    def committed(self, row: Row, token_ids: Sequence[int], features: Any) -> None:
        self._meet("committed", row)


@pytest.mark.parametrize("method", ["open", "propose", "committed", "foreign token"])
def test_a_drafter_that_fails_costs_its_own_proposals_only(method: str) -> None:
    target, keys = repetitive_table(), []
    params = SamplingParams(max_tokens=60)
    prompts = [[1, 2], [3, 4], [5, 6]]
    expected = [generate_plain(target, prompt, params) for prompt in prompts]
    model = NoisyOracleDrafter(4, 12, chance=0.8)
    engine = Engine(target, model, free_drafters=[Broken(method, keys)])
    added = [engine.add(prompt, params) for prompt in prompts]
    keys.append(added[1])
    model.known = {key: plain.token_ids for key, plain in zip(added, expected, strict=True)}
    while engine.has_work:
        engine.step()
    assert engine.proposer.failures.num_failures > 0
    for index, (key, plain) in enumerate(zip(added, expected, strict=True)):
        record = engine.take(key)
        assert record.sequence.output_ids == plain.token_ids
        assert record.sequence.error is None
        assert num_accepted_by(record.acceptance, "fake") > 0
        assert bool(num_drafted_by(record.acceptance, "lookup")) == (index != 1)


class AsksNowAndThen(VerifyAll):
    """Has what needs no model proposed in one step of three."""

    num_steps = 0

    def ask(self, num_sequences: int) -> Asked:
        self.num_steps += 1
        return Asked(free=self.num_steps % 3 == 0)


@pytest.mark.parametrize("name", PARAMS)
def test_free_drafters_need_not_be_asked_in_every_step(name: str) -> None:
    target, params = repetitive_table(), replace(PARAMS[name], max_tokens=150)
    prompt = [1, 2, 3, 4] * 6
    plain = generate_plain(target, prompt, params)
    engine = Engine(target, NoDrafter(), free_drafters=free_drafters())
    engine.allocator.policy = policy = AsksNowAndThen()
    key = engine.add(prompt, params, prediction_ids=plain.token_ids)
    run_checked(engine)
    record = engine.take(key)
    assert tuple(record.sequence.output_ids) == tuple(plain.token_ids)
    assert record.acceptance.num_accepted > 0
    assert policy.num_steps > 20


# Planted faults.


class ReadsRejected(LookupDrafter):
    """Reads what it has proposed itself, kept or not."""

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        found = super().propose(rows)
        for row, proposal in zip(rows, found, strict=True):
            searched = self._searched[row.sequence]
            searched.see(proposal.tree.tokens)
            searched.num_seen -= len(proposal)
        return found


def test_the_check_finds_a_lookup_that_reads_rejected_tokens() -> None:
    target = repetitive_table()
    engine = Engine(target, NoDrafter(), free_drafters=[ReadsRejected()])
    engine.add([1, 2, 3] * 4, SamplingParams(max_tokens=60))
    with pytest.raises(AssertionError, match="other tokens were read"):
        run_checked(engine)


def test_the_check_finds_a_pointer_beyond_the_prediction() -> None:
    def find(follower: Follower, token_id: int) -> None:
        follower.run, follower.place = 0, follower.place + 1

    target = repetitive_table()
    engine = Engine(target, NoDrafter(), free_drafters=[PredictionDrafter()])
    engine.add([1, 2, 3], SamplingParams(max_tokens=60), prediction_ids=[11, 10])
    with patch.object(Follower, "_find", find), pytest.raises(AssertionError, match="beyond"):
        run_checked(engine)


def check_merged(proposals: Sequence[Proposal], merged: Proposal) -> None:
    """Every path of the merged proposal was proposed by somebody."""
    proposed = {_path(own, node) for own in proposals for node in range(len(own))}
    found = {_path(merged, node) for node in range(len(merged))}
    assert found <= proposed, "a path that nobody has proposed"


def _path(proposal: Proposal, node: int) -> tuple[int, ...]:
    return tuple(proposal.tree.tokens[i] for i in proposal.tree.path(node))


def run_merging() -> None:
    """Decode with trees of several drafters; each merge is checked."""
    target, params = repetitive_table(), SamplingParams(max_tokens=80)
    prompt = [1, 2, 3, 4] * 3
    plain = generate_plain(target, prompt, params).token_ids
    model = NoisyOracleDrafter(5, 12, chance=0.5)
    engine = Engine(target, model, free_drafters=free_drafters())
    engine.use_fixed_drafting(24)
    real, num = proposer_module.merge, 0

    def merging(proposals: Sequence[Proposal], num_nodes: int) -> Proposal:
        nonlocal num
        merged = real(proposals, num_nodes)
        check_merged(proposals, merged)
        num += 1
        return merged

    model.known[engine.add(prompt, params, prediction_ids=plain[::2])] = plain
    with patch.object(proposer_module, "merge", merging):
        while engine.has_work:
            engine.step()
    assert num > 3


def test_merged_paths_are_those_that_were_proposed() -> None:
    run_merging()


def test_the_check_finds_a_node_with_a_wrong_parent() -> None:
    real = merge_module._proposal

    def faulty(nodes: Any) -> Proposal:
        proposal = real(nodes)
        depths = proposal.tree.depths
        if max(depths, default=0) < 3:
            return proposal
        # The deepest node hangs on its grandparent.
        node = depths.index(max(depths))
        parents = list(proposal.tree.parents)
        parents[node] = parents[parents[node]]
        tokens = list(proposal.tree.tokens)
        if (parents[node], tokens[node]) in zip(parents[:node], tokens[:node], strict=True):
            return NOTHING
        tree = type(proposal.tree)(tuple(tokens), tuple(parents))
        return Proposal(tree, proposal.probabilities, proposal.sources)

    with (
        patch.object(merge_module, "_proposal", faulty),
        pytest.raises(AssertionError, match="nobody has proposed"),
    ):
        run_merging()
