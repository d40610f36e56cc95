"""Audits: a genuine answer is never accused, an altered one always found."""

import dataclasses
import json
from dataclasses import replace

import pytest

from blockdraft import ConfigError, Grammar, Receipt, RequestError, SamplingParams
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.receipt import _PARAMS, read_receipt
from blockdraft.engine import audit as audits
from blockdraft.speculate.sampler import logits as sampler_logits
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.philox import Stream
from tests.audits import ASKED, asked, assert_genuine, check_alterations
from tests.small_llm import assert_nothing_left, load_llm, params
from tests.tiny import CONTEXT

NEUTRAL = {
    *("seed", "n", "logprobs", "prompt_logprobs"),
    *("num_draft_tokens", "draft_depth", "prediction", "drafters"),
}
"""Fields of SamplingParams that change no token; the seed stands beside the parameters."""
PROMPTS = ["the abc", "ab the ab", "!!! xyz"]
MAX_TOKENS = 10


def receipts_of(llm, name, *, max_tokens=MAX_TOKENS):
    wanted = [asked(name, seed, max_tokens=max_tokens) for seed in range(len(PROMPTS))]
    return [one for each in llm.generate(PROMPTS, wanted) for one in llm.receipts(each)]


@pytest.fixture(scope="module")
def answers(folders):
    """Of all kinds, drafted as trees, and the LLM that gave them."""
    llm = load_llm(folders)
    llm.use_fixed_drafting(12)
    return llm, [receipt for name in ASKED for receipt in receipts_of(llm, name)]


def test_a_receipt_has_every_parameter_that_counts():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(_PARAMS) == names - NEUTRAL


@pytest.mark.parametrize("name", ASKED)
def test_answers_of_a_batch_are_genuine(llm, name):
    assert_genuine(llm, receipts_of(llm, name))
    assert_nothing_left(llm)


def test_trees_lookups_and_predictions_leave_answers_genuine(folders):
    llm = load_llm(folders, lookup=True)
    llm.use_fixed_drafting(12)
    wanted = params(max_tokens=60, temperature=0.3, seed=4, prediction="the abc the abc")
    generations = (
        llm.generate([5, 6, 7] * 9, wanted),
        llm.chat([{"role": "user", "content": "the abc"}], replace(wanted, prediction=())),
    )
    acceptance = [g.completions[0].acceptance for g in generations]
    assert any(rank for one in acceptance for _, rank in one.drafted_at)
    assert any(one.accepted for one in acceptance)
    assert_genuine(llm, [receipt for g in generations for receipt in llm.receipts(g)])


def test_a_prompt_that_was_reused_is_computed_anew(folders):
    llm = load_llm(folders)
    prompt = [7, 8, 9] * PAGE_SIZE
    wanted = params(temperature=1.0, seed=3)
    llm.generate(prompt, wanted)
    generation = llm.generate(prompt, replace(wanted, seed=4))
    assert generation.completions[0].num_reused_tokens
    assert_genuine(llm, llm.receipts(generation))
    assert_nothing_left(llm)


def test_preempted_answers_are_genuine(folders, llm):
    small = load_llm(folders, memory=0.0012, max_concurrency=8)
    prompts = ["a" * 60, "b" * 150, "c" * 61, "the" * 30, "d" * 62, "e" * 63, "f" * 120, "g" * 59]
    generations = small.generate(prompts, params(max_tokens=70, temperature=0.8, seed=4))
    assert small.engine.scheduler.num_preempted
    assert_genuine(llm, [receipt for g in generations for receipt in small.receipts(g)])


@pytest.mark.parametrize("rows", [1, 7])
def test_chunks_of_the_pass_change_nothing(folders, monkeypatch, rows):
    llm = load_llm(folders, prefill_chunk=5)
    monkeypatch.setattr(audits, "LOGITS_BYTES", rows * 4 * llm.engine.target.vocab_size)
    wanted = replace(asked("penalties", 3), max_tokens=40)
    assert_genuine(llm, llm.receipts(llm.generate("the abc ab the", wanted)))


def test_answers_with_a_grammar_are_genuine_and_alterations_found(llm):
    wanted = asked("sampled", 3, ignore_eos=False, max_tokens=80)
    wanted = replace(wanted, grammar=Grammar.regex(r"[a-z]{2,6}( [a-z]{2,6}){2,3}\."))
    (receipt,) = llm.receipts(llm.generate("the abc", wanted))
    assert receipt.finish_reason == "stop"
    assert_genuine(llm, [receipt])
    free = replace(receipt, params=replace(receipt.params, grammar=None))
    assert llm.verify(free).verdict == "altered"
    other = replace(wanted.grammar, source=r"[A-Z]+ [a-z]+")
    finding = llm.verify(replace(receipt, params=replace(receipt.params, grammar=other))).finding
    assert (finding.what, finding.position) == ("token", 0)
    more = llm.verify(replace(receipt, token_ids=(*receipt.token_ids, 70))).finding
    assert (more.what, more.position) == ("end", len(receipt.token_ids))


