"""POST /v1/messages with Anthropic's own client: text, tools, shapes, streams, refusals."""

import json
from typing import Any

import anthropic
import jsonschema
import pydantic
import pytest

from blockdraft.core.thinking import ThinkingMarks
from blockdraft.server.messages_api.convert import chat_request
from blockdraft.server.messages_api.schema import MessagesRequest
from blockdraft.server.service import Service
from blockdraft.text.call_syntax import TAGGED
from blockdraft.text.tokenizer import THINKING_SWITCH
from tests.schemas import SCHEMAS
from tests.serving import MODEL, chat_body, running_server, saying
from tests.small_llm import load_llm

KEY = "a-key-of-this-test"
PATH = "/v1/messages"
EXTRA = {"ignore_eos": True}
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 24,
    "temperature": 0,
    "messages": [{"role": "user", "content": "the abc"}],
}
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Looks.",
    "input_schema": SCHEMAS["object"],
}
LOOK = '{"name": "abc", "age": 3}'


@pytest.fixture(scope="module")
def server(long_folders):
    with running_server(load_llm(long_folders, max_concurrency=4), api_keys=(KEY,)) as running:
        running.client.headers["x-api-key"] = KEY
        yield running


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def ask(client, **more: Any):
    more = {"extra_body": EXTRA, **more}
    # The newest client leaves the sampling of older models to the extra body.
    body = {**GREEDY, **more}
    sampling = {name: body.pop(name) for name in ("temperature", "top_p", "top_k") if name in body}
    body["extra_body"] = {**sampling, **body["extra_body"]}
    return client.messages.create(**body)


def shown(message) -> list[Any]:
    """The blocks without the ids of calls, which are drawn anew."""
    blocks = [block.to_dict() for block in message.content]
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def joined(events) -> list[Any]:
    """The blocks that the events of a stream add up to."""
    blocks: list[Any] = []
    open_index = None
    for event in events:
        if event.type == "content_block_start":
            assert (open_index, event.index) == (None, len(blocks))
            open_index = event.index
            blocks.append({**event.content_block.to_dict(), "json": ""})
        elif event.type == "content_block_delta":
            assert event.index == open_index
            delta, block = event.delta.to_dict(), blocks[-1]
            kind = delta.pop("type")
            (name,) = delta
            assert delta[name]
            block["json" if kind == "input_json_delta" else name] += delta[name]
        elif event.type == "content_block_stop":
            assert event.index == open_index
            open_index = None
    assert open_index is None
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def events_of(client, **more: Any):
    events = list(ask(client, stream=True, **more))
    assert events[0].type == "message_start"
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    return events


def everyway(client, **more: Any):
    """The message, which must be the same streamed and not, drafted and plain."""
    whole = ask(client, **more)
    events = events_of(client, **more)
    assert joined(events) == shown(whole)
    end = events[-2]
    assert end.delta.stop_reason == whole.stop_reason
    assert end.delta.stop_sequence == whole.stop_sequence
    assert end.usage.output_tokens == whole.usage.output_tokens
    body = {**EXTRA, **more.pop("extra_body", {}), "num_draft_tokens": 0}
    assert shown(ask(client, **more, extra_body=body)) == shown(whole)
    return whole


def chat(server, **more: Any) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    body = json.dumps({**chat_body(), **more})
    return server.client.post("/v1/chat/completions", content=body, headers=headers).json()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3, "top_k": 40}])
def test_a_text_is_the_chat_s_streamed_or_not(server, client, sampling):
    whole = everyway(client, extra_body={**EXTRA, **sampling})
    expected = chat(server, **sampling)
    assert whole.content[0].text == expected["choices"][0]["message"]["content"]
    assert (whole.stop_reason, whole.role, whole.type) == ("max_tokens", "assistant", "message")
    usage = whole.usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert (total, usage.output_tokens) == (expected["usage"]["prompt_tokens"], 24)


