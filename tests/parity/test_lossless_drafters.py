"""Whatever a drafter guesses, the output is the target's: 1,350 cases in float64.

Greedy output is held against `generate` of an untouched model with stock attention, sampled output
against decoding without a drafter.
"""

import itertools
import random
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from tests.fakes import AlwaysWrongDrafter, ConstantDrafter, OracleDrafter, RandomDrafter
from tests.parity.checks import generate, generate_plain, stock_greedy
from tests.tiny import KINDS, LAYER_IDS, VOCAB_SIZE, tiny_drafter, tiny_target

DRAFTERS = ("random", "constant", "always_wrong", "oracle", "dflash")
LONGEST = 37
NUM_PROMPTS = 22
MIN_DISTINCT = 8
MODEL_SEEDS = {"llama": 0, "qwen3": 0, "gemma3": 0}
CONSTANT_TOKEN = 5


@dataclass(frozen=True)
class Case:
    block_size: int
    max_tokens: int
    prompt_index: int
    sampled: bool


def cases(kind: str, drafter: str) -> list[Case]:
    """Every block size from 1 to 16 with every length around its edge, prompts in rotation."""
    offset = KINDS.index(kind) + DRAFTERS.index(drafter)
    found = []
    for block_size in range(1, 17):
        edges = {1, 2, block_size - 1, block_size, block_size + 1, LONGEST} - {0}
        for max_tokens in sorted(edges):
            index = len(found) + offset
            found.append(Case(block_size, max_tokens, 7 * index % NUM_PROMPTS, index % 2 == 0))
    return found


def prompt_length(kind: str, prompt_index: int) -> int:
    """1 to 64, spread over the kinds; every kind has 1 and 64."""
    if prompt_index == 0:
        return 1
    return min(64, 3 * prompt_index + KINDS.index(kind) - 1)


def sampling(prompt_index: int, max_tokens: int) -> SamplingParams:
    temperature = (0.7, 1.0, 1.5)[prompt_index % 3]
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=prompt_index)


@lru_cache
def target_of(kind: str) -> SequentialTarget:
    model = tiny_target(kind, torch.float64, seed=MODEL_SEEDS[kind])
    return SequentialTarget(model, layer_ids=LAYER_IDS)


@lru_cache
def prompt_of(kind: str, prompt_index: int) -> tuple[int, ...]:
    """A random prompt whose greedy output is varied: an output in a short loop shows little."""
    for attempt in itertools.count():
        generator = random.Random(1000 * attempt + 10 * prompt_index + KINDS.index(kind))
        length = prompt_length(kind, prompt_index)
        prompt = tuple(generator.randrange(VOCAB_SIZE) for _ in range(length))
        params = SamplingParams(max_tokens=LONGEST)
        if len(set(generate_plain(target_of(kind), prompt, params).token_ids)) >= MIN_DISTINCT:
            return prompt
    raise AssertionError


@lru_cache
def reference_of(kind: str, prompt_index: int, sampled: bool) -> tuple[int, ...]:
    """The first 37 tokens; those of shorter outputs are its prefixes."""
    prompt = prompt_of(kind, prompt_index)
    if sampled:
        params = sampling(prompt_index, LONGEST)
        tokens = generate_plain(target_of(kind), prompt, params).token_ids
    else:
        model = tiny_target(kind, torch.float64, seed=MODEL_SEEDS[kind])
        tokens = stock_greedy(model, prompt, LONGEST)
    assert len(tokens) == LONGEST
    assert len(set(tokens)) >= MIN_DISTINCT
    return tuple(tokens)


def make_drafter(name: str, target: SequentialTarget, block_size: int, seed: int) -> Drafter:
    num = block_size - 1
    if name == "random":
        return RandomDrafter(num, VOCAB_SIZE, seed)
    if name == "constant":
        return ConstantDrafter(num, CONSTANT_TOKEN)
    if name == "always_wrong":
        return AlwaysWrongDrafter(num, VOCAB_SIZE)
    if name == "oracle":
        return OracleDrafter(num)
    model = tiny_drafter(torch.float64, block_size=16)
    embed = target.model.get_input_embeddings().weight
    drafter = DFlashDrafter(model, embed, target.model.get_output_embeddings().weight)
    drafter.max_nodes = num
    return drafter


def check_steps(name: str, case: Case, histogram: dict[int, int]) -> None:
    """The oracle fills every block but the last; the drafter that is always wrong none."""
    num_decoded = case.max_tokens - 1
    if name == "oracle":
        full, rest = divmod(num_decoded, case.block_size)
        expected = {case.block_size: full, rest: 1 if rest else 0}
        assert histogram == {size: count for size, count in expected.items() if count}
    elif name == "always_wrong":
        assert histogram == ({1: num_decoded} if num_decoded else {})


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_drafter_leaves_the_output_as_it_is(kind: str, name: str) -> None:
    target, num_compared = target_of(kind), 0
    for index, case in enumerate(cases(kind, name)):
        expected = list(reference_of(kind, case.prompt_index, case.sampled))
        if case.sampled:
            params = sampling(case.prompt_index, case.max_tokens)
        else:
            params = SamplingParams(max_tokens=case.max_tokens)
        drafter = make_drafter(name, target, case.block_size, seed=index)
        prompt = prompt_of(kind, case.prompt_index)
        result = generate(target, drafter, prompt, params, known=expected)
        assert result.token_ids == expected[: case.max_tokens], case
        assert result.finish_reason == "length"
        check_steps(name, case, dict(result.acceptance.histogram))
        num_compared += 1
    assert num_compared == 90


def test_the_cases_cover_what_they_should() -> None:
    every = [(k, d, case) for k in KINDS for d in DRAFTERS for case in cases(k, d)]
    assert len(every) == 1350
    assert {case.block_size for _, _, case in every} == set(range(1, 17))
    for drafter, sampled in itertools.product(DRAFTERS, (False, True)):
        seen = {case.block_size for _, d, case in every if d == drafter and case.sampled == sampled}
        assert seen == set(range(1, 17))
    assert {prompt_length(k, case.prompt_index) for k, _, case in every} == set(range(1, 65))
    window = tiny_target("gemma3").config.sliding_window
    assert any(prompt_length(k, c.prompt_index) > window for k, _, c in every if k == "gemma3")
