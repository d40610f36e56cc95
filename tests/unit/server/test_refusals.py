"""Malformed requests: each is answered with a 4xx that names the parameter, and harms nothing."""

import json
import math
import re
import sys
import time
from typing import Any

import pytest
from pydantic import ValidationError

from blockdraft.server.errors import shown
from blockdraft.server.json_route import (
    MAX_MEMBERS,
    MAX_OBJECTS,
    MAX_VALUES,
    _without_texts,
)
from blockdraft.server.messages_api.schema import CountRequest, MessagesRequest
from blockdraft.server.protocol import (
    MAX_TURNS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from blockdraft.server.responses_api.schema import ResponsesRequest
from tests.serving import PATIENCE, chat_body, error_of, running_server
from tests.tiny import CONTEXT, TEXT_VOCAB_SIZE

JSON = {"content-type": "application/json"}
DEPTHS = [10, *range(900, 1_001, 4), *(round(1_000 * 1.4**power) for power in range(11))]
"""Of lists in lists. Where reading and writing them fail depends on Python: near 1,000 in 3.11, and
at tens of thousands since 3.13. No body may have so many brackets that it counts as too large."""
READS_ANY_DEPTH = sys.version_info >= (3, 14)
"""Of a body that does not count as too large."""
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "the abc"}


@pytest.fixture(autouse=True)
def _still_answers(server):
    yield
    assert server.chat(max_tokens=2).status_code == 200
    assert server.client.get("/health").json() == {"status": "ok"}


def message(**fields):
    return {"messages": [{"role": "user", "content": "abc", **fields}]}


SCHEMA = {"name": "a", "schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOL_G = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
STRICT = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "foo"}}}},
}


def as_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def calling(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


OBJECT = {"type": "json_object"}


def named(name):
    return {"type": "function", "function": {"name": name}}


SAMPLING = [
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", [1]),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("n", 0),
    ("n", -3),
    ("n", 10**9),
    ("n", 5000),
    ("n", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "12"),
    ("max_tokens", 10**12),
    ("max_tokens", CONTEXT),
    ("min_tokens", -1),
    ("min_tokens", 1000),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", "x"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", ["a", 5]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [True]),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 1000}),
    ("logit_bias", {str(TEXT_VOCAB_SIZE): 1}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", [5]),
    ("num_draft_tokens", -1),
    ("num_draft_tokens", False),
    ("draft_depth", 0),
    ("speculative", -1),
    ("speculative", "on"),
    ("speculative", 1.5),
    ("stream", "yes"),
    ("stream_options", {"include_usage": "yes"}),
    ("ignore_eos", 1),
    ("include_stop_str_in_output", True),
    ("skip_special_tokens", False),
    ("return_token_ids", "yes"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "json_schema": SCHEMA}),
    ("response_format", {"type": "text", "json_schema": SCHEMA}),
    ("response_format", {"type": "text", "schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": SCHEMA, "schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
    ("response_format", {"type": "json_schema", "json_schema": {**SCHEMA, "strict": "yes"}}),
    ("response_format", {"type": "json_schema", "json_schema": {**SCHEMA, "more": 1}}),
    ("response_format", as_format({"type": "foo"})),
    ("response_format", as_format({"type": "array", "uniqueItems": True})),
    ("response_format", as_format({"$ref": "https://elsewhere.example/schema"})),
    ("response_format", as_format({"type": "string", "pattern": "(?=a)b"})),
    ("response_format", as_format(False)),
    ("response_format", {"type": "xml"}),
    ("response_format", "json"),
    ("structured_outputs", "json"),
    ("structured_outputs", {"json": 5}),
    ("structured_outputs", {"jsn": {}}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": {"type": "foo"}}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": [""]}),
    ("structured_outputs", {"grammar": "start: unknown"}),
    ("structured_outputs", {"structural_tag": "{}"}),
    ("guided_json", {"type": "foo"}),
    ("guided_regex", ""),
    ("guided_choice", "a"),
    ("guided_grammar", "root ::= ("),
    ("length_penalty", 0.5),
    ("max_new_tokens", 5),
]

