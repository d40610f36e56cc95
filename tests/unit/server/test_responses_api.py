"""POST /v1/responses with OpenAI's own client: text, tools, shapes, streams, refusals."""

import json
import time
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from blockdraft.server.responses_api.convert import chat_request
from blockdraft.server.responses_api.schema import ResponsesRequest
from blockdraft.text.call_syntax import TAGGED
from tests.schemas import SCHEMAS
from tests.serving import (
    MODEL,
    chat_body,
    error_of,
    running_server,
    saying,
    wait_until,
)
from tests.small_llm import load_llm

KEY = "a-key-of-this-test"
PATH = "/v1/responses"
EXTRA = {"ignore_eos": True}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": SCHEMAS["object"],
    "strict": False,
}
LOOK = '{"name": "abc", "age": 3}'


@pytest.fixture(scope="module")
def server(long_folders):
    with running_server(load_llm(long_folders, max_concurrency=4), api_keys=(KEY,)) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def fields(**more: Any) -> dict[str, Any]:
    basic = {"model": MODEL, "input": "the abc", "max_output_tokens": 24, "temperature": 0}
    return {**basic, "extra_body": EXTRA, **more}


def ask(client, **more: Any):
    return client.responses.create(**fields(**more))


def chat_text(server, **more: Any) -> str:
    return str(server.chat(**more).json()["choices"][0]["message"]["content"])


def shown(response) -> list[Any]:
    """The output without what is drawn anew for each answer."""
    items = [item.model_dump(exclude_none=True) for item in response.output]
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def streamed(client, **more: Any):
    """The events of a stream, and the response at its end."""
    events = list(ask(client, stream=True, **more))
    return events, events[-1].response


def everyway(client, **more: Any):
    """The response, which must be the same streamed and not, drafted and plain."""
    whole = ask(client, **more)
    events, last = streamed(client, **more)
    plain = ask(client, **{**more, "extra_body": {**EXTRA, "num_draft_tokens": 0}})
    assert shown(last) == shown(whole) == shown(plain)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert joined(events) == [item.to_dict() for item in last.output]
    assert events[-1].type == f"response.{whole.status}"
    assert last.status == whole.status
    return whole


def joined(events) -> list[Any]:
    """The items that the events of a stream add up to."""
    items: dict[int, Any] = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.output_index] = {"item": event.item.to_dict(), "text": ""}
        elif event.type.endswith(".delta"):
            assert event.delta
            assert event.item_id == items[event.output_index]["item"]["id"]
            items[event.output_index]["text"] += event.delta
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert event.text == items[event.output_index]["text"]
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == items[event.output_index]["text"]
        elif event.type == "response.output_item.done":
            found = items[event.output_index]
            done = event.item.to_dict()
            assert {k: done[k] for k in ("id", "type")} == {
                k: found["item"][k] for k in ("id", "type")
            }
            text = done["arguments"] if done["type"] == "function_call" else None
            assert (done["content"][0]["text"] if text is None else text) == found["text"]
            found["item"] = done
    return [found["item"] for found in items.values()]


def test_a_text_is_the_chat_s_streamed_or_not(server, client):
    for settings in ({}, {"temperature": 0.9, "extra_body": {**EXTRA, "seed": 3}}):
        sampling = {"temperature": 0.9, "seed": 3} if settings else {}
        whole = ask(client, **settings)
        assert whole.output_text == chat_text(server, **sampling)
        assert shown(streamed(client, **settings)[1]) == shown(whole)
    whole = everyway(client)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.store is False
    assert whole.usage.output_tokens == 24
    assert whole.usage.total_tokens == whole.usage.input_tokens + 24
    chat = server.chat().json()["usage"]
    assert whole.usage.input_tokens == chat["prompt_tokens"]


def test_events_are_named_and_there_is_no_done(server):
    body = {"input": "the abc", "max_output_tokens": 4, "stream": True}
    lines = server.post(PATH, **body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    assert names[-1] in ("response.completed", "response.incomplete")


def test_the_client_s_own_stream_and_async_client(client):
    with client.responses.stream(**fields(extra_body={})) as stream:
        pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(pieces) == ask(client, extra_body={}).output_text


ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "the "}]},
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "fox", "annotations": [], "logprobs": []}],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    {"type": "message", "role": "user", "content": "abc"},
]


def test_items_become_the_turns_of_a_chat(server, client):
    turns = [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "the "},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "abc"},
    ]
    expected = server.post("/v1/chat/completions", **{**chat_body(), "messages": turns}).json()
    found = ask(client, input=ITEMS, instructions="Be kind.")
    assert found.usage.input_tokens == expected["usage"]["prompt_tokens"]
    assert found.output_text == expected["choices"][0]["message"]["content"]


CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": LOOK}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}


