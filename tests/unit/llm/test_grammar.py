"""Answers that belong to a grammar: the same with and without drafts, in any company."""

import json
from dataclasses import replace

import jsonschema
import pytest

from blockdraft import LLM, Grammar, RequestError, SamplingParams
from blockdraft.text.grammar import GrammarState
from tests.schemas import SCHEMAS
from tests.small_llm import assert_nothing_left, load_llm

PROMPT = "the abc"
SCHEMA = Grammar.json_schema(SCHEMAS["nested"])
WORDS = Grammar.regex(r"[a-z]{2,6}( [a-z]{2,6}){4,6}\.")


def asked(**changes) -> SamplingParams:
    return replace(SamplingParams(max_tokens=400, grammar=SCHEMA), **changes)


SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 4},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {64: 4.0, 90: -8.0}, "temperature": 1.0, "seed": 5},
    "samples": {"n": 3, "temperature": 1.0, "seed": 6, "logprobs": 2},
    "depth": {"num_draft_tokens": 2, "temperature": 0.7, "seed": 7},
    "minimum": {"min_tokens": 60, "temperature": 1.0, "seed": 8},
    "words": {"grammar": WORDS, "temperature": 1.0, "seed": 9},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_equals_plain(llm, name):
    wanted = asked(**SETTINGS[name])
    drafted = llm.generate(PROMPT, wanted).completions
    plain = llm.generate(PROMPT, replace(wanted, num_draft_tokens=0)).completions
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.logprobs) == (other.text, other.logprobs)
        assert (one.finish_reason, other.finish_reason) == ("stop", "stop")
        assert one.token_ids[-1] in llm.tokenizer.eos_ids
        assert one.acceptance.drafted
    assert len({completion.token_ids for completion in plain}) == wanted.n
    assert_nothing_left(llm)


@pytest.fixture(scope="module")
def cramped(folders) -> LLM:
    """So little memory that requests make room for each other."""
    return load_llm(folders, memory=0.0012, max_concurrency=8)


@pytest.mark.one_in(2)
def test_a_batch_with_and_without_grammars_equals_lone_runs(llm, cramped):
    kinds = [SCHEMA, None, WORDS, Grammar.json_schema(SCHEMAS["tree"]), Grammar.choice(["abc"])]
    wanted = [
        asked(grammar=kind, max_tokens=120, temperature=temperature, seed=seed)
        for seed, kind in enumerate(kinds)
        for temperature in (0.0, 1.0)
    ]
    prompts = ["abc!"[index % 4] * (60 + 9 * index) + PROMPT for index in range(len(wanted))]
    alone = [
        llm.generate(prompt, replace(params, num_draft_tokens=0)).completions[0].token_ids
        for prompt, params in zip(prompts, wanted, strict=True)
    ]
    for batched in (llm, cramped):
        streams = [
            batched.generate(p, w, stream=True) for p, w in zip(prompts, wanted, strict=True)
        ]
        found = [[] for _ in streams]
        open_streams = dict(enumerate(streams))
        while open_streams:
            for index, stream in list(open_streams.items()):
                if (chunk := next(stream, None)) is None:
                    del open_streams[index]
                else:
                    found[index] += chunk.token_ids
        assert [tuple(ids) for ids in found] == alone
        assert_nothing_left(batched)
    assert cramped.engine.scheduler.num_preempted


def assert_answers(schema: object, text: str) -> None:
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.slow
def test_every_answer_parses(cramped):
    """Nine answers to each schema: greedy, and sampled with temperatures of all kinds."""
    drafts = num_answers = 0
    for name, schema in SCHEMAS.items():
        grammar = Grammar.json_schema(schema)
        for temperature, n in ((0.0, 1), (0.7, 4), (1.5, 4)):
            params = asked(grammar=grammar, temperature=temperature, n=n, seed=len(name))
            for completion in cramped.generate(name, params).completions:
                assert completion.finish_reason == "stop", (name, completion.text)
                assert_answers(schema, completion.text)
                num_answers += 1
                drafts += completion.acceptance.num_tokens > completion.acceptance.num_passes
    assert num_answers >= 300
    assert drafts > num_answers / 4
    assert_nothing_left(cramped)


def test_the_end_comes_only_where_the_grammar_accepts(llm):
    """However much the target wants to end, or not to."""
    (eos_id,) = llm.tokenizer.eos_ids
    for bias in (100.0, -100.0):
        params = asked(logit_bias={eos_id: bias}, grammar=Grammar.regex("ab(c|cc|ccc)"))
        completion = llm.generate(PROMPT, params).completions[0]
        assert completion.finish_reason == "stop"
        assert completion.text == ("abc" if bias > 0 else "abccc")


def test_a_minimum_gives_way_where_only_the_end_is_left(llm):
    params = asked(grammar=Grammar.regex("(ab){1,9}"), min_tokens=60, temperature=1.0, seed=1)
    completion = llm.generate(PROMPT, params).completions[0]
    assert completion.text == 9 * "ab"
    assert completion.finish_reason == "stop"


def test_a_limit_and_a_stop_string_cut_an_answer(llm):
    whole = llm.generate(PROMPT, asked(grammar=WORDS)).completions[0]
    for most in (None, 0):
        params = asked(grammar=WORDS, max_tokens=7, num_draft_tokens=most)
        cut = llm.generate(PROMPT, params).completions[0]
        assert cut.finish_reason == "length"
        assert cut.token_ids == whole.token_ids[:7]
        params = asked(grammar=WORDS, stop=(" ",), num_draft_tokens=most)
        cut = llm.generate(PROMPT, params).completions[0]
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text.partition(" ")[0]


def test_a_bad_grammar_is_refused_before_anything_runs(llm):
    bad = asked(grammar=Grammar.json_schema({"type": "foo"}))
    for stream in (False, True):
        with pytest.raises(RequestError, match="Invalid type: foo"):
            llm.generate(PROMPT, bad, stream=stream)
    with pytest.raises(RequestError, match="constraint"):
        llm.engine.add([1, 2], asked())
    assert_nothing_left(llm)


def test_a_grammar_that_fails_on_the_way_ends_its_request_only(llm, monkeypatch):
    real, failing = GrammarState.allowed, Grammar.regex("a{50}")

    def allowed(self, output_ids, ahead):
        if self is broken[0] and len(output_ids) + len(ahead) >= 9:
            raise RequestError("the grammar cannot be followed further: too complex")
        return real(self, output_ids, ahead)

    monkeypatch.setattr(GrammarState, "allowed", allowed)
    start, broken = llm.samples.grammars.start, [None]

    def start_and_break(grammar):
        state = start(grammar)
        if grammar == failing:
            broken[0] = state
        return state

    monkeypatch.setattr(llm.samples.grammars, "start", start_and_break)
    for most in (None, 0):
        other = llm.generate(PROMPT, asked(num_draft_tokens=most), stream=True)
        pieces = next(other).text
        (bad,) = llm.generate(PROMPT, asked(grammar=failing, num_draft_tokens=most)).completions
        assert bad.finish_reason == "error"
        assert "too complex" in str(bad.error)
        assert bad.text == "a" * 9
        assert_answers(SCHEMAS["nested"], pieces + "".join(chunk.text for chunk in other))
    assert_nothing_left(llm)