IN_CHAT = [
    ("messages", []),
    ("messages", "hi"),
    ("messages[0].role", [{}]),
    ("messages", None),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].role", [{"role": "wizard", "content": "x"}]),
    ("messages[0].role", [{"content": "x"}]),
    ("messages[0].tool_calls", [{**calling("{}"), "role": "user", "content": "x"}]),
    ("messages", [calling("{")]),
    ("messages", [calling("[1]")]),
    ("messages[0].tool_calls[0].function", [{"role": "assistant", "tool_calls": [{}]}]),
    ("messages", [{"role": "user", "content": "  "}]),
    ("messages", [{"role": "user", "content": "\ud800"}]),
    ("messages", [{"role": "user", "content": "x" * 4000}]),
    ("top_logprobs", 3),
    ("logprobs", 5),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [STRICT, STRICT]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]),
    ("tools[0]", [STRICT]),
    ("tools[0].type", [{"type": "garbage"}]),
    ("tools", "garbage"),
    ("tools[0].function", [{"type": "function", "function": "garbage"}]),
    ("tool_choice", "required"),
    ("tool_choice", "always"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"tokenize": False}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    ("chat_template_kwargs", 5),
    ("continue_final_message", True),
    ("echo", True),
    ("max_completion_tokens", 12),
    ("prompt", "abc"),
]

IN_TEXT = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [""]),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt", [1, "a"]),
    ("prompt", [[1], "a"]),
    ("prompt", [-1]),
    ("prompt", [TEXT_VOCAB_SIZE]),
    ("prompt", [2**70]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", "\ud800"),
    ("prompt", "x" * 4000),
    ("prompt", [5] * CONTEXT),
    ("prompt", ["a"] * 500),
    ("prompt", ["a"] * 2000),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("best_of", 3),
    ("suffix", "x"),
    ("echo", "yes"),
    ("messages", []),
]


def bare(name):
    return re.match(r"[^.\[]*", name)[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("param", "value"), SAMPLING)
def test_a_bad_parameter_is_named(server, path, param, value):
    body = chat_body() if path == CHAT else {"prompt": "abc"}
    error = error_of(server.post(path, **{**body, param: value}), 400)
    # Who asks for too much for the context is told of the prompt, which is as much to blame.
    blamed = ("messages", "prompt") if param == "max_tokens" else ()
    named = error["param"] or ""
    assert bare(named) == param or named in blamed
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("param", "value"), IN_CHAT)
def test_a_bad_chat_is_refused(server, param, value):
    body = {**chat_body(), bare(param): value}
    error = error_of(server.post(CHAT, **body), 400)
    assert error["param"] in (param, bare(param))


