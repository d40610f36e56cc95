"""Log-probabilities of the prompt: what scoring a text needs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft import RequestError, SamplingParams
from tests.small_llm import assert_nothing_left, load_llm, params

TEXT = "the quick brown fox jumps over the lazy dog " * 5


def scores(llm, text=TEXT, **changes):
    found = llm.generate(text, params(logprobs=2, prompt_logprobs=True, **changes))
    assert_nothing_left(llm)
    return found.completions[0]


def test_they_are_those_of_the_model(llm, folders):
    ids = llm.tokenizer.encode(TEXT)
    found = scores(llm).prompt_logprobs
    assert len(found) == len(ids) - 1
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
        logits = model(torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits.float(), dim=-1)
    for position, entry in enumerate(found):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[ids[position + 1]]), abs=1e-4)
        assert entry.top[0][0] == int(row.argmax())


def test_they_change_nothing_else(llm):
    plain = llm.generate(TEXT, params(logprobs=2)).completions[0]
    scored = scores(llm)
    assert (scored.token_ids, scored.logprobs) == (plain.token_ids, plain.logprobs)
    assert plain.prompt_logprobs is None
    assert scored.num_reused_tokens == 0


def test_chunks_and_reuse_do_not_matter(llm, folders):
    expected = scores(llm).prompt_logprobs
    small = load_llm(folders, prefill_chunk=37, memory=0.001)
    assert scores(small).prompt_logprobs == expected
    assert scores(small).prompt_logprobs == expected
    several = small.generate([TEXT, "abc", TEXT], params(logprobs=2, prompt_logprobs=True, n=2))
    for generation in (several[0], several[2]):
        assert [c.prompt_logprobs for c in generation.completions] == [expected] * 2
    assert small.engine.scheduler.num_preempted > 0
    assert_nothing_left(small)


def test_one_token_has_none(llm):
    assert scores(llm, [5]).prompt_logprobs == ()


def test_they_stream_with_the_first_chunk(llm):
    chunks = list(llm.generate(TEXT, params(logprobs=0, prompt_logprobs=True), stream=True))
    assert len(chunks[0].prompt_logprobs) == len(llm.tokenizer.encode(TEXT)) - 1
    assert all(chunk.prompt_logprobs == () for chunk in chunks[1:])


def test_they_need_logprobs():
    with pytest.raises(RequestError, match="needs logprobs") as refused:
        SamplingParams(prompt_logprobs=True)
    assert refused.value.param == "logprobs"
