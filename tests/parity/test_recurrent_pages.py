"""Hybrids in one forward: states beside pages, with the bits of lone plain decoding.

What is held against is the sequential path without a drafter, one request in an engine of its own.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.cache.state_layer import LayerState
from blockdraft.cache.states import StateCache
from blockdraft.core.plan import PlannedRow
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_states import BorderStates, PagedStates
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.none import NoDrafter
from tests.batched import (
    Answer,
    Batched,
    Request,
    check_aborted,
    paged_pair,
    run_alone,
    run_batched,
)
from tests.fakes import NoisyOracleDrafter
from tests.parity import faults
from tests.parity.test_architectures import HYBRIDS, RECURRENT, build
from tests.tiny import VOCAB_SIZE, tiny_drafter

KINDS = (
    *("KimiLinear", "LaraMini", "OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
    *("Bamba", "FalconH1", "GraniteMoeHybrid", "NemotronH"),
    *("Lfm2", "Lfm2Moe", "Lfm3"),
)
AMPLE, FEW = 64, 5
"""Pages; few are enough for the longest request, and for no second one of its size."""


def requests(max_tokens: int = 12) -> list[Request]:
    """Five, greedy and sampled; three have a beginning of a page that another one has too."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(VOCAB_SIZE) for _ in range(n)) for n in (150, 3, 40, 70)]
    prompts.append(prompts[0][:130] + prompts[2])
    prompts[3] = prompts[0][:PAGE_SIZE] + prompts[3][:9]
    params = (
        SamplingParams(max_tokens=max_tokens, logprobs=0),
        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=11, logprobs=0),
    )
    # The later ones come when the beginning of the first can be taken over.
    return [Request(p, params[i % 2], arrival=6 * (i > 2)) for i, p in enumerate(prompts)]


TWO_LAYERS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "GraniteMoeHybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "FalconH1": {},
}
"""One state and one attention: all that differs, for tests of many tokens."""


def model_of(kind: str, num_layers: int = 4) -> PreTrainedModel:
    """Of four layers, as everywhere, or of two."""
    options = RECURRENT[kind]
    if num_layers == 2:
        options = {**options, **TWO_LAYERS[kind], "num_hidden_layers": 2}
    return build(kind, options, torch.float32)


@lru_cache
def alone(kind: str, max_tokens: int = 12, num_layers: int = 4) -> list[Answer]:
    model = model_of(kind, num_layers)
    with SequentialTarget(model).released_after() as target:
        return run_alone(target, requests(max_tokens))


def together(
    kind: str,
    pages: Pages,
    *,
    max_tokens: int = 12,
    chunk: int = 512,
    drafts: bool = True,
    num_layers: int = 4,
) -> Batched:
    """Drafts fill blocks of 16; three of four are right."""
    known = [answer.token_ids for answer in alone(kind, max_tokens, num_layers)]
    drafter = NoisyOracleDrafter(15, VOCAB_SIZE, seed=3) if drafts else NoDrafter()
    model = model_of(kind, num_layers)
    with PagedTarget(model, pages).released_after() as target:
        assert not target.takes_trees
        batched = run_batched(
            target,
            drafter,
            requests(max_tokens),
            known=known,
            after_step=lambda engine: pages.check_integrity(),
            prefill_chunk=chunk,
        )
        assert target._states is not None
        assert target._states._caches == {}
        assert target._states.borders._opened == {}
    assert batched.engine.proposer.failures.num_failures == 0
    return batched


@pytest.mark.one_in(12)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_five_together_answer_as_alone(kind: str, chunk: int) -> None:
    """Rejections, beginnings taken over, and prompts in chunks of any size change no bit."""
    pages = Pages(AMPLE)
    batched = together(kind, pages, chunk=chunk)
    assert batched.answers == alone(kind)
    assert pages.num_reused_tokens >= PAGE_SIZE
    drafted = sum(answer.acceptance.num_drafted for answer in batched.answers)
    assert 0 < sum(answer.acceptance.num_accepted for answer in batched.answers) < drafted
    assert len({token for answer in batched.answers for token in answer.token_ids}) >= 8


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", HYBRIDS)
def test_every_hybrid_passes_the_test_at_load(kind: str) -> None:
    model = build(kind, RECURRENT[kind], torch.float32)
    with PagedTarget(model, Pages(9)).released_after() as target:
        target.check_row_invariance()
        assert target.state_bytes() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", TWO_LAYERS)
def test_300_tokens(kind: str) -> None:
    """Of two layers: four take twice as long, and show no more of states or pages."""
    batched = together(kind, Pages(AMPLE), max_tokens=300, chunk=64, num_layers=2)
    assert batched.answers == alone(kind, 300, 2)
    drafted = sum(answer.acceptance.num_drafted for answer in batched.answers)
    assert 0 < sum(answer.acceptance.num_accepted for answer in batched.answers) < drafted
    assert all(len(answer.token_ids) == 300 for answer in batched.answers)
    assert all(len(set(answer.token_ids)) >= 8 for answer in batched.answers)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_ones_answer_as_alone(kind: str) -> None:
    batched = together(kind, Pages(FEW), max_tokens=60, chunk=64)
    assert batched.engine.scheduler.num_preempted
    assert batched.answers == alone(kind, 60)


