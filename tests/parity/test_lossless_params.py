"""Drafting changes nothing under any option of a request, alone or mixed.

Tokens, finish reasons and log-probabilities are equal to plain decoding, bit for bit.
"""

import random
from functools import lru_cache
from typing import Any

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from tests.fakes import NoisyOracleDrafter, OracleDrafter, TableTarget
from tests.parity.checks import Generated, check_drafted_equals_plain
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import KINDS, VOCAB_SIZE, tiny_drafter, tiny_target

PROMPT = (3, 1, 4, 1, 5, 9)
EOS = frozenset({20, 21, 22})

SINGLE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition_reward": {"temperature": 1.0, "repetition_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "negative_penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "sampled_penalties": {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {5: 4.0, 6: -100.0, 20: 3.0}},
    "min_tokens": {"min_tokens": 25},
    "sampled_min_tokens": {"min_tokens": 25, "temperature": 1.5},
    "logprobs": {"logprobs": 5},
    "sampled_logprobs": {"logprobs": 0, "temperature": 1.0, "top_k": 3},
    "stop_token_ids": {"stop_token_ids": tuple(range(30, 40))},
    "ignore_eos": {"ignore_eos": True},
    "plain": {"num_draft_tokens": 0},
    "one_draft": {"num_draft_tokens": 1},
    "three_drafts": {"num_draft_tokens": 3, "temperature": 1.0},
    "seed_of_64_bits": {"temperature": 1.0, "seed": 2**64 - 1},
}


@lru_cache
def exact_target(kind: str, way: Way) -> SequentialTarget | PagedTarget:
    return make_target(way, tiny_target(kind))


@lru_cache
def dflash(kind: str, way: Way) -> DFlashDrafter:
    return make_dflash(exact_target(kind, way), tiny_drafter(block_size=8))


def make_drafters(kind: str, way: Way) -> list[Drafter]:
    return [OracleDrafter(7), NoisyOracleDrafter(7, VOCAB_SIZE), dflash(kind, way)]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("kind", KINDS)
def test_each_option_on_a_real_architecture_in_float32(kind: str, name: str, way: Way) -> None:
    target = exact_target(kind, way)
    params = SamplingParams(**{"max_tokens": 30, "seed": 7, "logprobs": 2, **SINGLE[name]})
    for drafter in make_drafters(kind, way):
        result = check_drafted_equals_plain(target, drafter, PROMPT, params, eos_ids=EOS)
        check_bounds(result, params)
        if isinstance(drafter, OracleDrafter) and params.num_draft_tokens != 0:
            assert result.acceptance.num_passes <= len(result.token_ids)


def check_bounds(result: Generated, params: SamplingParams) -> None:
    """What the options promise whatever the tokens are."""
    assert params.min_tokens <= len(result.token_ids) <= params.max_tokens
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
    assert not stop_ids & set(result.token_ids[:-1])
    assert (result.finish_reason == "stop") == (result.token_ids[-1] in stop_ids)
    limit = params.max_draft_tokens
    if limit is not None:
        assert all(size <= limit + 1 for size in result.acceptance.histogram)
    assert len(result.logprobs) == (0 if params.logprobs is None else len(result.token_ids))
    for entry, token_id in zip(result.logprobs, result.token_ids, strict=False):
        assert len(entry.top) == params.logprobs
        for other_id, logprob in entry.top:
            assert other_id != token_id or logprob == entry.logprob


def random_params(draw: random.Random, vocab_size: int) -> SamplingParams:
    """Each option is on by chance."""
    ids = range(vocab_size)
    options: dict[str, Any] = {
        "temperature": draw.choice([0.3, 1.0, 1.7]),
        "top_k": draw.randint(1, 12),
        "top_p": draw.uniform(0.1, 0.99),
        "min_p": draw.uniform(0.01, 0.4),
        "repetition_penalty": draw.uniform(0.6, 1.8),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "logit_bias": {draw.choice(ids): draw.uniform(-9, 9) for _ in range(3)},
        "min_tokens": draw.randint(0, 12),
        "stop_token_ids": tuple(draw.sample(ids, 2)),
        "ignore_eos": True,
        "logprobs": draw.randint(0, 8),
        "num_draft_tokens": draw.choice([0, 0, 1, 2, 5, 100]),
    }
    chosen = {name: value for name, value in options.items() if draw.random() < 0.4}
    return SamplingParams(max_tokens=draw.randint(12, 30), seed=draw.getrandbits(64), **chosen)


def make_tied_table(vocab_size: int, seed: int) -> torch.Tensor:
    """Coarse logits: ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (vocab_size,) * 3, generator=generator) / 2.0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(10))
def test_random_mixtures_on_tables_with_many_ties(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        vocab_size = draw.choice([9, 24, 40])
        target = TableTarget(make_tied_table(vocab_size, draw.randrange(1000)))
        drafter = NoisyOracleDrafter(
            draw.randint(0, 15), vocab_size, chance=draw.random(), seed=draw.randrange(1000)
        )
        check_drafted_equals_plain(
            target,
            drafter,
            [draw.randrange(vocab_size) for _ in range(draw.randint(1, 20))],
            random_params(draw, vocab_size),
            eos_ids=frozenset(draw.sample(range(vocab_size), draw.randint(0, 2))),
            sample_index=draw.randrange(4),
            engine_options={"prefill_chunk": draw.choice([1, 3, 512])},
        )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures_on_a_real_architecture(seed: int, way: Way) -> None:
    draw = random.Random(100 + seed)
    kind = KINDS[seed % 3]
    target = exact_target(kind, way)
    for drafter in make_drafters(kind, way):
        params = random_params(draw, VOCAB_SIZE)
        result = check_drafted_equals_plain(
            target,
            drafter,
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 40))],
            params,
            eos_ids=EOS,
            sample_index=draw.randrange(4),
            engine_options={"prefill_chunk": draw.choice([1, 3, 512])},
        )
        check_bounds(result, params)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_samples_of_one_request_are_drafted_as_plain_and_differ(kind: str, way: Way) -> None:
    target = exact_target(kind, way)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=5)
    for drafter in make_drafters(kind, way):
        texts = {
            tuple(
                check_drafted_equals_plain(
                    target, drafter, PROMPT, params, sample_index=index
                ).token_ids
            )
            for index in range(params.n)
        }
        assert len(texts) == params.n