def test_calls_and_their_results_go_back_to_the_model(server, client):
    function = {"name": "look", "arguments": LOOK}
    turns = [
        {"role": "user", "content": "abc?"},
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    tool = {"type": "function", "function": {k: TOOL[k] for k in ("name", "description")}}
    tool["function"]["parameters"] = TOOL["parameters"]
    body = {**chat_body(), "messages": turns, "tools": [tool]}
    expected = server.post("/v1/chat/completions", **body).json()
    said = {"role": "assistant", "content": "Well."}
    items = [{"role": "user", "content": "abc?"}, said, CALL, RESULT]
    bare = {name: value for name, value in TOOL.items() if name != "strict"}
    found = ask(client, input=items, tools=[bare])
    assert found.usage.input_tokens == expected["usage"]["prompt_tokens"]
    as_parts = {**RESULT, "output": [{"type": "input_text", "text": "3"}]}
    again = ask(client, input=[*items[:3], as_parts], tools=[bare])
    assert again.output_text == found.output_text


def test_calls_that_are_required_are_made(client):
    settings = {"tools": [TOOL], "max_output_tokens": 200, "extra_body": {}}
    named = {"type": "function", "name": "look"}
    settings["tools"].append({**TOOL, "name": "wait"})
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        whole = ask(client, tool_choice=choice, parallel_tool_calls=False, **settings)
        assert whole.tool_choice.to_dict() == choice
        last = streamed(client, tool_choice=choice, parallel_tool_calls=False, **settings)[1]
        assert shown(last) == shown(whole)
        (call,) = whole.output
        assert (call.type, call.name, whole.status) == ("function_call", "look", "completed")
        jsonschema.validate(json.loads(call.arguments), SCHEMAS["object"])


def test_text_and_calls_stand_in_their_order(client, monkeypatch):
    call = TAGGED.write("look", LOOK)
    saying(monkeypatch, f"Well.{call} So.{call}\n{call}")
    wanted = {"tools": [TOOL], "max_output_tokens": 600, "extra_body": {}}
    whole, (events, last) = ask(client, **wanted), streamed(client, **wanted)
    assert joined(events) == [item.to_dict() for item in last.output]
    assert shown(whole) == shown(last)
    kinds = ["message", "function_call", "message", "function_call", "function_call"]
    assert [item.type for item in whole.output] == kinds
    assert whole.output_text == "Well. So."
    assert {item.arguments for item in whole.output if item.type == "function_call"} == {LOOK}
    with client.responses.stream(**fields(**wanted)) as stream:
        final = stream.get_final_response()
    assert shown(final) == shown(whole) or final.output_text == whole.output_text


def test_an_answer_that_is_cut_says_so_of_its_last_item(client, monkeypatch):
    saying(monkeypatch, f"Well.{TAGGED.write('look', LOOK)}")
    wanted = {"tools": [TOOL], "max_output_tokens": 50, "extra_body": {}}
    whole = ask(client, **wanted)
    assert [item.status for item in whole.output] == ["completed", "incomplete"]
    assert whole.output[1].arguments
    assert LOOK.startswith(whole.output[1].arguments)
    assert shown(streamed(client, **wanted)[1]) == shown(whole)


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_the_client_parses_what_it_asked_for(client):
    settings = fields(max_output_tokens=300, extra_body={"logit_bias": {"34": 3.0}})
    found = client.responses.parse(**settings, text_format=Person)
    assert isinstance(found.output_parsed, Person)
    assert found.text.format.type == "json_schema"
    text = ask(client, text={"format": {"type": "text"}, "verbosity": "low"}).output_text
    assert text == ask(client).output_text


def test_harmless_fields_change_nothing(client):
    expected = ask(client).output_text
    harmless: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "user": "me",
        "service_tier": "flex",
        "truncation": "auto",
        "prompt_cache_key": "x",
        "safety_identifier": "y",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_tool_calls": 3,
        "top_logprobs": 0,
        "extra_body": {**EXTRA, "whatever_comes": 1, "background": False},
    }
    found = ask(client, **harmless)
    assert found.output_text == expected
    assert found.metadata == {"a": "b"}
    assert found.store is False


def test_unknown_fields_are_told_of(server):
    for path, name in ((PATH, "input"), ("/v1/messages", "messages")):
        turns = [{"role": "user", "content": "abc"}]
        most = "max_output_tokens" if path == PATH else "max_tokens"
        body = {name: turns, most: 2, "whatever_comes": 1, "n": 1, "metadata": {}}
        response = server.post(path, **body)
        assert response.status_code == 200, response.text
        assert "whatever_comes" in response.headers["warning"]
        assert "metadata" not in response.headers["warning"]
        assert response.headers["warning"].endswith('parameters: whatever_comes"')


@pytest.mark.parametrize(
    ("path", "field"),
    [(PATH, {"max_tokens": 3}), (PATH, {"n": 2}), ("/v1/messages", {"stop": "a"})],
)
def test_a_field_that_is_refused_is_not_called_ignored(server, path, field):
    fields = {"input": "abc"} if path == PATH else {**chat_body("abc"), "ignore_eos": None}
    response = server.post(path, **fields, **field)
    assert response.status_code == 400
    assert "warning" not in response.headers


def test_shapes_in_the_words_of_other_engines_are_kept(client):
    extra = {"structured_outputs": {"choice": ["red", "blue"]}}
    assert ask(client, extra_body=extra).output_text in ("red", "blue")


