"""EAGLE-3 proposes what its definition says, at every node; output is plain decoding's.

The definition is `tests.eagle.Reference`: one pair after another, in loops, from features that
transformers computes. A drafter that reads a prompt from memory must propose the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.plan import ROOT, Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.engine.engine import Engine
from blockdraft.models.draft import pair_contexts
from blockdraft.models.draft.eagle3_kernels import KernelEagle3
from blockdraft.models.draft.pair_contexts import PagedPairs
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters import eagle3
from blockdraft.speculate.drafters.eagle3 import Eagle3Drafter
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.reference import choose_row
from tests.batched import Request, run_alone, run_batched
from tests.eagle import Reference, make_model
from tests.parity.checks import check_drafted_equals_plain, generate, plain_features, run
from tests.parity.proposals import Fault, in_trees
from tests.parity.targets import WAYS, Way, make_eagle, make_target
from tests.small_llm import check_grammar, load_llm
from tests.tiny import (
    TEXT_VOCAB_SIZE,
    VOCAB_SIZE,
    tiny_target,
    tiny_target_folder,
)

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
LONG = tuple((7 * i * i + 3) % VOCAB_SIZE for i in range(2 * PAGE_SIZE + 9))
TREE = 12
PARAMS = {
    "greedy": SamplingParams(max_tokens=24, logprobs=2),
    "sampled": SamplingParams(max_tokens=24, logprobs=2, temperature=1.0, seed=11),
    "filters": SamplingParams(max_tokens=24, temperature=0.8, seed=2, top_p=0.9, top_k=20),
    "penalties": SamplingParams(
        max_tokens=24, logprobs=1, temperature=0.8, seed=5, repetition_penalty=1.2
    ),
}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Looking:
    """Compares proposals with the reference while an engine runs."""

    def __init__(self, target: SequentialTarget | PagedTarget, drafter: Eagle3Drafter) -> None:
        self._target, self._drafter = target, drafter
        self._reference = Reference(drafter.model, target.model.get_input_embeddings().weight)
        self._propose = drafter.propose
        self.num_nodes = self.num_branches = 0
        self._shown: Tensor | None = None
        drafter.watch = self._watch
        drafter.propose = self._compare  # type: ignore[method-assign]

    def _watch(self, rows: list[Row], logits: Tensor) -> None:
        self._shown = logits

    def _compare(self, rows: Sequence[Row]) -> list[Proposal]:
        found: list[Proposal] = []
        for row in rows:
            (proposal,) = self._propose([row])
            self._look(row, proposal)
            found.append(proposal)
        # And all of them together, as they were one by one.
        for own, proposal in zip(self._propose(rows), found, strict=True):
            assert own.tree == proposal.tree
            np.testing.assert_allclose(own.probabilities, proposal.probabilities, rtol=1e-3)
        return found

    def _look(self, row: Row, proposal: Proposal) -> None:
        sample, tree = row.sequence, proposal.tree
        known = sample.token_ids[: sample.num_cached]
        with torch.inference_mode():
            features = plain_features(self._target, known, self._drafter)[0]
            paths = {i: [tree.tokens[n] for n in tree.path(i)] for i in range(len(tree))}
            paths[ROOT] = []
            inner = set(tree.parents)
            behind = {
                node: self._reference.path_logits(sample.token_ids, features, paths[node])[-1]
                for node in inner
            }
            chain = [tree.tokens[node] for node in tree.through([])]
            along = self._reference.path_logits(sample.token_ids, features, chain[:-1])
        assert self._shown is not None
        if all(tree.ranks[node] == 0 for node in tree.through([])):
            shown = self._shown[0, : len(along)]
            torch.testing.assert_close(shown, along, **CLOSE)
        for node in range(len(tree)):
            parent = tree.parents[node]
            above = 1.0 if parent == ROOT else proposal.probabilities[parent]
            self._check_node(sample, paths[node], behind[parent], proposal, node, above)
        self.num_nodes += len(tree)
        self.num_branches += sum(rank > 0 for rank in tree.ranks)

    def _check_node(
        self,
        sample: Sample,
        path: list[int],
        logits: Tensor,
        proposal: Proposal,
        node: int,
        above: float,
    ) -> None:
        share = proposal.probabilities[node] / max(above, 1e-30)
        rank = proposal.tree.ranks[node]
        if sample.params.temperature == 0.0:
            best = logits.topk(rank + 1)
            expected = torch.softmax(logits, 0)
            assert share == pytest.approx(float(expected[path[-1]]), rel=1e-2, abs=1e-5)
            assert float(expected[path[-1]]) == pytest.approx(
                float(expected[best.indices[rank]]), rel=1e-2
            )
        elif rank == 0:
            scores = logits.numpy().astype(np.float32)
            place = Place(sample, len(path) - 1, path[:-1])
            if proposal.tree.is_chain:
                assert path[-1] == choose_row(scores, place)


def look_at(way: Way, params: SamplingParams, num_nodes: int | None, **fields: Any) -> Looking:
    """Run with every proposal compared; the output is plain decoding's."""
    with make_target(way, tiny_target()).released_after() as target:
        drafter = make_eagle(target, make_model(**fields))
        drafter.max_nodes = 4
        looking = Looking(target, drafter)
        found = generate(target, drafter, PROMPT, params, after_step=in_trees(num_nodes))
        drafter.watch = None
        assert found == generate(target, drafter, PROMPT, replace(params, num_draft_tokens=0))
    assert looking.num_nodes > 12
    return looking


