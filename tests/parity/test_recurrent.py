"""Targets with recurrent or convolution layers: one form of computation for every token.

One model of each kind of state: a delta rule beside experts, convolutions alone, Mamba 2 beside
experts, layers with both a state and keys, and Mamba 2 without any attention.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from blockdraft.cache.memory import Memory
from blockdraft.cache.states import StateCache
from blockdraft.core.errors import ModelError
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.layers.recurrent import copies_states
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.train.features import FrozenTarget
from tests.batched import Answer, Request, check_aborted, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.parity import faults
from tests.parity.checks import (
    check_draft_context,
    check_drafted_equals_plain,
    generate,
    generate_plain,
    stock_greedy,
)
from tests.parity.targets import make_dflash
from tests.parity.test_architectures import RECURRENT, build
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_drafter

KINDS = ("Qwen3Next", "Lfm2", "GraniteMoeHybrid", "FalconH1", "Mamba2")
PROMPT = tuple(range(5, 45))
GREEDY = SamplingParams(max_tokens=24, logprobs=0)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=11, logprobs=0)


def new_target(kind: str, dtype: torch.dtype = torch.float32) -> SequentialTarget:
    return TightTarget(build(kind, RECURRENT[kind], dtype), layer_ids=LAYER_IDS)


def new_drafter() -> NoisyOracleDrafter:
    """Right in three of four slots."""
    return NoisyOracleDrafter(15, VOCAB_SIZE, seed=3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafted_equals_plain(kind: str, params: SamplingParams) -> None:
    """In float32, where kernels run what fits them; log-probabilities to the bit."""
    with new_target(kind).released_after() as target:
        assert not target.takes_trees
        target.check_row_invariance()
        result = check_drafted_equals_plain(target, new_drafter(), PROMPT, params)
    assert result.acceptance.num_passes < result.acceptance.num_tokens
    assert result.acceptance.num_accepted < result.acceptance.num_drafted  # some were rejected
    assert len(set(result.token_ids)) >= 8


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_equals_generate(kind: str) -> None:
    model = build(kind, RECURRENT[kind])
    expected = stock_greedy(model, PROMPT, GREEDY.max_tokens)
    with SequentialTarget(model).released_after() as target:
        drafted = check_drafted_equals_plain(target, new_drafter(), PROMPT, GREEDY)
    assert drafted.token_ids == expected
    assert stock_greedy(model, PROMPT, GREEDY.max_tokens) == expected  # it is given back whole


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_the_prompt_do_not_matter(kind: str) -> None:
    prompt = [*range(90), *range(10)]
    with new_target(kind).released_after() as target:
        whole, *others = (
            generate_plain(target, prompt, GREEDY, engine_options={"prefill_chunk": chunk})
            for chunk in (512, 64, 7, 1)
        )
    for other in others:
        assert other == whole


def batched_requests() -> list[Request]:
    """Five, two with the same beginning."""
    lengths = (30, 3, 41, 17)
    prompts = [tuple(range(length, 2 * length)) for length in lengths]
    prompts.append(prompts[2][:20] + prompts[3])
    params = (GREEDY, SAMPLED)
    return [Request(p, params[i % 2], arrival=2 * i) for i, p in enumerate(prompts)]


class TightMemory(Memory):
    """Room for so few tokens that somebody is preempted."""

    num_tokens = 80

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}

    def reserve(self, key: int, num_tokens: int) -> bool:
        others = sum(num for other, num in self.reserved.items() if other != key)
        if others + num_tokens > self.num_tokens:
            return False
        self.reserved[key] = max(num_tokens, self.reserved.get(key, 0))
        return True

    def room(self, key: int) -> int:
        return self.reserved.get(key, 0)

    def put_back(self, key: int) -> None:
        self.reserved.pop(key, None)

    close = put_back


class TightTarget(SequentialTarget):
    """Gives room back when a sequence is closed, as the paged target does."""

    def close(self, key: int) -> None:
        super().close(key)
        self.memory.close(key)


def check_batched(target: SequentialTarget) -> None:
    """Five at once, drafted: with and without preemption, and with some aborted, as alone."""
    requests = batched_requests()
    expected: list[Answer] = run_alone(target, requests)
    known = [answer.token_ids for answer in expected]
    for memory in (Memory(), TightMemory()):
        target.memory = memory
        batched = run_batched(target, new_drafter(), requests, known=known, prefill_chunk=16)
        assert batched.answers == expected
        assert batched.engine.proposer.failures.num_failures == 0
        assert bool(batched.engine.scheduler.num_preempted) == isinstance(memory, TightMemory)
    target.memory = Memory()
    check_aborted(target, new_drafter(), requests, known, (0, 1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_five_at_once_preempted_and_aborted(kind: str) -> None:
    with new_target(kind).released_after() as target:
        check_batched(target)
        assert target._caches == {}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("Qwen3Next", faults.state_stays_behind),
        ("Qwen3Next", faults.state_of_the_row_before),
        ("Lfm2", faults.state_stays_behind),
        ("Lfm2", faults.state_of_the_row_before),
        ("GraniteMoeHybrid", faults.state_stays_behind),
        ("GraniteMoeHybrid", faults.state_of_the_row_before),
    ],
)
@pytest.mark.usefixtures("either_way")
def test_the_equality_check_finds(
    kind: str, fault: Callable[[], AbstractContextManager[object]]
) -> None:
    """A cache that only crops keys, and a wrong copy."""
    with (
        fault(),
        new_target(kind).released_after() as target,
        pytest.raises(AssertionError, match="drafted differs from plain"),
    ):
        check_drafted_equals_plain(target, new_drafter(), PROMPT, GREEDY)


@pytest.mark.usefixtures("without_kernels")
def test_a_scan_over_the_rows_is_found() -> None:
    """At load, and in prompts and blocks."""
    with (
        faults.scan_over_the_rows(),
        new_target("Qwen3Next").released_after() as target,
        pytest.raises(ModelError, match="change with the number of rows"),
    ):
        target.check_row_invariance()
    with (
        faults.scan_over_the_rows(),
        new_target("Qwen3Next").released_after() as target,
        pytest.raises(AssertionError, match="drafted differs from plain"),
    ):
        check_drafted_equals_plain(target, new_drafter(), PROMPT, GREEDY)


def test_a_dflash_drafter_reads_the_features_of_such_a_target() -> None:
    """Its context is right after every step; of these kinds a convolution keeps float64."""
    with new_target("Lfm2", torch.float64).released_after() as target:
        drafter = make_dflash(target, tiny_drafter(torch.float64, block_size=6))
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=2)
        for prompt, chunk in ((PROMPT, 3), (range(80), 512)):
            options = {"prefill_chunk": chunk}
            drafted = generate(
                target,
                drafter,
                prompt,
                params,
                engine_options=options,
                after_step=check_draft_context,
            )
            assert drafted.token_ids == generate_plain(target, prompt, params).token_ids
            assert drafted.acceptance.num_drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_dflash_drafter_on_every_kind(kind: str) -> None:
    with new_target(kind).released_after() as target:
        drafter = make_dflash(target, tiny_drafter(block_size=6))
        for params in (GREEDY, SAMPLED):
            check_drafted_equals_plain(target, drafter, PROMPT, params)


def features_of(target: SequentialTarget, token_ids: list[int]) -> torch.Tensor:
    """[tokens, num_features * hidden] of a text."""
    sequence = Sequence(0, GREEDY, 0, 0, frozenset(), token_ids, len(token_ids))
    plan = ForwardPlan([PlannedRow(Row(sequence, token_ids, 0))])
    features = target.forward(plan).features_of(0)
    target.close(sequence.key)
    assert features is not None
    return features


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_the_features_that_decoding_gives(kind: str) -> None:
    """Training scans whole texts, padded on the right: the same but for roundings."""
    short, long = list(PROMPT[:17]), list(PROMPT)
    with new_target(kind, torch.float64).released_after() as target:
        expected = [features_of(target, ids) for ids in (short, long)]
        model = target.model
    frozen = FrozenTarget(model, LAYER_IDS)
    padded = torch.tensor([short + [0] * (len(long) - len(short)), long])
    found, _ = frozen.split(frozen.states(padded))
    for own, features in zip(found, expected, strict=True):
        torch.testing.assert_close(own[: len(features)], features, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("kind", KINDS)
def test_no_more_states_are_kept_than_may_be_needed(kind: str) -> None:
    """One before the first token of a step, and one before each candidate.

    Where these step again, no more than the one before all of them, and their inputs.
    """
    with new_target(kind).released_after() as target:
        assert target.state_bytes() > 0
        sequence = Sequence(0, GREEDY, 0, 0, frozenset(), list(PROMPT), len(PROMPT))
        row = Row(sequence, list(PROMPT), 3)
        target.forward(ForwardPlan.of_chains([row], [[1, 2, 3]]))
        cache = target._caches[0]
        assert isinstance(cache, StateCache)
        sure = len(PROMPT)
        for layer in cache._states:
            if copies_states(target.model):
                assert sorted(layer._copies) == [0, sure, sure + 1, sure + 2]
            else:
                assert sorted(layer._copies) == [0, sure]
                assert [num for num, _ in layer._again] == [3]
        target.truncate(0, 0)
        assert cache.length == 0
        assert not cache.has_previous_state()