@pytest.mark.parametrize(("param", "value"), IN_TEXT)
def test_a_bad_prompt_is_refused(server, param, value):
    error = error_of(server.post(TEXT, **{"prompt": "abc", param: value}), 400)
    assert bare(error["param"]) == param


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            {"use_beam_search": True},
            "use_beam_search is true: beam search is not supported; leave it out",
        ),
        (
            {"suffix": "x"},
            'suffix is "x": inserting before a suffix is not supported; leave it out',
        ),
        (
            {"repeat_penalty": 2},
            "repeat_penalty is 2: give repetition_penalty instead, or leave it out",
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_the_remedy(server, field, message):
    assert error_of(server.post(TEXT, prompt="abc", **field), 400)["message"] == message


OF_OTHERS = [
    ("max_output_tokens", 5, "max_tokens"),
    ("max_length", 5, "max_tokens"),
    ("instructions", "Be brief.", "messages"),
    ("input", "abc", "messages"),
    ("system", "Be brief.", "messages"),
    ("text", {"format": {"type": "json_object"}}, "response_format"),
    ("stop_sequences", ["a"], "stop"),
    ("eos_token_id", 5, "stop_token_ids"),
    ("thinking", {"type": "disabled"}, "chat_template_kwargs"),
    ("reasoning", {"effort": "low"}, "reasoning_effort"),
    ("enable_thinking", False, "chat_template_kwargs"),
    ("num_return_sequences", 2, "n"),
    ("do_sample", False, "temperature"),
    ("random_seed", 5, "seed"),
    ("penalty_alpha", 0.6, "not supported"),
    ("epsilon_cutoff", 0.1, "not supported"),
    ("dynatemp_range", 0.5, "not supported"),
    ("smoothing_factor", 0.2, "not supported"),
    ("samplers", ["top_k"], "not supported"),
    ("top_n_sigma", 1.0, "not supported"),
    ("repetition_detection", {"max_pattern_size": 4}, "repetition_penalty"),
    ("vllm_xargs", {"a": 1}, "not supported"),
    ("logprob_token_ids", [5], "give logprobs"),
    ("return_tokens_as_token_ids", True, "return_token_ids"),
    ("include_reasoning", False, "ignore"),
    ("custom_logit_processor", "x", "not run"),
    ("lora_path", "x", "not run"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), OF_OTHERS)
def test_a_field_of_another_route_or_engine_is_refused(server, name, value, remedy):
    error = error_of(server.chat(**{name: value}), 400)
    assert error["param"] == name
    assert re.search(rf": .*\b{remedy}\b.*leave it out", error["message"])


def test_values_that_ask_for_what_happens_anyway_are_taken(server):
    neutral = {"text": {"format": {"type": "text"}}, "samplers": [], "dynatemp_range": 0}
    neutral |= {"top_n_sigma": 0, "repetition_detection": {}, "vllm_xargs": {}}
    neutral |= {"logprob_token_ids": [], "include_reasoning": True}
    neutral |= {"return_tokens_as_token_ids": False}
    neutral |= {"do_sample": True, "num_return_sequences": 1, "stop_sequences": [], "input": None}
    response = server.chat(**neutral)
    assert response.status_code == 200
    assert "warning" not in response.headers


@pytest.mark.parametrize("prompt", [[-1], [2**70], [[5], [-1]]])
def test_ids_that_are_none_are_refused_before_they_are_echoed(server, prompt):
    for logprobs in (None, 0):
        error = error_of(server.post(TEXT, prompt=prompt, echo=True, logprobs=logprobs), 400)
        assert error["param"] == "prompt"


def test_more_scores_of_prompts_than_are_written_at_once_are_refused(server, monkeypatch):
    monkeypatch.setattr("blockdraft.server.params.MAX_SCORES", 24)
    scored = {"echo": True, "logprobs": 1, "max_tokens": 0}
    for asked in ({"prompt": [[5] * 6, [5] * 7]}, {"prompt": [5] * 7, "n": 2}):
        error = error_of(server.post(TEXT, **scored, **asked), 400)
        assert error["param"] == "logprobs"
        assert re.search(r"asks for 2[68] log-prob.* at most 24 .*; send fewer", error["message"])
    for asked in ({"prompt": [[5] * 6] * 2}, {"prompt": [5] * 24}):
        assert server.post(TEXT, **scored, **asked).status_code == 200
    for unscored in ({"echo": True}, {"logprobs": 1}):
        answer = server.post(TEXT, prompt=[[5] * 13] * 2, max_tokens=1, **unscored)
        assert answer.status_code == 200


TOGETHER = [
    ("tool_choice", {"tools": [TOOL], "tool_choice": named("g")}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}),
    ("response_format", {"tools": [TOOL], "response_format": as_format({"type": "foo"})}),
    ("tools[0]", {"tools": [STRICT], "response_format": {"type": "json_object"}}),
    ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
    ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}),
    ("structured_outputs.json", {"structured_outputs": {"json": {}}, "response_format": OBJECT}),
    ("tools[1]", {"tools": [TOOL_G, STRICT], "tool_choice": "required"}),
    ("ignore_eos", {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}),
]


@pytest.mark.parametrize(("param", "fields"), TOGETHER)
def test_what_does_not_go_together_is_refused(server, param, fields):
    body = {**chat_body(ignore_eos=False), **fields}
    assert error_of(server.post(CHAT, **body), 400)["param"] == param


def test_a_function_that_cannot_be_called_is_named(server):
    body = chat_body(ignore_eos=False, tools=[TOOL_G, STRICT], tool_choice="required")
    message = error_of(server.post(CHAT, **body), 400)["message"]
    assert message.startswith("the parameters of the function 'f': ")
    assert "foo" in message


def test_a_function_that_may_not_be_called_is_not_blamed(server):
    """It is the other one that the grammar cannot follow; nobody asks for a call of the first."""
    other = {"type": "function", "function": {**STRICT["function"], "name": "other"}}
    body = chat_body(ignore_eos=False, tools=[other, STRICT], tool_choice=named("f"))
    error = error_of(server.post(CHAT, **body), 400)
    assert error["message"].startswith("the parameters of the function 'f': ")
    assert error["param"] == "tools[1]"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_schema_is_refused_before_a_stream_begins(server, path):
    body = chat_body(ignore_eos=False) if path == CHAT else {"prompt": "abc"}
    body = {**body, "response_format": as_format({"type": "foo"}), "stream": True}
    error = error_of(server.post(path, **body), 400)
    assert error["param"] == "response_format"
    assert "foo" in error["message"]