SHAPES: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "head_norms": True},
    {"draft_vocab_size": VOCAB_SIZE},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fields", SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_node_is_what_the_reference_says(way: Way, fields: dict[str, Any]) -> None:
    few = replace(PARAMS["greedy"], max_tokens=8)
    assert not look_at(way, few, None, **fields).num_branches
    assert look_at(way, few, TREE, **fields).num_branches > 10


@pytest.mark.usefixtures("without_kernels")
def test_torchs_operations_say_the_same() -> None:
    few = replace(PARAMS["greedy"], max_tokens=6)
    look_at("paged", few, TREE, head_norms=True)
    look_at("paged", few, TREE, fc_norm=True, norm_output=True)


@pytest.mark.parametrize("way", WAYS)
def test_chains_are_drafted_with_the_noise_of_the_request(way: Way) -> None:
    look_at(way, replace(PARAMS["sampled"], max_tokens=8), None)
    look_at(way, replace(PARAMS["filters"], max_tokens=8), None)


@pytest.mark.parametrize("fields", [{}, {"norm_before_fc": True, "norm_output": True}], ids=str)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_output_is_that_of_plain_decoding(way: Way, name: str, fields: dict[str, Any]) -> None:
    with make_target(way, tiny_target()).released_after() as target:
        for num_nodes in (None, 60):
            if isinstance(target, PagedTarget):
                target.memory.on_forget = None  # the drafter before is forgotten
                target.memory.reuse = False
            drafter = make_eagle(target, make_model(**fields))
            result = check_drafted_equals_plain(
                target, drafter, LONG[:70], PARAMS[name], after_step=in_trees(num_nodes)
            )
            assert result.acceptance.num_drafted > 50
            assert not drafter._known


@pytest.mark.parametrize("way", WAYS)
def test_as_deep_as_pays(way: Way) -> None:
    """Costs are measured by depth, and whatever is chosen changes nothing."""
    with make_target(way, tiny_target()).released_after() as target:
        drafter = make_eagle(target, make_model())
        engine = Engine(target, drafter)
        engine.use_adaptive_drafting()
        assert not drafter._known
        key = engine.add(PROMPT, PARAMS["sampled"])
        run(engine)
        found = engine.take(key).sequence.output_ids
        assert engine.proposer.failures.num_failures == 0
        plain = replace(PARAMS["sampled"], num_draft_tokens=0)
        assert found == generate(target, drafter, PROMPT, plain).token_ids


