"""What fits in the memory for keys and values, and what happens where it is short."""

import re

import pytest

from blockdraft import ConfigError, ContextTooLong, SamplingParams
from tests.small_llm import MAX_TOKENS, load_llm, params
from tests.tiny import CONTEXT, tiny_target_folder


def test_a_prompt_that_never_fits_the_memory_is_refused_with_both_numbers(folders, tmp_path):
    target = tiny_target_folder(tmp_path, max_position_embeddings=4 * CONTEXT)
    llm = load_llm((target, folders[1]), memory=0.0012, max_concurrency=4)
    limit = llm.engine.target.memory.num_tokens
    assert limit < 2 * CONTEXT
    with pytest.raises(ContextTooLong, match=rf"{limit} tokens and .* 1 .*KV cache of {limit} tok"):
        llm.generate([5] * limit, SamplingParams(max_tokens=1), stream=True)
    fits = llm.generate([5] * (limit - 24), params()).completions[0]
    assert len(fits.token_ids) == MAX_TOKENS


def test_too_little_memory_is_refused_with_what_is_needed(folders):
    with pytest.raises(
        ConfigError, match=r"0\.0001 GiB holds . pages .* give --memory 0\.00"
    ) as info:
        load_llm(folders, memory=0.0001)
    needed = float(re.search(r"--memory ([\d.]+)", str(info.value))[1])
    assert load_llm(folders, memory=1.01 * needed).generate("abc", params())


def test_little_memory_preempts_and_changes_nothing(folders, llm):
    small = load_llm(folders, memory=0.0012, max_concurrency=8)
    prompts = ["a" * 60, "b" * 150, "c" * 61, "the" * 30, "d" * 62, "e" * 63, "f" * 120, "g" * 59]
    wanted = params(max_tokens=70, temperature=0.8, seed=4)
    found = [g.completions[0].token_ids for g in small.generate(prompts, wanted)]
    assert small.engine.scheduler.num_preempted
    assert found == [g.completions[0].token_ids for g in llm.generate(prompts, wanted)]


def test_the_second_turn_of_a_chat_takes_the_pages_of_the_first(folders):
    llm = load_llm(folders)
    first = llm.generate("the " * 60, params()).completions[0]
    history = [*llm.tokenizer.encode("the " * 60), *first.token_ids, *llm.tokenizer.encode("abc")]
    memory = llm.engine.target.memory
    assert memory.num_reused_tokens == 0
    second = llm.generate(history, params()).completions[0]
    assert memory.num_reused_tokens >= 64
    fresh = load_llm(folders).generate(history, params()).completions[0]
    assert second.token_ids == fresh.token_ids
    assert second.acceptance == fresh.acceptance