BODIES = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"5",
    b"null",
    b'"text"',
    b'{"prompt": "abc", "prompt"',
    b'{"prompt": "\xff\xfe"}',
    b"\xff\xfe\x00",
    b'{"prompt": "abc", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "abc", "temperature": NaN}',
    b'{"prompt": "abc", "temperature": Infinity}',
    b'{"prompt": "abc", "logit_bias": {"5": NaN}}',
    b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"prompt": "\\ud800"}',
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_no_request_is_refused(server, body):
    headers = {"content-type": "application/json"}
    response = server.client.post(TEXT, content=body, headers=headers)
    assert error_of(response, 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "abc", "prompt"', "at character 26"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8 (invalid start byte at byte 12)"),
        (
            b'{"prompt": "abc", "seed": ' + b"9" * 5000 + b"}",
            "more than 4300 digits; give it fewer",
        ),
        pytest.param(
            b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            "nested too deeply",
            marks=pytest.mark.skipif(READS_ANY_DEPTH, reason="Python reads it"),
        ),
        (b'{"prompt": "abc", "\\ud800": 1}', "not valid Unicode"),
    ],
)
def test_it_is_said_why_a_body_cannot_be_read(server, body, reason):
    headers = {"content-type": "application/json"}
    error = error_of(server.client.post(TEXT, content=body, headers=headers), 400)
    assert reason in error["message"]
    assert error["code"] == "invalid_json"


def test_a_body_of_many_small_parts_is_refused_before_it_is_checked(server):
    parts = [{"type": "text", "text": "a"}] * (MAX_OBJECTS - 4)
    sent = {"messages": [{"role": "user", "content": parts}]}
    response = server.client.post(CHAT, json=sent)
    assert "context" in error_of(response, 400)["message"]  # and not its number of objects
    parts.append(parts[0])
    error = error_of(server.client.post(CHAT, json=sent), 413)
    assert error["code"] == "body_too_large"
    assert "32769 JSON objects and lists, and at most 32768 are accepted" in error["message"]
    lists = {**message(), "metadata": [[]] * MAX_OBJECTS}
    error_of(server.client.post(CHAT, json=lists), 413)
    # Braces of a text are no objects, also behind quotes in it.
    text = {"messages": [{"role": "user", "content": '\\"{[' * (MAX_OBJECTS + 1)}]}
    assert "context" in error_of(server.client.post(CHAT, json=text), 400)["message"]


def test_a_body_of_many_members_is_refused_before_it_is_checked(server):
    members = {f"k{i}": 1 for i in range(MAX_MEMBERS - 8)}
    response = server.client.post(CHAT, json={**chat_body(max_tokens=1), "metadata": members})
    assert response.status_code == 200
    members |= {f"m{i}": 1 for i in range(8)}
    sent = {**chat_body(max_tokens=1), "metadata": members}
    error = error_of(server.client.post(CHAT, json=sent), 413)
    assert (
        "members of objects, and at most 131072 are accepted; send fewer turns" in error["message"]
    )
    # Colons of a text are no members.
    text = {"messages": [{"role": "user", "content": "a: " * (MAX_MEMBERS + 1)}]}
    assert "context" in error_of(server.client.post(CHAT, json=text), 400)["message"]