def test_stops_and_single_tokens() -> None:
    """Prompts of one token, and ends in the middle of a draft."""
    with make_target("paged", tiny_target()).released_after() as target:
        drafter = make_eagle(target, make_model())
        plain = check_drafted_equals_plain(target, drafter, (5,), PARAMS["greedy"]).token_ids
        for token_id in dict.fromkeys(plain[2:9]):
            params = replace(PARAMS["greedy"], stop_token_ids=(token_id,))
            assert check_drafted_equals_plain(target, drafter, (5,), params).finish_reason == "stop"
        for num in (1, 2, 3, 9):
            check_drafted_equals_plain(
                target, drafter, (5,), replace(PARAMS["sampled"], max_tokens=num)
            )


def batched_requests() -> list[Request]:
    """Answers that go on behind the page where the prompt ends; some share a beginning."""
    names = list(PARAMS)
    return [
        Request(
            LONG[:61] if index % 2 else LONG[index : index + 59],
            replace(PARAMS[names[index % 4]], max_tokens=10 + index, seed=index),
            arrival=index // 3,
        )
        for index in range(6)
    ]


@pytest.mark.parametrize("num_pages", [33, 5])
@pytest.mark.parametrize("num_nodes", [None, TREE])
def test_several_requests_at_once(num_pages: int, num_nodes: int | None) -> None:
    """With pages for all, and so few that requests are sent away and begin again."""
    requests = batched_requests()
    with make_target("paged", tiny_target(), num_pages=num_pages).released_after() as target:
        assert isinstance(target, PagedTarget)
        expected = run_alone(target, requests)
        target.memory.reuse = True
        drafter = make_eagle(target, make_model())
        batched = run_batched(
            target,
            drafter,
            requests,
            after_step=lambda engine: engine.use_fixed_drafting(num_nodes),
            prefill_chunk=48,
        )
        assert batched.answers == expected
        assert batched.engine.proposer.failures.num_failures == 0
        assert (batched.engine.scheduler.num_preempted > 0) == (num_pages == 5)
        target.memory.check_integrity()
        assert not drafter._known
        assert isinstance(drafter.contexts, PagedPairs)
        assert not drafter.contexts._last


def test_a_grammar_is_followed(tmp_path: Any) -> None:
    folder = tmp_path / "drafter"
    make_model(vocab_size=TEXT_VOCAB_SIZE).save_pretrained(folder)
    llm = load_llm((tiny_target_folder(tmp_path), folder), num_draft_tokens=TREE)
    assert llm.engine.drafter.kind == "eagle3"
    assert check_grammar(llm).num_drafted


# A prompt from memory, gone on with in other ways.


def check_reuse() -> None:
    """Behind pages of others, every node is what the reference says."""
    shared = LONG[: 2 * PAGE_SIZE]
    endings = [(11, 12, 13), (50,), (11, 12, 60, 61, 62), (11,)]
    params = replace(PARAMS["greedy"], max_tokens=4)
    with make_target("paged", tiny_target()).released_after() as target:
        drafter = make_eagle(target, make_model())
        drafter.max_nodes = 3
        looking = Looking(target, drafter)
        engine = Engine(target, drafter)
        engine.use_fixed_drafting(TREE)
        for index, ending in enumerate(endings):
            # The first one never drafts, and leaves all its features waiting.
            asked = replace(params, max_tokens=1) if index == 0 else params
            key = engine.add([*shared, *ending], asked)
            reused = engine.progress[key]
            run(engine)
            assert reused.sequence.num_reused == (0 if index == 0 else len(shared))
            engine.take(key)
        assert engine.proposer.failures.num_failures == 0
    assert looking.num_nodes > 40


def test_a_prompt_from_memory_is_drafted_as_a_fresh_one() -> None:
    check_reuse()


