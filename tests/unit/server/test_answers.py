"""What the server answers: the same as LLM, streamed or not, in the form that clients expect."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blockdraft import SamplingParams
from blockdraft.core.config import LLMConfig
from blockdraft.core.plan import ROOT, Proposal, Tree
from blockdraft.engine.completion import Completion, Timings
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.server import run
from blockdraft.server.params import completion_params
from blockdraft.server.protocol import CompletionRequest
from blockdraft.server.render import request_metrics, usage
from tests.serving import MODEL, chat_body, error_of, running_server
from tests.small_llm import load_llm
from tests.tiny import CONTEXT

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "the abc"}]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def other(folders):
    """Another LLM of the same pair, to compare with while the first one serves."""
    return load_llm(folders)


def joined(events):
    """Content and finish reason of each choice of a chat stream."""
    texts, ends = {}, {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            if choice["finish_reason"]:
                assert index not in ends
                ends[index] = choice["finish_reason"]
    return texts, ends


SETTINGS = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.2, "seed": 4, "n": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "logit_bias": {"5": 4.0}, "min_tokens": 3},
    {"num_draft_tokens": 0},
    {"num_draft_tokens": 2, "temperature": 0.9, "seed": 3},
    {"stop": ["e", "zz"], "temperature": 1.0, "seed": 9},
]


def as_params(fields):
    changes = dict(fields)
    if "logit_bias" in changes:
        changes["logit_bias"] = {int(i): bias for i, bias in changes["logit_bias"].items()}
    if "stop" in changes:
        changes["stop"] = tuple(changes["stop"])
    return replace(PARAMS, **changes)


@pytest.mark.parametrize("fields", SETTINGS)
def test_a_chat_is_answered_as_llm_does_streamed_or_not(server, other, fields):
    expected = other.chat(MESSAGES, as_params(fields)).completions
    whole = server.chat(**fields).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [completion.text for completion in expected]
    ends = [choice["finish_reason"] for choice in whole["choices"]]
    assert ends == [completion.finish_reason for completion in expected]
    streamed, streamed_ends = joined(server.events(CHAT, **chat_body(**fields)))
    assert [streamed[i] for i in range(len(texts))] == texts
    assert [streamed_ends[i] for i in range(len(texts))] == ends


@pytest.mark.parametrize("fields", SETTINGS)
def test_a_text_is_continued_as_llm_does_streamed_or_not(server, other, fields):
    prompts = ["abc", "the fox"]
    expected = other.generate(prompts, as_params(fields))
    texts = [c.text for generation in expected for c in generation.completions]
    whole = server.complete(prompts, **fields).json()
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    body = {"prompt": prompts, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    streamed = dict.fromkeys(range(len(texts)), "")
    for event in server.events(TEXT, **body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts


def test_top_k_of_other_engines_for_all_tokens_is_ours():
    request = CompletionRequest(prompt="abc", top_k=-1)
    assert completion_params(request, num_prompt=1, max_context=9).top_k == 0


def test_prompts_may_be_token_ids(server, other):
    ids = other.tokenizer.encode("the fox")
    text = other.generate("the fox", PARAMS).completions[0].text
    for prompt in ("the fox", ids, [ids], ["the fox"]):
        assert server.complete(prompt).json()["choices"][0]["text"] == text
    mixed = server.complete([ids, other.tokenizer.encode("abc")]).json()
    assert len(mixed["choices"]) == 2


def test_the_fingerprint_is_another_one_where_the_text_may_be():
    def fingerprint(threads=1, drafter="one", **options):
        loaded = SimpleNamespace(
            config=LLMConfig(**options),
            dtype=torch.float32,
            device="cpu",
            devices=["cpu"],
            num_threads=threads,
        )
        return run._fingerprint(loaded, drafter)

    others = [
        fingerprint(threads=2),
        fingerprint(quantize="int4"),
        fingerprint(kv_cache_dtype="int8"),
        fingerprint(target="another"),
        fingerprint(exact=False),
        fingerprint(exact=False, drafter="two"),
    ]
    assert len({fingerprint(), *others}) == 1 + len(others)
    assert fingerprint(drafter="two", lookup=True, max_concurrency=3) == fingerprint()


def test_the_envelope_is_openai_s(server):
    answer = server.chat().json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == MODEL
    assert re.fullmatch(r"blockdraft-[\w.]+-[0-9a-f]{10}", answer["system_fingerprint"])
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["logprobs"] is None
    events = server.events(CHAT, **chat_body())
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in events)


def test_usage_adds_up(server):
    answer = server.chat(n=2, temperature=1, seed=5).json()
    usage = answer["usage"]
    assert usage["completion_tokens"] == 48
    assert usage["total_tokens"] == usage["prompt_tokens"] + 48
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    plain = server.chat(num_draft_tokens=0).json()["usage"]["completion_tokens_details"]
    assert plain == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_every_candidate_of_a_tree_counts_and_not_only_its_depths():
    stats, tree = AcceptanceStats(), Tree((5, 6, 7), (ROOT, ROOT, 1))
    for kept in ([1, 2], [0], []):
        stats.record(len(kept) + 1, Proposal(tree, (1.0,) * 3, ("test",) * 3), kept)
    one = Completion(0, (5,) * 6, "", "length", 0, None, stats, Timings(0.1, 0.5, 0.6, 10.0))
    details = usage([], 6, [one])["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6}
    speculation = request_metrics([one], 2)["speculative_decoding"]
    assert (speculation["num_draft_tokens"], speculation["num_accepted_draft_tokens"]) == (9, 3)


def test_the_usage_of_a_stream_comes_last(server):
    whole = server.chat().json()["usage"]
    events = server.events(CHAT, **chat_body(stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["completion_tokens"]
    assert events[-1]["metrics"]["time_to_first_token_ms"] > 0
    assert all(event["usage"] is None for event in events[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, **chat_body(stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 24


def test_what_was_computed_before_is_cached(server):
    text = "a long text that nobody has asked about " * 8
    first = server.complete(text).json()["usage"]
    again = server.complete(text).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]


def test_metrics_of_a_request_have_vllm_s_schema(server):
    metrics = server.chat(max_tokens=60).json()["metrics"]
    timing = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"}
    assert set(metrics) == timing | {"tokens_per_second", "speculative_decoding"}
    found = metrics["speculative_decoding"]
    steps, accepted = found["num_spec_steps"], found["num_accepted_draft_tokens"]
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert found["draft_acceptance_rate"] == pytest.approx(accepted / found["num_draft_tokens"])
    assert sum(found["acceptance_histogram"]) == steps
    assert sum(i * n for i, n in enumerate(found["acceptance_histogram"])) == accepted
    by_length = found["acceptance_histogram_by_draft_length"]
    assert sum(map(sum, by_length.values())) == steps
    assert found["num_spec_tokens"] == 16  # a prediction may be that long
    drafted = sum(int(length) * sum(counts) for length, counts in by_length.items())
    assert drafted == found["num_draft_tokens"]
    assert server.chat(num_draft_tokens=0).json()["metrics"]["speculative_decoding"] is None
    assert server.chat(speculative=False).json()["metrics"]["speculative_decoding"] is None
    assert server.chat(n=2).json()["metrics"] is None


def test_chat_logprobs(server, other):
    answer = server.chat(logprobs=True, top_logprobs=2).json()
    expected = other.chat(MESSAGES, replace(PARAMS, logprobs=2)).completions[0]
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [e["logprob"] for e in entries] == [e.logprob for e in expected.logprobs]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode(errors="replace") == answer["choices"][0]["message"]["content"]
    body = chat_body(logprobs=True, top_logprobs=2)
    streamed = [e["choices"][0]["logprobs"] for e in server.events(CHAT, **body)]
    assert [entry for s in streamed if s for entry in s["content"]] == entries


def test_text_logprobs_and_echo(server, other):
    prompt = "the quick fox"
    whole = server.complete(prompt, echo=True, logprobs=1).json()["choices"][0]
    plain = server.complete(prompt, logprobs=1).json()["choices"][0]
    assert whole["text"] == prompt + plain["text"]
    num_prompt = len(other.tokenizer.encode(prompt))
    found = whole["logprobs"]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in found["token_logprobs"][1:])
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert found[name][num_prompt:] == plain["logprobs"][name]
    assert found["text_offset"][num_prompt] == len(prompt)
    assert "".join(found["tokens"][:num_prompt]) == prompt
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    events = server.events(TEXT, **body, echo=True, logprobs=1)
    for name, values in found.items():
        streamed = [e["choices"][0]["logprobs"] for e in events]
        assert [value for s in streamed if s for value in s[name]] == values


def test_no_event_holds_what_clients_take_for_the_end_of_a_line(server):
    text = "a\u2028b\u2029c\x85d\x1ce"
    body = {"prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "echo": True}
    events = server.events(TEXT, **body)  # httpx splits as str.splitlines does
    whole = server.complete(text, max_tokens=2, echo=True).json()["choices"][0]["text"]
    assert whole.startswith(text)
    assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_offsets_are_places_in_the_text(server, other):
    """Its first token has no text, and its other letters have several tokens each."""
    prompt = "<|start|>thé 🙂 abc"
    ids = other.tokenizer.encode(prompt)
    fields = {"logprobs": 0, "temperature": 2.0, "seed": 4}
    whole = server.complete(ids, echo=True, **fields).json()["choices"][0]
    shown = prompt.removeprefix("<|start|>")
    assert whole["text"].startswith(shown)
    found = whole["logprobs"]
    assert found["text_offset"][0] == found["text_offset"][1] == 0
    assert found["text_offset"][len(ids)] == len(shown)
    for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[
        1 : len(ids)
    ]:
        assert token.startswith("bytes:") or whole["text"].startswith(token, offset)
    plain = server.complete(ids, **fields).json()["choices"][0]["logprobs"]
    assert plain["text_offset"] == [at - len(shown) for at in found["text_offset"][len(ids) :]]
    body = {"prompt": ids, "max_tokens": 24, "ignore_eos": True, "echo": True, **fields}
    streamed = [event["choices"][0]["logprobs"] for event in server.events(TEXT, **body)]
    assert [at for one in streamed if one for at in one["text_offset"]] == found["text_offset"]


@pytest.mark.parametrize("num_missing", [1, 2, 3])
def test_offsets_behind_a_prompt_that_ends_within_a_character(server, other, num_missing):
    """What follows does not complete it: an echo is the prompt's text and the answer's."""
    ids = other.tokenizer.encode("abc 🙂")[:-num_missing]
    fields = {"logprobs": 0, "temperature": 2.0, "seed": 4}
    whole = server.complete(ids, echo=True, **fields).json()["choices"][0]
    plain = server.complete(ids, **fields).json()["choices"][0]
    length = len(whole["text"]) - len(plain["text"])
    offsets = whole["logprobs"]["text_offset"][len(ids) :]
    assert offsets == [length + at for at in plain["logprobs"]["text_offset"]]


@pytest.mark.parametrize("num_top", [0, 2])
def test_the_tokens_of_a_text_are_among_its_top_logprobs(server, num_top):
    fields = {"temperature": 2.0, "seed": 1, "logprobs": num_top, "echo": True}
    found = server.complete("the quick fox", **fields).json()["choices"][0]["logprobs"]
    entries = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    for token, logprob, top in list(entries)[1:]:
        assert top[token] == logprob
        assert num_top <= len(top) <= num_top + 1


def test_a_text_can_be_scored_alone(server, other):
    ids = other.tokenizer.encode("the quick fox")
    answer = server.complete([ids], echo=True, logprobs=1, max_tokens=0).json()
    choice = answer["choices"][0]
    assert choice["text"] == "the quick fox"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    longer = server.complete([ids], echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert longer["logprobs"]["token_logprobs"][:-1] == choice["logprobs"]["token_logprobs"]


def test_a_text_as_long_as_the_context_cannot_be_scored_and_no_field_is_blamed_for_it(server):
    longest = server.service.engine.max_tokens
    assert server.complete([[5] * (longest - 1)], echo=True, max_tokens=0).status_code == 200
    refused = server.complete([[5] * longest], echo=True, max_tokens=0)
    error = error_of(refused, 400)
    assert "leaves no room in the context" in error["message"]
    assert "max_tokens" not in error["message"]


def test_token_ids_are_returned_if_asked_for(server, other):
    expected = other.chat(MESSAGES, PARAMS)
    answer = server.chat(return_token_ids=True).json()
    assert tuple(answer["choices"][0]["token_ids"]) == expected.completions[0].token_ids
    choice = server.complete("abc", return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == other.tokenizer.encode("abc")


def test_without_a_limit_an_answer_may_fill_the_context(server):
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    answer = server.post(CHAT, **body).json()
    assert answer["usage"]["total_tokens"] == CONTEXT
    text = server.post(TEXT, prompt="abc", ignore_eos=True).json()
    assert text["usage"]["completion_tokens"] == 16
    short = server.chat(max_completion_tokens=5, max_tokens=None).json()
    assert short["usage"]["completion_tokens"] == 5


def test_messages_may_come_in_parts_and_with_fields_that_clients_send_back(server):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "abc"}]
    messages = [{"role": "user", "content": parts}]
    whole = server.chat().json()["choices"][0]["message"]
    again = server.post(CHAT, **{**chat_body(), "messages": messages}).json()
    assert again["choices"][0]["message"] == whole
    added = {"tool_calls": None, "annotations": [], "provider_specific_fields": {"refusal": None}}
    turns = [*MESSAGES, {**whole, **added}, *MESSAGES]
    assert server.post(CHAT, **{**chat_body(), "messages": turns}).status_code == 200


def test_fields_without_effect_are_accepted(server):
    plain = server.chat().json()["choices"]
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "model": MODEL,
    }
    assert server.chat(**fields).json()["choices"] == plain


def test_the_last_message_can_be_continued(server, other):
    turns = [*MESSAGES, {"role": "assistant", "content": "the quick"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ids = other.tokenizer.encode_chat(turns, options)
    expected = other.generate(ids, PARAMS).completions[0].text
    answer = server.post(CHAT, **{**chat_body(), "messages": turns, **options}).json()
    assert answer["choices"][0]["message"]["content"] == expected


def test_tokens_and_back(server, other):
    ids = other.tokenizer.encode("naïve € abc")
    found = server.post("/tokenize", prompt="naïve € abc", return_token_strs=True).json()
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["max_model_len"] == CONTEXT
    assert len(found["token_strs"]) == len(ids)
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "naïve € abc"}
    chat = server.post("/tokenize", messages=MESSAGES).json()
    assert chat["tokens"] == other.tokenizer.encode_chat(MESSAGES)
    assert "<|start|>" in server.post("/detokenize", tokens=chat["tokens"]).json()["prompt"]


def test_the_model_is_listed(server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT)
    assert server.client.get(f"/v1/models/{MODEL}").json() == model
    assert set(server.client.get("/version").json()) == {"version"}
    assert server.client.get("/docs").status_code == 404


def test_the_description_of_the_routes_has_their_errors_as_they_are(server):
    described = server.client.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answers = described["paths"][path]["post"]["responses"]
        assert set(answers) == {"200", "4XX", "5XX"}
        schema = answers["4XX"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}
    error = described["components"]["schemas"]["ErrorDetail"]["properties"]
    assert set(error) == {"message", "type", "param", "code"}
    answers = described["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(answers) == {"application/json", "text/event-stream"}
    metrics = described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert set(metrics) == {"text/plain"}


def test_characters_are_never_split_in_a_stream(server, other):
    """Of single bytes that are no text, every piece is text, and whole ones come in one piece."""
    euro = other.tokenizer.encode("€€🙂é")
    bias = {str(i): 30.0 for i in set(euro)}
    fields = {"temperature": 2.0, "seed": 8, "logit_bias": bias, "max_tokens": 80}
    whole = server.chat(**fields).json()["choices"][0]["message"]["content"]
    assert set(whole) & set("€🙂é")
    texts, _ = joined(server.events(CHAT, **chat_body(**fields)))
    assert texts[0] == whole


def test_stop_strings_never_leak(server):
    """Whatever is drafted in one block: no piece of a stop string is ever sent."""
    whole = server.chat(max_tokens=60).json()["choices"][0]["message"]["content"]
    for start in range(0, len(whole) - 4, 3):
        stop = whole[start : start + 4]
        events = server.events(CHAT, **chat_body(max_tokens=60, stop=[stop]))
        texts, ends = joined(events)
        assert texts[0] == whole[: whole.index(stop)]
        assert ends[0] == "stop"


def test_thinking_comes_apart_from_the_answer(folders, other):
    llm = load_llm(folders)
    llm.tokenizer._tokenizer.chat_template += (
        "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{# </think> #}"
    )
    expected = llm.generate(llm.tokenizer.encode_chat(MESSAGES), PARAMS).completions[0].text
    with running_server(llm) as server:
        message = server.chat().json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (expected.lstrip(), "")
        deltas = [e["choices"][0]["delta"] for e in server.events(CHAT, **chat_body())]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == expected.lstrip()
        assert not any(d.get("content") for d in deltas)
        plain = server.chat(chat_template_kwargs={"enable_thinking": False}).json()
        text = other.chat(MESSAGES, PARAMS).completions[0].text
        assert plain["choices"][0]["message"]["content"] == text
        assert "reasoning_content" not in plain["choices"][0]["message"]
        turns = [*MESSAGES, {"role": "assistant", "content": "x", "reasoning_content": "y"}]
        assert server.post(CHAT, **{**chat_body(), "messages": [*turns, *MESSAGES]}).is_success


def test_a_sample_that_fails_says_so(server, monkeypatch):
    real = server.service.engine._engine.target.forward

    def forward(plan):
        output = real(plan)
        return replace(output, logits=output.logits * math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(server.service.engine._engine.target, "forward", forward)
        error = error_of(server.chat(), 500)
        assert "are not numbers" in error["message"]
        body = {**chat_body(), "stream": True}
        with server.client.stream("POST", CHAT, json=body) as response:
            (line,) = [line for line in response.iter_lines() if line]
        assert "are not numbers" in line
    assert server.chat().status_code == 200
