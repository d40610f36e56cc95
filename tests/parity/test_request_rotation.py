"""Rotations that depend on the length of the text: a function of the request, not of the moment."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.none import NoDrafter
from tests.batched import Answer, Request, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.parity.checks import stock_greedy
from tests.parity.test_architectures import build, stock_logprobs
from tests.tiny import VOCAB_SIZE

ORIGINAL = 160
"""Longer texts are turned by long factors."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "phi3": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
    ),
    "llama": ("Llama", {"rope_parameters": LONGROPE}),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 4,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.2},
        },
    ),
    "dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 256}),
}
SHORT, LONG, CROSSING = 0, 1, 2


def model_of(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    name, options = KINDS[kind]
    return build(name, options, dtype)


def requests() -> list[Request]:
    """One that stays short, one that begins long, and some that may cross; all share a page."""
    draw = random.Random(3)
    beginning = tuple(draw.randrange(VOCAB_SIZE) for _ in range(100))
    prompts = [beginning, beginning + beginning[:70], beginning, beginning[:90], beginning[:7]]
    lengths = (50, 40, 100, 30, 20)
    return [
        Request(prompt, SamplingParams(max_tokens=n, logprobs=0), arrival=4 * i)
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]


def new_target(model: PreTrainedModel, path: str) -> PagedTarget | SequentialTarget:
    return PagedTarget(model, Pages(24)) if path == "pages" else SequentialTarget(model)


def together(target: PagedTarget | SequentialTarget, alone: list[Answer]) -> list[Answer]:
    known = [answer.token_ids for answer in alone]
    drafter = NoisyOracleDrafter(15, VOCAB_SIZE, seed=3)
    return run_batched(target, drafter, requests(), known=known, prefill_chunk=30).answers


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", ["pages", "one after another"])
@pytest.mark.parametrize("kind", KINDS)
def test_company_and_drafts_change_no_bit(kind: str, path: str) -> None:
    model = model_of(kind, torch.float32)
    with SequentialTarget(model).released_after() as target:
        alone = run_alone(target, requests())
    with new_target(model, path).released_after() as target:
        target.check_row_invariance()
        assert together(target, alone) == alone
        if isinstance(target, PagedTarget):
            assert target.memory.num_reused_tokens >= PAGE_SIZE
    assert len(set(alone[CROSSING].token_ids)) >= 8


def follow_the_published_code(model: PreTrainedModel) -> None:
    """Let long factors turn long texts, which the forward of transformers never does."""
    rotary: Any = model.get_decoder().rotary_emb
    rotary.rope_init_fn = lambda config: (rotary.inv_freq, rotary.attention_scaling)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_transformers(kind: str) -> None:
    """Of texts on one side by `generate`; of one that crosses by one forward over all of it."""
    model = model_of(kind, torch.float64)
    with PagedTarget(model, Pages(24)).released_after() as target:
        answers = run_batched(target, NoDrafter(), requests()).answers
    if kind == "phimoe":
        follow_the_published_code(model)
    for index in (SHORT, LONG):
        request = requests()[index]
        found = answers[index].token_ids
        assert found == stock_greedy(model, request.prompt, len(found))
    crossing = answers[CROSSING].token_ids
    expected = stock_logprobs(model, list(requests()[CROSSING].prompt), crossing)
    assert expected.argmax(-1).tolist() == crossing
    if kind != "dynamic":
        assert answers[SHORT].token_ids != crossing[:50]  # the factors matter


def test_a_beginning_of_the_other_kind_taken_over_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: pages of short texts serve long ones."""
    model = model_of("llama", torch.float32)
    with PagedTarget(model, Pages(24)).released_after() as target:
        alone = run_alone(target, requests()[:3])
    chains = Pages._chains
    monkeypatch.setattr(
        Pages, "_chains", lambda self, key, context, is_long: chains(self, key, context, False)
    )
    with PagedTarget(model, Pages(24)).released_after() as target:
        found = run_batched(target, NoDrafter(), requests()[:3]).answers
    assert found[CROSSING] != alone[CROSSING]


@pytest.mark.parametrize("path", ["pages", "one after another"])
def test_a_model_is_given_back_as_it_was(path: str) -> None:
    model = model_of("phi3", torch.float64)
    prompt = requests()[LONG].prompt
    before = stock_greedy(model, prompt, 5), stock_greedy(model, prompt[:9], 5)
    rotary = model.get_decoder().rotary_emb
    with new_target(model, path).released_after() as target:
        run_alone(target, requests()[:2])
    assert rotary.rope_type == "longrope"
    assert "forward" not in vars(rotary)
    assert (stock_greedy(model, prompt, 5), stock_greedy(model, prompt[:9], 5)) == before


def test_one_that_also_stretches_by_the_length_of_a_forward_is_refused() -> None:
    name, options = KINDS["phimoe"]
    rope = {**options["rope_parameters"], "long_mscale": 1.4}
    model = build(name, {**options, "rope_parameters": rope})
    for path in ("pages", "one after another"):
        with pytest.raises((ModelError, NotPaged), match="rope_type 'longrope'"):
            new_target(model, path)