def allowed(*tools):
    return {"type": "allowed_tools", "mode": "auto", "tools": list(tools)}


REFUSED = [
    ({"max_tokens": 3}, "max_tokens", "called max_output_tokens"),
    ({"n": 2}, "n", "one answer"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores nothing"),
    ({"conversation": "conv_1"}, "conversation", "stores nothing"),
    ({"prompt": {"id": "p"}}, "prompt", "stores nothing"),
    ({"background": True}, "background", "stores no responses"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "supports only functions"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "by its name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "the mode auto"),
    (
        {"tools": [TOOL], "tool_choice": allowed({"type": "function", "name": "sing"})},
        "tool_choice",
        "names 'sing', which is not among the tools",
    ),
    (
        {"tools": [TOOL], "tool_choice": allowed({"type": "mcp", "server_label": "x"})},
        "tool_choice",
        "'mcp', 'server_label': 'x'}; give auto, none, required, a function by its name, or",
    ),
    ({"tools": [TOOL], "tool_choice": allowed()}, "tool_choice", "at least one of the tools"),
    ({"tool_choice": "required"}, "tool_choice", "no tools are given"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "stores nothing"),
    ({"input": [{"type": "computer_call"}]}, "input[0]", "computer_call"),
    ({"input": []}, "input", "empty"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "reads text only",
    ),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
    ({"input": 3}, "input", "3"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"max_output_tokens": 10**6}, "input", "maximum context length"),
    ({"max_output_tokens": 10**6}, "input", "max_output_tokens"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"include": ["message.output_text.logprobs"]}, "include", "log-probabilities"),
    ({"top_logprobs": 2}, "top_logprobs", "only /v1/chat/completions gives log-probabilities"),
    ({"logprobs": True}, "logprobs", "only /v1/chat/completions gives log-probabilities"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "name"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}}},
        "text.format",
        "foo",
    ),
]


@pytest.mark.parametrize(("changes", "param", "reason"), REFUSED)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_done_is_refused_with_the_reason(server, changes, param, reason, is_stream):
    body = {"input": "the abc", "max_output_tokens": 8, "stream": is_stream, **changes}
    error = error_of(server.post(PATH, **body), 400)
    assert error["param"] == param
    assert reason in error["message"]


MANY = 60_000
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": LOOK}


@pytest.mark.parametrize(
    "item",
    [
        CALL,
        {"role": "developer", "content": "x" * 200},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 200}]},
    ],
)
def test_many_items_of_a_kind_take_no_seconds(item):
    # More than are taken of a client, for a difference that is clear.
    request = ResponsesRequest(input="")
    request.input = ResponsesRequest(input=[item]).input * MANY
    started = time.process_time()
    messages = chat_request(request).messages
    assert time.process_time() - started < 3
    assert len(messages) <= 1


def test_items_join_to_turns():
    think = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "q"}
    items = [system, system, user, think, think, CALL, CALL, think, CALL, system]
    found = chat_request(ResponsesRequest(instructions="i", input=items)).messages
    assert [(turn.role, turn.content) for turn in found] == [
        ("system", "i\n\na\n\na"),
        ("user", "q"),
        ("assistant", ""),
        ("assistant", ""),
        ("system", "a"),
    ]
    assert [len(turn.tool_calls or ()) for turn in found] == [0, 0, 2, 1, 0]
    assert [turn.reasoning_content for turn in found] == [None, None, "hmhm", "hm", None]


def test_errors_are_the_client_s_own(client):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        ask(client, model="gpt-9")
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="wrong"))
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, input="a" * 5000)


def test_a_stream_that_fails_ends_with_its_reason(server, client, monkeypatch):
    async def fail(self):
        raise RuntimeError("secret")
        yield

    monkeypatch.setattr("blockdraft.server.session.Session.pieces", fail)
    events = list(ask(client, stream=True))
    assert [event.type for event in events][-1] == "response.failed"
    assert events[-1].response.error.code == "internal_error"
    assert "secret" not in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError):
        ask(client)


def test_the_schema_of_the_route_is_declared(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    assert "requestBody" in paths[PATH]["post"]


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
def test_who_leaves_stops_the_work(server, path):
    most = "max_output_tokens" if path == PATH else "max_tokens"
    body: dict[str, Any] = {most: 3000, "temperature": 0, "stream": True}
    turns = [{"role": "user", "content": "the abc"}]
    body |= {"input" if path == PATH else "messages": turns, **EXTRA}
    with server.client.stream("POST", path, json=body) as response:
        assert next(response.iter_lines()).startswith("event: ")
    wait_until(lambda: server.traffic.num_active == 0)
    wait_until(lambda: not server.service.engine._running)
    assert not server.service.engine._queue


def test_the_thinking_of_an_answer_that_was_cut_stays_before_the_next_question():
    think = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [
        {"role": "user", "content": "a"},
        think,
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    found = chat_request(ResponsesRequest(input=items)).messages
    assert [(turn.role, turn.content, turn.reasoning_content) for turn in found] == [
        ("user", "a", None),
        ("assistant", "", "hm"),
        ("user", "b", None),
        ("assistant", "c", None),
    ]