@pytest.mark.parametrize("num_trials", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_every_alteration_is_found(answers, num_trials):
    check_alterations(*answers, num_trials, seed=1)
    assert_nothing_left(answers[0])


def neighbor(place):
    position = len(place.sequence.token_ids) + place.num_ahead + 1
    return Stream(place.sequence.seed, place.sequence.sample_index, position)


def first_sample(place):
    position = len(place.sequence.token_ids) + place.num_ahead
    return Stream(place.sequence.seed, 0, position)


def shifted(engine, forced, new_ids, run=audits._run):
    return run(engine, forced, new_ids).roll(1, 0)


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (Place, "stream", property(neighbor)),
        (Place, "stream", property(first_sample)),
        (audits, "_run", shifted),
        (sampler_logits, "penalize", lambda *_: None),
        (sampler_logits, "_without_stops", lambda allowed, *_: allowed),
    ],
    ids=["noise of a neighbor", "noise of sample 0", "logits off by one", "penalties", "minimum"],
)
def test_a_planted_fault_accuses_genuine_answers(answers, monkeypatch, where, name, fault):
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError, match="accused"):
        assert_genuine(*answers)


def believe(engine, logits, sequence, own):
    for token_id in own:
        sequence.append(token_id)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("_in_chunk", believe), ("_at_end", lambda *_: None)],
    ids=["any token", "any end"],
)
def test_a_planted_fault_misses_alterations(answers, monkeypatch, name, fault):
    monkeypatch.setattr(audits, name, fault)
    with pytest.raises(AssertionError, match="missed"):
        check_alterations(*answers, num_trials=40, seed=2)


@pytest.mark.parametrize(
    ("changes", "what", "why"),
    [
        (
            {"finish_reason": "stop"},
            "end",
            "the finish reason is stop, and the target ends with max",
        ),
        (
            {"stop_string": "x"},
            "end",
            "the stop string is 'x', and the target ends with max_tokens",
        ),
        ({"text": "no"}, "text", "not that of the tokens"),
        ({"token_ids": ()}, "end", "the target continues"),
        ({"token_ids": (10**9,)}, "token", "outside the vocabulary of 272"),
        ({"token_ids": (-1,)}, "token", "outside the vocabulary"),
    ],
)
def test_ends_and_texts_are_checked(llm, changes, what, why):
    (receipt,) = llm.receipts(llm.generate("the abc", params(max_tokens=4)))
    audit = llm.verify(replace(receipt, **changes))
    assert audit.verdict == "altered"
    assert audit.finding.what == what
    assert why in audit.finding.why


def test_a_stop_token_and_a_stop_string_are_named(llm):
    (free,) = llm.receipts(llm.generate("the abc", params(max_tokens=6)))
    stop = replace(free.params, stop_token_ids=free.token_ids[2:3])
    audit = llm.verify(replace(free, params=stop))
    assert audit.finding.position == free.token_ids.index(free.token_ids[2]) + 1
    assert f"the stop token {free.token_ids[2]}" in audit.finding.why
    assert free.text
    audit = llm.verify(replace(free, params=replace(free.params, stop=(free.text[0],))))
    assert f"the stop string {free.text[0]!r}" in audit.finding.why


def test_special_tokens_that_were_shown_are_in_the_text(llm):
    wanted = params(max_tokens=3, logit_bias={264: 100.0})
    (receipt,) = llm.receipts(llm.generate("the abc", wanted))
    shown = replace(receipt, shown_token_ids=(264,))
    assert llm.verify(receipt).verdict == "genuine"
    text = llm.tokenizer.decode_all(receipt.token_ids)
    assert text != receipt.text
    assert llm.verify(replace(shown, text=text)).verdict == "genuine"
    assert llm.verify(shown).finding.what == "text"


@pytest.mark.parametrize("name", ["weights", "dtype", "torch", "threads", "kernels", "code"])
def test_another_environment_is_named_and_accuses_nobody(llm, name):
    (receipt,) = llm.receipts(llm.generate("the abc", params(max_tokens=4)))
    elsewhere = replace(receipt, environment=receipt.environment | {name: "other"})
    audit = llm.verify(elsewhere)
    assert audit.verdict == "genuine"
    assert [(change.name, change.then) for change in audit.changes] == [(name, "other")]
    assert audit.changes[0].now == receipt.environment[name]
    wrong = (*receipt.token_ids[:2], (receipt.token_ids[2] + 1) % 250, receipt.token_ids[3])
    assert llm.verify(replace(elsewhere, token_ids=wrong)).verdict == "cannot tell"
    # Where an answer ends does not depend on roundings, but on the version: old ones had faults.
    cut = llm.verify(replace(elsewhere, token_ids=receipt.token_ids[:2]))
    assert cut.verdict == ("cannot tell" if name in ("weights", "code") else "altered")