def test_aborted_ones_leave_the_others_alone() -> None:
    known = [answer.token_ids for answer in alone("Qwen3_5")]
    drafter = NoisyOracleDrafter(15, VOCAB_SIZE, seed=3)
    with PagedTarget(model_of("Qwen3_5"), Pages(AMPLE)).released_after() as target:
        check_aborted(target, drafter, requests(), known, (0, 3), prefill_chunk=64)


def test_nothing_is_taken_over_without_reuse() -> None:
    pages = Pages(AMPLE, reuse=False)
    assert together("Lfm2", pages).answers == alone("Lfm2")
    assert pages.num_reused_tokens == 0


@pytest.mark.parametrize("kind", ["Qwen3_5", "Lfm2"])
def test_a_dflash_drafter_reads_features_that_were_taken_over(kind: str) -> None:
    model = model_of(kind)
    pages = Pages(AMPLE)
    target, drafter = paged_pair(model, tiny_drafter(block_size=6), pages)
    with target.released_after():
        batched = run_batched(target, drafter, requests(), prefill_chunk=64)
    assert batched.answers == alone(kind)
    assert pages.num_reused_tokens >= PAGE_SIZE


@contextmanager
def border_state_too_early() -> Iterator[None]:
    """What is kept at the end of a page is the state before the page's last token."""
    may_return, states_after = StateCache.may_return, StateCache.states_after

    def shifted(cache: StateCache, sure: int, also: object = ()) -> None:
        assert isinstance(also, range | tuple)
        may_return(cache, sure, [length - 1 for length in also])

    def earlier(cache: StateCache, length: int) -> list[LayerState]:
        return states_after(cache, length - 1)

    with (
        patch.object(StateCache, "may_return", shifted),
        patch.object(StateCache, "states_after", earlier),
    ):
        yield


def nothing_goes_back() -> AbstractContextManager[object]:
    """Keys are cut back with rejected tokens, states are not."""
    real = StateCache.truncate

    def truncate(cache: StateCache, length: int) -> None:
        for layer in cache._states:
            layer._copies = {}
            layer.num_steps = length
        real(cache, length)

    return patch.object(StateCache, "truncate", truncate)


@pytest.mark.parametrize(
    "fault",
    [border_state_too_early, faults.states_of_the_neighbor, nothing_goes_back],
)
def test_the_equality_check_finds(fault: Callable[[], AbstractContextManager[object]]) -> None:
    """Planted faults; some leave lengths that do not agree, which an assertion notices."""
    expected = alone("Lfm2")
    with fault():
        assert together("Lfm2", Pages(AMPLE)).answers != expected


def test_states_at_borders_take_no_more_than_their_room() -> None:
    borders = BorderStates(100)
    for page in range(4):
        borders.put(bytes([page]), [{}], 40)
    assert [borders.has(bytes([page])) for page in range(4)] == [False, False, True, True]
    assert (len(borders), borders.num_bytes) == (2, 80)
    borders.opened(7, bytes([2]), PAGE_SIZE)  # is used, so it stays longer than the other
    borders.put(bytes([4]), [{}], 40)
    assert [borders.has(bytes([page])) for page in (2, 3, 4)] == [True, False, True]
    assert borders.taken(7) == ([{}], PAGE_SIZE)
    assert borders.taken(7) is None
    borders.put(bytes([5]), [{}], 101)  # too large to be kept at all
    assert not borders.has(bytes([5]))


def test_states_at_a_border_are_copied_for_the_first_of_equal_texts_only() -> None:
    memory, model = Pages(AMPLE), model_of("Lfm2")
    states = PagedStates(model, memory, 10**9)
    tokens = [5] * (2 * PAGE_SIZE)
    with patch.object(StateCache, "states_after", return_value=[]) as copied:
        for key, own in enumerate([tokens, tokens, [6, *tokens[1:]]]):
            sequence = Sequence(key, SamplingParams(), 0, 0, frozenset(), [*own, 1], len(own) + 1)
            memory.open(key, own[:1], with_context=False)
            states.pretend(key, len(own), len(own))
            states.keep(PlannedRow(Row(sequence, own, 0)), [])
            assert copied.call_count == (2, 2, 4)[key]


def test_without_room_for_states_nothing_is_taken_over() -> None:
    model = model_of("Lfm2")
    pages = Pages(AMPLE)
    with PagedTarget(model, pages, state_bytes=0).released_after() as target:
        batched = run_batched(target, NoDrafter(), requests(), prefill_chunk=64)
        assert batched.answers == alone("Lfm2")
        assert isinstance(target._states, PagedStates)
        assert len(target._states.borders) == 0
    assert pages.num_reused_tokens == 0