def test_events_are_named(server):
    body = {**GREEDY, "max_tokens": 4, "stream": True}
    lines = server.post(PATH, **body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    assert names[:2] == ["message_start", "ping"]
    assert names[-1] == "message_stop"


def test_the_client_s_own_stream(client):
    body = {**GREEDY, "extra_body": {**EXTRA, "temperature": 0}}
    del body["temperature"]
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = ask(client)
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == 24


def test_blocks_become_the_turns_of_a_chat(server, client):
    cached = {"cache_control": {"type": "ephemeral"}}
    found = ask(
        client,
        system=[{"type": "text", "text": "Be kind.", **cached}, {"type": "text", "text": "Hi."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "the ", **cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "fox"},
                ],
            },
            {"role": "user", "content": "abc"},
        ],
    )
    turns = [
        {"role": "system", "content": "Be kind.\n\nHi."},
        {"role": "user", "content": "the "},
        {"role": "assistant", "content": "fox"},
        {"role": "user", "content": "abc"},
    ]
    expected = chat(server, messages=turns)
    assert found.content[0].text == expected["choices"][0]["message"]["content"]


def test_an_answer_that_was_begun_goes_on(server, client):
    turns = [*GREEDY["messages"], {"role": "assistant", "content": "the fox"}]
    expected = chat(
        server, messages=turns, add_generation_prompt=False, continue_final_message=True
    )
    found = ask(client, messages=turns)
    assert found.content[0].text == expected["choices"][0]["message"]["content"]


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "abc?"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": json.loads(LOOK)},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "3"}],
                "is_error": True,
            },
            {"type": "text", "text": "So?"},
        ],
    },
]


def test_calls_and_their_results_go_back_to_the_model(server, client):
    function = {"name": "look", "arguments": LOOK}
    turns = [
        {"role": "user", "content": "abc?"},
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: 3"},
        {"role": "user", "content": "So?"},
    ]
    declared = {"name": "look", "parameters": SCHEMAS["object"], "description": "Looks."}
    tools = [{"type": "function", "function": declared}]
    expected = chat(server, messages=turns, tools=tools)
    found = ask(client, messages=TURNS, tools=[TOOL])
    assert found.content[0].text == expected["choices"][0]["message"]["content"]
    counted = client.messages.count_tokens(
        # What is about to be sent is often counted as it is.
        model=MODEL,
        messages=TURNS,
        tools=[TOOL],
        extra_body={"stop_sequences": ["a"]},
    )
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_calls_that_are_required_are_made(client, choice):
    choice = {**choice, "disable_parallel_tool_use": True}
    wanted = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    whole = everyway(client, **wanted, extra_body={"ignore_eos": False})
    (call,) = whole.content
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "look", "tool_use")
    jsonschema.validate(call.input, SCHEMAS["object"])


def test_text_and_calls_stand_in_their_order(client, monkeypatch):
    call = TAGGED.write("look", LOOK)
    saying(monkeypatch, f"Well.{call} So.{call}\n{call}")
    wanted = {"tools": [TOOL], "max_tokens": 600, "extra_body": {"ignore_eos": False}}
    whole = everyway(client, **wanted)
    kinds = ["text", "tool_use", "text", "tool_use", "tool_use"]
    assert [block.type for block in whole.content] == kinds
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [block.input for block in calls] == [json.loads(LOOK)] * 3
    assert len({block.id for block in calls}) == 3
    assert whole.stop_reason == "tool_use"


def test_a_call_that_is_cut_holds_what_can_be_read(client, monkeypatch):
    saying(monkeypatch, f"Well.{TAGGED.write('look', LOOK)}")
    wanted = {"tools": [TOOL], "extra_body": {"ignore_eos": False}}
    whole = ask(client, **wanted, max_tokens=64)
    assert whole.stop_reason == "max_tokens"
    assert whole.content[1].input in ({}, {"name": "abc"})
    broken = '{"name": no}'
    saying(monkeypatch, TAGGED.write("look", broken))
    whole = ask(client, **wanted, max_tokens=200)
    assert (whole.stop_reason, whole.content[0].input) == ("end_turn", {})
    endless = '{"name": "abc", "age": [1e400, -1e400]}'
    saying(monkeypatch, TAGGED.write("look", endless))
    whole = ask(client, **wanted, max_tokens=200)
    wanted_input = {"name": "abc", "age": [None, None]}
    assert (whole.stop_reason, whole.content[0].input) == ("tool_use", wanted_input)