def test_a_body_of_many_values_is_refused_before_it_is_read(server, monkeypatch):
    sent = {**chat_body(max_tokens=1), "metadata": [5] * (MAX_VALUES - 5)}
    assert server.client.post(CHAT, json=sent).status_code == 200
    sent["metadata"].append(5)
    with monkeypatch.context() as patch:
        patch.setattr("starlette.requests.Request.json", None)  # would fail
        error = error_of(server.client.post(CHAT, json=sent), 413)
    assert "524289 values, and at most 524288 are accepted; send fewer turns" in error["message"]
    # Commas of a text are no values.
    text = {"messages": [{"role": "user", "content": "a, " * (MAX_VALUES + 1)}]}
    assert "context" in error_of(server.client.post(CHAT, json=text), 400)["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_body_in_another_encoding_is_refused(server, encoding):
    """U+2200 has the byte of a quote, behind which values would not be counted."""
    body = json.dumps({**chat_body("\u2200"), "metadata": [5]}, ensure_ascii=False)
    headers = {"content-type": "application/json"}
    sent = server.client.post(CHAT, content=body.encode(encoding), headers=headers)
    assert "send it in UTF-8" in error_of(sent, 400)["message"]
    for spelled in ("utf-8", "utf-8-sig"):
        sent = server.client.post(CHAT, content=body.encode(spelled), headers=headers)
        assert sent.status_code == 200


@pytest.mark.parametrize(
    "text", ["", ",", '"', '\\"', "\\", '\\\\",', '"\\"', "\\\\\\", "a\n", "\u00e9,", '","']
)
def test_texts_are_told_from_the_json_around_them(text):
    body = json.dumps([{text: [text, 5, text + text]}, text]).encode()
    assert _without_texts(body).replace(b'"', b"") == b"[{: [, 5, ]}, ]"
    assert _without_texts(body[: body.rindex(b'"')]).count(b",") == 3


def test_the_beginning_of_a_value_is_written_and_not_all_of_it():
    parts = iter(range(10**6))

    class Unending(list):
        def __iter__(self):
            return parts

    assert shown(Unending([0])) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..."
    assert next(parts) < 100
    assert shown({"a": [1, None]}) == '{"a": [1, null]}'
    assert shown({"a": object()}) == "dict"


def test_a_text_without_an_end_is_read_once(server):
    body = b'{"a": [' + b"[" * MAX_OBJECTS + b']}, "' + rb"\"" * 500_000 + b"\\"
    started = time.perf_counter()
    response = server.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    error_of(response, 413)
    assert time.perf_counter() - started < PATIENCE


MANY = 10_000
WRONG_LISTS = [
    (ChatRequest, {"messages": [5] * MANY}),
    (ChatRequest, {"messages": [{}] * MANY}),
    (ChatRequest, message(content=[5] * MANY)),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [5] * MANY}]}),
    (ChatRequest, {**message(), "tools": [5] * MANY}),
    (ChatRequest, {**message(), "modalities": [5] * MANY}),
    (ChatRequest, {**message(), "stop": [5] * MANY}),
    (ChatRequest, {**message(), "stop_token_ids": ["a"] * MANY}),
    (ChatRequest, {**message(), "logit_bias": {str(i): "a" for i in range(MANY)}}),
    (ChatRequest, {**message(), "structured_outputs": {"choice": [5] * MANY}}),
    (ChatRequest, {**message(), "guided_choice": [5] * MANY}),
    (ChatRequest, {**message(), "prediction": {"content": [5] * MANY}}),
    (CompletionRequest, {"prompt": [None] * MANY}),
    (CompletionRequest, {"prompt": [[None]] * MANY}),
    (CompletionRequest, {"prompt": [[1]] * MANY}),
    (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    (ResponsesRequest, {"input": [5] * MANY}),
    (ResponsesRequest, {"input": [{"role": "user", "content": [5] * MANY}]}),
    (ResponsesRequest, {"input": "a", "include": [5] * MANY}),
    (ResponsesRequest, {"input": "a", "tools": [5] * MANY}),
    (ResponsesRequest, {"input": "a", "logit_bias": {str(i): "a" for i in range(MANY)}}),
    (MessagesRequest, {"messages": [5] * MANY, "max_tokens": 1}),
    (MessagesRequest, {"messages": [{"role": "user", "content": [5] * MANY}], "max_tokens": 1}),
    (MessagesRequest, {"messages": [], "max_tokens": 1, "system": [5] * MANY}),
    (MessagesRequest, {"messages": [], "max_tokens": 1, "tools": [5] * MANY}),
    (MessagesRequest, {"messages": [], "max_tokens": 1, "stop_sequences": [5] * MANY}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG_LISTS, ids=range(len(WRONG_LISTS)))
def test_a_list_is_refused_for_its_first_wrong_item(kind, body):
    """All requests would wait while a fault is told of each."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 10


@pytest.mark.parametrize(
    ("path", "param", "most"),
    [
        (CHAT, "messages", 8192),
        ("/tokenize", "messages", 8192),
        ("/v1/responses", "input", 8192),
        (CHAT, "tools", 128),
        ("/v1/responses", "tools", 128),
    ],
)
def test_too_many_items_are_refused_before_they_are_looked_at(server, path, param, most):
    # Each of them is wrong, which would be told of if the first one had been looked at.
    body = {"input": "abc"} if path == "/v1/responses" else chat_body()
    error = error_of(server.post(path, **{**body, param: [5] * (most + 1)}), 400)
    assert error["param"] == param
    assert f"at most {most} items, not {most + 1}; give fewer" in error["message"]


@pytest.mark.parametrize("param", ["messages", "tools"])
def test_too_many_turns_or_tools_of_messages_are_refused_at_once(param):
    body = {"messages": [], "max_tokens": 1, param: [5] * MANY}
    with pytest.raises(ValidationError, match="should have at most"):
        MessagesRequest.model_validate(body)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_another_kind_of_body_is_refused(server, kind):
    response = server.client.post(TEXT, content=b"prompt=abc", headers={"content-type": kind})
    assert "send Content-Type: application/json" in error_of(response, 415)["message"]


def test_an_unknown_model_is_not_found(server):
    for path in (CHAT, TEXT):
        body = chat_body() if path == CHAT else {"prompt": "abc"}
        error = error_of(server.post(path, **body, model="gpt-9"), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error_of(server.client.get("/v1/models/gpt-9"), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/health", 405), ("PUT", TEXT, 405)],
)
def test_an_unknown_route_is_named_in_the_same_envelope(server, method, path, status):
    error = error_of(server.client.request(method, path), status)
    assert error["message"].startswith(f"{method} {path}: ")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "with /v1"),
        ("/v1/v1/messages", "without /v1"),
        ("/v1/health", "without /v1"),
        ("/v2/messages", "/openapi.json"),
    ],
)
def test_an_address_of_the_other_client_is_put_right(server, path, remedy):
    error = error_of(server.client.post(path, json={}), 404)
    assert f" {remedy} " in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": [], "tools": [TOOL]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_tokens_are_refused(server, path, body, param):
    assert error_of(server.post(path, **body), 400)["param"] == param


NO_TOKENS = {"max_tokens": None, "max_completion_tokens": 0}
TOO_LONG = "this model's maximum context length is exceeded"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1"),
        ({"prediction": {"content": "a\ud800"}}, "prediction", "the text is not valid Unicode"),
        (NO_TOKENS, "max_completion_tokens", "max_completion_tokens is 0"),
        ({"min_tokens": 30}, "min_tokens", "min_tokens is 30 and max_tokens 24; give a min_tokens"),
        (
            {**NO_TOKENS, "max_completion_tokens": 9, "min_tokens": 10},
            "min_tokens",
            "min_tokens is 10 and max_completion_tokens 9; give a min_tokens of at most 9, or",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "ignore_eos",
            "a grammar, such as that of a format, decides where the answer ends; "
            "leave out ignore_eos",
        ),
        ({"echo": True}, "echo", "echo is true: only false is supported; leave it out"),
        (
            {"chat_template": "{{ x }}"},
            "chat_template",
            'chat_template is "{{ x }}": it is not supported; leave it out',
        ),
        ({**NO_TOKENS, "max_completion_tokens": 9**9}, "messages", f"{TOO_LONG}: prompt of"),
    ],
)
def test_what_is_blamed_is_what_was_given(server, fields, param, message):
    error = error_of(server.chat(**fields), 400)
    assert error["param"] == param
    assert error["message"].startswith(message)


HUGE = int("9" * 4300)
"""The longest number that is read, whose double would not be written."""


@pytest.mark.parametrize(
    ("path", "body", "remedy"),
    [
        (TEXT, {"prompt": ["a", "b"], "n": HUGE}, "ask for fewer"),
        (CHAT, {**chat_body(), "n": HUGE}, "ask for fewer"),
        (CHAT, {**chat_body(), "max_tokens": HUGE}, "shorten one of them"),
        (CHAT, {**chat_body(), "min_tokens": HUGE}, "or a higher max_tokens"),
        ("/detokenize", {"tokens": [HUGE]}, f"give ids from 0 to {TEXT_VOCAB_SIZE - 1}"),
        (CHAT, {**chat_body(), "response_format": {"type": "text", "y" * 9**6: 1}}, "leave it out"),
        (CHAT, {**chat_body(), "structured_outputs": {"regex": "(" * 9**5}}, ""),
        (CHAT, {**chat_body(), "structured_outputs": {"grammar": "a" * 9**5}}, ""),
    ],
)
def test_an_error_tells_of_a_long_value_in_short(server, path, body, remedy):
    response = server.post(path, **body)
    message = error_of(response, 400)["message"]
    assert remedy in message
    assert len(response.text) < 4000


def test_both_numbers_of_a_context_that_is_too_long_are_told(server):
    error = error_of(server.complete([5] * 600, max_tokens=7), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("this model's maximum context length is ")
    assert re.search(rf"600 tokens.* 7 .*{CONTEXT} tokens", error["message"])


LARGE = "the abc " * 400_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, message(content=LARGE)),
        (CHAT, {**message(content=LARGE), "tools": [TOOL]}),
        ("/v1/responses", {"input": LARGE}),
        ("/v1/messages", {**message(content=LARGE), "max_tokens": 4}),
        (TEXT, {"prompt": LARGE}),
        (TEXT, {"prompt": [LARGE]}),
        (TEXT, {"prompt": "a", "prediction": {"type": "content", "content": LARGE}}),
    ],
)
def test_megabytes_of_text_are_refused_before_they_are_tokenized(server, monkeypatch, path, body):
    tokenizer, tokenized = server.service.tokenizer, []
    inner = type(tokenizer._tokenizer)
    real = inner.__call__

    def tokenize(self, text, *args, **kwargs):
        tokenized.append(len(text))
        return real(self, text, *args, **kwargs)

    monkeypatch.setattr(inner, "__call__", tokenize)
    monkeypatch.setattr(tokenizer, "backend", Watched(tokenizer.backend, tokenized))
    response = server.post(path, model="tiny", **body)
    error = response.json()["error"]
    assert response.status_code == 400
    found = re.search(
        rf"has (\d+) characters, which are at least \d+ tokens, and there is room for {CONTEXT}; "
        "shorten it",
        error["message"],
    )
    assert found
    assert int(found[1]) >= len(LARGE)
    assert max(tokenized, default=0) < 1000


class Watched:
    """A backend that notes the length of what it encodes."""

    def __init__(self, backend, tokenized):
        self._backend, self._tokenized = backend, tokenized

    def encode(self, text, **options):
        self._tokenized.append(len(text))
        return self._backend.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self._backend, name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(server, value):
    assert error_of(server.complete(temperature=value), 400)["param"] == "temperature"


@pytest.mark.parametrize("tag", ["", "a b", "x" * 33, "ä"])
def test_a_bad_tag_is_refused(server, tag):
    headers = {"x-blockdraft-tag": tag.encode("latin-1")}
    error = error_of(server.client.post(CHAT, json=chat_body(), headers=headers), 400)
    assert error["param"] == "x-blockdraft-tag"


def test_variables_may_be_nested_until_they_are_refused(server):
    statuses = set()
    for depth in DEPTHS:
        nested = "[" * depth + "]" * depth
        body = (
            json.dumps(chat_body(max_tokens=1))[:-1]
            + f', "chat_template_kwargs": {{"a": {nested}}}}}'
        )
        response = server.client.post(CHAT, content=body, headers=JSON)
        statuses.add(response.status_code)
        if response.status_code == 400:
            error = response.json()["error"]
            if "chat template refuses this" in error["message"]:
                assert error["param"] == "chat_template_kwargs"
            else:
                assert "nested too deeply" in error["message"]
    assert statuses == {200, 400}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_too_complex_is_the_mistake_of_its_request(server, stream):
    """Its first token is found, and the next one takes more than the parser may."""
    shape = {"structured_outputs": {"regex": "a{300000}"}, "stream": stream, "ignore_eos": False}
    response = server.chat(**shape)
    if stream:
        *_, last = [line for line in response.text.splitlines() if line]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "structured_outputs.regex"
    assert "cannot be followed further" in error["message"]


def test_the_beginning_of_a_deep_value_is_enough(server):
    nested = json.loads("[" * 900 + "]" * 900)
    assert error_of(server.chat(documents=nested), 400)["param"] == "documents"


@pytest.mark.parametrize("value", ["\ud800", {"a": math.nan}])
def test_what_no_response_can_hold_is_not_told_again(server, value):
    fields = {"input": "abc", "max_output_tokens": 2, "metadata": value, "truncation": value}
    tool = {"type": "function", "name": "f", "parameters": {"default": value}}
    for more in ({}, {"tools": [tool], "tool_choice": "none"}):
        response = server.post("/v1/responses", **fields, **more)
        assert response.status_code == 200, response.text
        assert response.json()["metadata"] == {}
        assert response.json()["truncation"] == "disabled"


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "name": "\ud800", "schema": {"enum": [1]}},
        {"type": "text", "schema": {"default": math.nan}},
    ],
)
def test_an_effort_or_format_that_no_response_can_hold_is_not_told_again(server, wanted):
    fields = {
        "input": "abc",
        "max_output_tokens": 2,
        "reasoning": {"effort": "\ud800"},
        "text": {"format": wanted},
    }
    response = server.post("/v1/responses", **fields)
    assert response.status_code == 200, response.text
    assert response.json()["reasoning"] == {"effort": None}
    assert response.json()["text"] == {"format": {"type": "text"}}


def test_at_no_depth_is_a_body_read_and_its_answer_not_written(server):
    responses = []
    for depth in DEPTHS:
        body = b'{"input": "abc", "max_output_tokens": 1, "metadata": %b}'
        content = body % (b"[" * depth + b"]" * depth)
        responses.append(server.client.post("/v1/responses", content=content, headers=JSON))
    statuses = {response.status_code for response in responses}
    assert statuses == ({200} if READS_ANY_DEPTH else {200, 400})


WITHOUT_EFFECT = {
    "cache_salt": "x",
    "data_parallel_rank": 1,
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "media_io_kwargs": {},
    "mm_processor_kwargs": {"a": 1},
    "skip_reading_prefix_cache": True,
    "truncation_side": "left",
}
CHAT_BODY = chat_body(max_tokens=1)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: CHAT_BODY,
    TEXT: {"prompt": "a", "max_tokens": 1, "temperature": 0},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "temperature": 0},
    "/v1/messages": {"messages": [USER], "max_tokens": 1, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
MODELS = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages"])
def test_what_cannot_change_the_answer_is_taken_even_by_a_strict_server(llm, path):
    with running_server(llm, strict=True) as server:
        response = server.post(path, **BODIES[path], **WITHOUT_EFFECT)
        assert response.status_code == 200, response.text
        assert "warning" not in response.headers


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_generation_prompt", False),
        ("add_special_tokens", True),
        ("chat_template", "x"),
        ("continue_final_message", True),
        ("echo", True),
        ("include_stop_str_in_output", True),
        ("logprobs", True),
        ("reasoning_effort", "low"),
        ("return_token_ids", True),
        ("skip_special_tokens", False),
        ("top_logprobs", 2),
    ],
)
def test_fields_of_chats_that_would_change_other_answers_are_refused(server, path, name, value):
    response = server.post(path, **BODIES[path], **{name: value})
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_null_is_the_same_as_nothing(server, path):
    """Of every field that need not be given, all at once."""
    fields = {
        field.alias or name
        for name, field in MODELS[path].model_fields.items()
        if not field.is_required()
    }
    nulls = dict.fromkeys(fields - BODIES[path].keys())
    changing = ("id", "created", "created_at", "completed_at", "metrics", "usage")

    def told(body: dict[str, Any]) -> Any:
        response = server.post(path, **body)
        assert response.status_code == 200, response.text
        assert "warning" not in response.headers
        found = response.json()
        found.pop("output", None)  # its items have ids; the texts are compared by others
        return {name: value for name, value in found.items() if name not in changing}

    assert told({**BODIES[path], **nulls}) == told(BODIES[path])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_most_turns_may_become_more_of_them(server, monkeypatch, path):
    """With instructions, or results of calls, there are more turns than the client has sent."""
    turns = [{"role": "user", "content": "a"}] * MAX_TURNS
    body = {"input": turns, "instructions": "b"}
    if path == "/v1/messages":
        body = {"messages": turns, "system": "b", "max_tokens": 1}
    response = server.post(path, **body)
    assert response.status_code == 400, "no failure: the context has no room for so many"
    assert "context" in response.json()["error"]["message"]


def test_the_tokens_of_a_text_may_be_asked_for_alone(server, llm):
    for given in (None, True, False):
        found = server.post("/tokenize", prompt="the abc", add_special_tokens=given).json()
        expected = llm.tokenizer.encode("the abc")
        if given is False:
            expected = llm.tokenizer.encode_continuation("the abc")
        assert found["tokens"] == expected
    found = server.post("/tokenize", messages=[USER], add_special_tokens=False).json()
    assert found == server.post("/tokenize", messages=[USER]).json()
