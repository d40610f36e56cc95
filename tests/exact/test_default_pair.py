"""The default pair as deployed here: drafted output equals plain output, to the bits of logits."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from blockdraft.core.request import SamplingParams
from tests.batched import LogitsRecorder
from tests.exact.pair import exact_pair, prompt_ids
from tests.exact.prompts import build_prompts, read_prompts
from tests.parity.checks import check_together_equals_alone, generate, generate_plain
from tests.parity.targets import WAYS, Way

NUM_TOKENS = 128
CHUNK = 10
BLOCK_SIZES = (4, 8, 16)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.1, "logprobs": 2},
)


def check_prompt(
    index: int,
    num_tokens: int,
    block_sizes: tuple[int, ...],
    sampling: dict[str, Any],
    way: Way = "paged",
) -> None:
    """One plain run against a drafted one per block size: tokens, log-probabilities, logits.

    Blocks longer than the drafter was trained on are drafted badly and must be as exact.
    """
    target, drafter = exact_pair(way)
    prompt = prompt_ids()[index]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=index, **sampling)
    recorder = LogitsRecorder(target)
    plain = generate_plain(recorder, prompt, params)
    expected = recorder.by_position
    assert len(plain.token_ids) == num_tokens
    for block_size in block_sizes:
        drafter.max_nodes = block_size - 1
        recorder = LogitsRecorder(target)
        drafted = generate(recorder, drafter, prompt, params)
        assert drafted.token_ids == plain.token_ids, (index, block_size, sampling)
        assert drafted.logprobs == plain.logprobs
        found = recorder.by_position
        assert found.keys() == expected.keys()
        for position, logits in expected.items():
            assert torch.equal(found[position], logits), (index, position)


def test_the_prompts_are_many_and_of_many_kinds() -> None:
    prompts = read_prompts()
    assert prompts == build_prompts()
    assert len(prompts) == 200
    assert len({row["kind"] for row in prompts}) >= 5


@pytest.mark.model
@pytest.mark.one_in(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index", [0, 8, 13, 26])
def test_four_prompts(index: int, way: Way) -> None:
    check_prompt(index, 32, (BLOCK_SIZES[index % 3],), SAMPLING[index % 2], way)


def check_ways_agree(indices: Sequence[int], num_tokens: int) -> None:
    """In pages and drafted, all prompts at once: what the sequential target decodes, plain."""
    oracle, _ = exact_pair("sequential")
    target, drafter = exact_pair("paged")
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    prompts = [prompt_ids()[index] for index in indices]
    drafter.max_nodes = drafter.model.config.block_size - 1
    check_together_equals_alone(target, drafter, oracle, prompts, params)


@pytest.mark.model
def test_four_prompts_at_once_in_pages() -> None:
    check_ways_agree([0, 8, 13, 26], 24)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_two_hundred_prompts_twenty_at_once_in_pages(start: int) -> None:
    check_ways_agree(range(start, start + 20), NUM_TOKENS)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, CHUNK))
def test_two_hundred_prompts_with_options_in_rotation(start: int) -> None:
    combinations = list(itertools.product(BLOCK_SIZES, SAMPLING[:2]))
    for index in range(start, start + CHUNK):
        # Not in step with the kinds of prompts, which repeat every ten.
        block_size, sampling = combinations[(index + index // 10) % len(combinations)]
        check_prompt(index, NUM_TOKENS, (block_size,), sampling)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("index", [10 * i + i % 10 for i in range(20)], ids=str)
def test_every_option_on_twenty_prompts(index: int) -> None:
    for sampling in SAMPLING:
        check_prompt(index, NUM_TOKENS, BLOCK_SIZES, sampling)