def test_thinking_stands_in_a_block_of_its_own(client, monkeypatch):
    monkeypatch.setattr("blockdraft.text.tokenizer.Tokenizer.thinks", True)
    saying(monkeypatch, "<think>\nhm\n</think>\n\nabc")
    whole = everyway(client, tools=[TOOL], max_tokens=100, extra_body={"ignore_eos": False})
    kinds = [(block.type, getattr(block, block.type)) for block in whole.content]
    assert kinds == [("thinking", "hm"), ("text", "abc")]
    assert whole.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
def test_a_bad_budget_is_blamed_by_the_name_that_was_given(server, monkeypatch, fields, param):
    known = property(lambda self: ThinkingMarks(start=(60,), end=(65, 66)))
    monkeypatch.setattr("blockdraft.text.tokenizer.Tokenizer.thinking_marks", known)
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "abc"}], **fields}
    reply = server.post("/v1/messages", **body)
    assert reply.status_code == 400
    assert f"{param} is -2" in reply.json()["error"]["message"]


def test_the_budget_of_thinking_is_kept(client, monkeypatch):
    thinking = {"type": "enabled", "budget_tokens": 4}
    free = ask(client, max_tokens=30)
    assert shown(ask(client, thinking=thinking, max_tokens=30)) == shown(free)
    monkeypatch.setattr("blockdraft.text.tokenizer.Tokenizer.thinks", True)
    monkeypatch.setattr("blockdraft.text.tokenizer.Tokenizer.begins_thinking", lambda *_: True)
    marks = ThinkingMarks(start=(60,), end=(65, 66))
    # A property goes before what the tokenizer remembers of the first request.
    known = property(lambda self: marks)
    monkeypatch.setattr("blockdraft.text.tokenizer.Tokenizer.thinking_marks", known)
    chats = []
    chat = Service.chat

    async def noted(self, request, caller):
        chats.append(request)
        return await chat(self, request, caller)

    monkeypatch.setattr(Service, "chat", noted)
    limited = ask(client, thinking=thinking, max_tokens=30)
    assert chats[0].thinking_token_budget == 4
    assert shown(limited) != shown(free)


def test_the_stop_sequence_is_told(client, monkeypatch):
    saying(monkeypatch, "one two three")
    settings = {"tools": [TOOL], "max_tokens": 100, "extra_body": {"ignore_eos": False}}
    whole = everyway(client, stop_sequences=["zz", "two"], **settings)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "two")
    assert whole.content[0].text == "one "
    assert everyway(client, stop_sequences=[], **settings).stop_sequence is None


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_the_client_parses_what_it_asked_for(client):
    body = {**GREEDY, "max_tokens": 300}
    del body["temperature"]
    more = {"temperature": 0, "logit_bias": {"34": 3.0}}
    found = client.messages.parse(**body, output_format=Person, extra_body=more)
    assert isinstance(found.parsed_output, Person)


def test_harmless_fields_change_nothing(client):
    harmless: dict[str, Any] = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "stop_sequences": [],
        "tool_choice": {"type": "none"},
        "extra_body": {**EXTRA, "whatever_comes": 1, "mcp_servers": []},
        "extra_headers": {"anthropic-version": "1999-01-01", "anthropic-beta": "x"},
    }
    assert shown(ask(client, **harmless)) == shown(ask(client))


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": []}, "empty"),
    ({"stop": ["a"]}, "called stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
    ({"n": 2}, "one answer"),
    ({"messages": 3}, "messages"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only Anthropic defines"),
    ({"tools": [{"name": "look"}]}, "input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "the tool's name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sing"}}, "sing"),
    ({"tool_choice": {"type": "any"}}, "no tools are given"),
    ({"mcp_servers": [{"url": "x"}]}, "runs at Anthropic"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "0"),
    ({"temperature": -1}, "temperature"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}}, "foo"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "3"}]}]},
        "tool_use_id",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "an id, a name"),
]