def test_nothing_is_proven_without_an_environment_or_without_exactness(folders, llm):
    (receipt,) = llm.receipts(llm.generate("the abc", params(max_tokens=4)))
    wrong = replace(receipt, token_ids=(*receipt.token_ids[:3], (receipt.token_ids[3] + 1) % 250))
    assert llm.verify(wrong).verdict == "altered"
    assert llm.verify(replace(wrong, environment={})).verdict == "cannot tell"
    inexact = load_llm(folders, exact=False)
    (receipt,) = inexact.receipts(inexact.generate("the abc", params(max_tokens=4)))
    wrong = replace(receipt, token_ids=wrong.token_ids)
    audit = inexact.verify(wrong)
    assert audit.verdict == "cannot tell"
    assert [change.name for change in audit.changes] == ["exact"]


def test_a_receipt_survives_json_and_reads_prompts_as_text(llm):
    grammar = Grammar.lark("start: @a", a=Grammar.regex("[a-z]+"))
    changes = {"max_tokens": 3, "stop": ("x",), "ignore_eos": False, "grammar": grammar}
    wanted = asked("bias", 2**64 - 1, **changes)
    (receipt,) = llm.receipts(llm.generate("the abc", wanted))
    value = json.loads(json.dumps(receipt.to_json()))
    assert read_receipt(value, llm.tokenizer) == receipt
    assert value["seed"] == str(2**64 - 1)
    ids = value.pop("prompt_token_ids")
    assert read_receipt(value | {"prompt": "the abc"}, llm.tokenizer) == receipt
    messages = [{"role": "user", "content": "abc"}]
    of_chat = read_receipt(value | {"messages": messages}, llm.tokenizer)
    assert of_chat.prompt_token_ids == tuple(llm.tokenizer.encode_chat(messages))
    short = {"prompt_token_ids": ids, "token_ids": list(receipt.token_ids)}
    assert read_receipt(short, llm.tokenizer).seed == 0
    # Another seed would call a genuine answer altered.
    for options in ({"temperature": 0.5}, {"temperature": 0.5, "seed": 3}):
        with pytest.raises(RequestError, match=r"temperature is 0\.5, but it has no seed"):
            read_receipt(short | {"params": options}, llm.tokenizer)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "other"}, "the receipt is 'other' of format 1"),
        ({"format": 2}, "format 2, and this version reads"),
        ({"bogus": 1}, "unknown field 'bogus'"),
        ({"token_ids": [1, "2"]}, "token_ids is .* list of token ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616; give a number up to"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": None}, "seed is None"),
        ({"prompt": "a"}, "prompt_token_ids and prompt; give one"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [272]}, "token id 272 is outside the vocabulary"),
        ({"prompt_token_ids": [5] * CONTEXT}, "context of 512"),
        ({"params": {"top_p": 7}}, "top_p is 7"),
        ({"params": {"bogus": 7}}, "params have the unknown field 'bogus'"),
        ({"params": {"logit_bias": {"x": 1.0}}}, "logit_bias names 'x'"),
        ({"params": {"grammar": "x"}}, "grammar is 'x'"),
        ({"params": []}, "params is"),
        ({"finish_reason": "error"}, "finish_reason is 'error'"),
        ({"text": 3}, "text is 3"),
        ({"environment": {"a\x1b[2J": 1}}, r"environment has the field 'a\\x1b\[2J'"),
    ],
)
def test_a_malformed_receipt_is_refused(llm, changes, reason):
    (receipt,) = llm.receipts(llm.generate("the abc", params(max_tokens=3)))
    with pytest.raises(RequestError, match=reason):
        llm.verify(receipt.to_json() | changes)
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "the receipt is None"),
        ("{}", "the receipt is '{}'"),
        ({1: 2, "bogus": 3}, "unknown field 1"),
        ({"prompt": "a", "params": {1: 2, "bogus": 3}}, "unknown field 1"),
        ({"environment": {1: 2}}, "environment has the field 1"),
    ],
)
def test_what_is_no_json_object_is_refused(llm, value, reason):
    with pytest.raises(RequestError, match=reason):
        llm.verify(value)


def test_an_answer_without_room_is_refused(folders, monkeypatch):
    llm = load_llm(folders)
    receipt = Receipt(
        prompt_token_ids=(5,), params=params(), seed=0, token_ids=(5,) * (2 * PAGE_SIZE)
    )
    monkeypatch.setattr(llm.engine.target.memory, "reserve", lambda key, num: False)
    with pytest.raises(ConfigError, match=r"no room for an answer of 128 tokens.*--memory"):
        llm.verify(receipt)
    assert_nothing_left(llm)


def test_an_answer_that_failed_has_no_receipt(llm):
    generation = llm.generate("the abc", params(max_tokens=3))
    failed = replace(generation.completions[0], finish_reason="error", error="it broke")
    with pytest.raises(RequestError, match="no receipt: it broke"):
        llm.receipts(replace(generation, completions=(failed,)))