# Planted faults, each of which one of the checks above must see.

SEEN = "drafter failed|num_failures"
"""What a proposal raises is dropped by the engine, and counted."""


def unshifted() -> AbstractContextManager[object]:
    """A feature is paired with its own token, not with the next."""
    return patch.object(pair_contexts, "shifted", lambda before, features: features)


def sibling_visible() -> AbstractContextManager[object]:
    """A node sees the others of its level."""
    eye = torch.eye

    def ones(*sizes: int, **options: Any) -> Tensor:
        return torch.ones_like(eye(*sizes, **options))

    return patch.object(eagle3.torch, "eye", ones)


def rows_as_tokens() -> AbstractContextManager[object]:
    """Rows of the head are taken for token ids: no d2t."""
    make = eagle3.Guessable
    return patch.object(eagle3, "Guessable", lambda size, ids: make(size, None))


def nobodys_feature() -> AbstractContextManager[object]:
    """The first token behind a page from memory is paired with the feature of another one."""
    begin = PagedPairs.begin

    def faulty(self: PagedPairs, key: int, num_reused: int) -> None:
        begin(self, key, num_reused)
        if num_reused:
            self._last[key] = self._ends[self.pages.page_ids(key)[0]].clone()

    return patch.object(PagedPairs, "begin", faulty)


def foreign_continuation() -> AbstractContextManager[object]:
    """A pair lies where its feature stands, so the last of a page has a foreign next token."""
    token_ids = PagedPairs.token_ids

    def faulty(self: PagedPairs, waiting: Any) -> list[int]:
        own = token_ids(self, waiting)
        return [*own[1:], own[-1]] if waiting.end % PAGE_SIZE == 0 else own

    return patch.object(PagedPairs, "token_ids", faulty)


def first_visible() -> AbstractContextManager[object]:
    """What lies at position 0, where no pair is, is looked at."""
    forwards = eagle3._Forwards
    init = forwards.__init__

    def faulty(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._sees = self._sees.clone()
        self._sees[..., 0] = True

    return patch.object(forwards, "__init__", faulty)


NORMS = {"norm_before_fc": True, "norm_output": True}


def without_input_norm(runs: Any) -> None:
    """The features enter `fc` as they are."""
    if isinstance(runs, KernelEagle3):
        runs._input_norm = None
    else:
        runs.input_norm = None


def raw_output(runs: Any) -> None:
    """What enters the next depth is the raw output; the head norms it, as always without this."""
    if isinstance(runs, KernelEagle3):
        runs._config = replace(runs._config, norm_output=False)
    else:
        runs.config = replace(runs.config, norm_output=False)


def normed_twice(runs: Any) -> None:
    """The head norms what is normed already."""
    logits = runs.logits
    runs.logits = lambda hidden: logits(F.rms_norm(hidden, hidden.shape[-1:]))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("fault", [without_input_norm, raw_output, normed_twice])
def test_faults_of_norms_are_seen(fault: Callable[[Any], None]) -> None:
    init = Eagle3Drafter.__init__

    def faulty(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        fault(self.runs)

    with (
        patch.object(Eagle3Drafter, "__init__", faulty),
        pytest.raises(AssertionError, match=SEEN),
    ):
        look_at("paged", replace(PARAMS["greedy"], max_tokens=8), TREE, **NORMS)


@pytest.mark.parametrize("fault", [unshifted, sibling_visible, rows_as_tokens, first_visible])
def test_faults_are_seen_in_trees(fault: Fault) -> None:
    with fault(), pytest.raises(AssertionError, match=SEEN):
        look_at("paged", replace(PARAMS["greedy"], max_tokens=8), TREE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", [nobodys_feature, foreign_continuation])
def test_faults_are_seen_behind_a_prompt_from_memory(fault: Fault) -> None:
    with fault(), pytest.raises(AssertionError, match=SEEN):
        check_reuse()