def anthropic_error(response, status, kind):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"}
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    assert body["error"]["type"] == kind
    return body["error"]["message"]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_done_is_refused_with_the_reason(server, changes, reason, is_stream):
    response = server.post(PATH, **{**GREEDY, "stream": is_stream, **changes})
    assert reason in anthropic_error(response, 400, "invalid_request_error")


def test_errors_have_anthropic_s_form_wherever_they_arise(server, client):
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        ask(client, model="claude")
    with pytest.raises(anthropic.AuthenticationError):
        ask(client.with_options(api_key="wrong"))
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        ask(client, messages=[{"role": "user", "content": "a" * 5000}])
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.count_tokens(model="claude", messages=GREEDY["messages"])
    anthropic_error(server.client.get(PATH), 405, "invalid_request_error")
    anthropic_error(server.client.get(f"{PATH}/batches"), 404, "not_found_error")
    wrong = server.client.post(PATH, headers={"x-api-key": "wrong"}, content="{}")
    anthropic_error(wrong, 401, "authentication_error")
    large = server.client.post(PATH, content="x" * (server.service.config.max_body + 1))
    anthropic_error(large, 413, "request_too_large")


def test_the_key_is_taken_in_either_header(server):
    for authorization, key, status in (
        ("", KEY, 200),
        (f"Bearer {KEY}", "", 200),
        ("Basic bWU6c2VjcmV0", KEY, 200),  # for a proxy in front
        ("Bearer of-another-service", KEY, 200),
        (f"Bearer {KEY}", "wrong", 200),
        (f"Basic {KEY}", "", 401),
        (KEY, "", 401),
        ("Bearer wrong", "wrong", 401),
        ("Bearer", "", 401),
    ):
        headers = {"authorization": authorization, "x-api-key": key}
        answer = server.client.post(PATH, headers=headers, json=GREEDY)
        assert answer.status_code == status, headers


def test_the_client_knows_the_id_of_its_request(server, client):
    headers = {"x-request-id": "job-7"}
    assert ask(client, extra_headers=headers)._request_id == "job-7"
    with pytest.raises(anthropic.NotFoundError) as refused:
        ask(client, model="claude", extra_headers=headers)
    assert refused.value.request_id == "job-7"
    assert "request-id" not in server.client.get("/v1/models").headers


def test_a_stream_that_fails_ends_with_its_reason(client, monkeypatch):
    async def fail(self):
        raise RuntimeError("secret")
        yield

    monkeypatch.setattr("blockdraft.server.session.Session.pieces", fail)
    with pytest.raises(anthropic.APIStatusError, match="failed on this request"):
        list(ask(client, stream=True))
    with pytest.raises(anthropic.InternalServerError):
        ask(client)


def test_the_routes_and_their_errors_are_declared(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    for path in (PATH, f"{PATH}/count_tokens"):
        answers = paths[path]["post"]["responses"]
        schema = answers["4XX"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith("AnthropicError")


@pytest.mark.parametrize("with_call", [False, True])
def test_an_answer_that_was_begun_goes_on_unless_it_has_called(with_call):
    blocks: list[dict[str, Any]] = [{"type": "text", "text": "b"}]
    if with_call:
        blocks.append({"type": "tool_use", "id": "c", "name": "look", "input": {}})
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}]
    chat = chat_request(MessagesRequest(max_tokens=1, messages=turns))
    assert chat.continue_final_message is not with_call
    assert chat.add_generation_prompt is with_call


def test_the_client_s_own_switch_of_the_template_counts_more_than_thinking():
    given = {"chat_template_kwargs": {THINKING_SWITCH: True}, "thinking": {"type": "disabled"}}
    chat = chat_request(MessagesRequest(max_tokens=1, messages=[], **given))
    assert chat.chat_template_kwargs == {THINKING_SWITCH: True}
