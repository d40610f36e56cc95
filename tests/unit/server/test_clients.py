"""A table of requests as clients send them: each gets what it asks for, or a reason that holds."""

import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.client_requests import CITIES, FORCED, REQUESTS, SCHEMA, USER, Accepted, Refused, Sent
from tests.serving import error_of, read_events, running_server
from tests.small_llm import load_llm

BASE = {"model": "tiny", "temperature": 0}
SHORT, LONG = 8, 200
LOOKED_AT = ("tools", "tool_choice")


@pytest.fixture(scope="module")
def server(long_folders):
    with running_server(load_llm(long_folders, max_concurrency=4)) as running:
        yield running


def cases(kind: type) -> Any:
    chosen = [sent for sent in REQUESTS if isinstance(sent.expected, kind)]
    return pytest.mark.parametrize("sent", chosen, ids=[sent.client for sent in chosen])


def body_of(sent: Sent) -> dict[str, Any]:
    is_short = isinstance(sent.expected, Accepted) and sent.expected.kind == "text"
    limit = (
        {} if "max_completion_tokens" in sent.body else {"max_tokens": SHORT if is_short else LONG}
    )
    fields = {**BASE, **limit, **sent.body}
    return fields if not sent.is_chat else {"messages": [USER], **fields}


def test_there_are_many_of_them_and_no_two_are_called_the_same():
    assert len({sent.client for sent in REQUESTS}) == len(REQUESTS) >= 60


@cases(Refused)
def test_a_refusal_names_the_parameter_and_the_reason(server, sent):
    error = error_of(server.post(sent.path, **body_of(sent)), 400)
    assert error["param"] == sent.expected.param
    assert sent.expected.reason in error["message"]


@pytest.mark.one_in(3)
@cases(Accepted)
def test_an_answer_is_of_the_kind_that_was_asked_for(server, sent):
    for text, calls, end in answers(server, sent):
        assert end in ("stop", "length", "tool_calls")
        assert (end == "tool_calls") == bool(calls)
        check(sent.expected.kind, text, calls)


@pytest.mark.one_in(4)
@cases(Accepted)
def test_the_client_is_told_of_what_is_ignored(server, sent):
    response = server.post(sent.path, **body_of(sent))
    told = response.headers.get("warning", "")
    if not sent.expected.ignored:
        assert told == ""
        return
    found = re.fullmatch(r'299 blockdraft "ignored unknown parameters: (.*)"', told)
    assert found[1].split(", ") == list(sent.expected.ignored)


READ = [s for s in REQUESTS if isinstance(s.expected, Accepted) and s.expected.reads]


@pytest.mark.parametrize("sent", READ, ids=[sent.client for sent in READ])
def test_the_model_reads_what_was_said(server, sent):
    fields = {name: sent.body[name] for name in LOOKED_AT if name in sent.body}
    tokens = server.post("/tokenize", messages=sent.body["messages"], **fields).json()["tokens"]
    prompt = server.post("/detokenize", tokens=tokens).json()["prompt"]
    for words in sent.expected.reads:
        assert words in prompt
    for words in sent.expected.reads_not:
        assert words not in prompt


class Trip(pydantic.BaseModel):
    """SCHEMA, as a user of OpenAI's client writes it."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # of the client's own classes
def test_what_openai_parses_can_be_sent_back(server, client):
    """By the client itself: as its object, and as the dictionary that the object dumps."""
    fields = {"model": "tiny", "temperature": 0, "max_tokens": LONG, "response_format": Trip}
    answer = client.chat.completions.parse(messages=[USER], **fields)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Trip)
    for echo in (message, message.model_dump(), message.to_dict()):
        again = client.chat.completions.parse(messages=[USER, echo, USER], **fields)
        assert isinstance(again.choices[0].message.parsed, Trip)


def test_calls_that_openai_parses_can_be_sent_back(server, client):
    tools = [openai.pydantic_function_tool(Trip, name="get_weather")]
    fields = {"model": "tiny", "temperature": 0, "max_tokens": LONG, "tools": tools}
    wanted = {**fields, "tool_choice": FORCED, "parallel_tool_calls": False}
    message = client.chat.completions.parse(messages=[USER], **wanted).choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Trip)
    found = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    for echo in (message, message.model_dump()):
        answer = client.chat.completions.create(messages=[USER, echo, found, USER], **fields)
        assert answer.choices[0].finish_reason


def check(kind: str, text: str, calls: list[dict[str, str]]) -> None:
    if calls:
        assert kind in ("call", "call or json")
        for call in calls:
            assert call["name"] == "get_weather"
            jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
        return
    assert kind != "call"
    if kind in ("json", "call or json"):
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "choice":
        assert text in CITIES
    elif kind == "number":
        assert re.fullmatch("[0-9]{3}", text)


def answers(server, sent):
    """Text, calls and finish reason of each choice."""
    body = body_of(sent)
    if body.get("stream"):
        with server.client.stream("POST", sent.path, json=body) as response:
            assert response.status_code == 200, response.read()
            return [joined(read_events(response))]
    response = server.post(sent.path, **body)
    assert response.status_code == 200, response.text
    return [whole(choice) for choice in response.json()["choices"]]


def whole(choice):
    if "text" in choice:
        return choice["text"], [], choice["finish_reason"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] or "", calls, choice["finish_reason"]


def joined(events):
    text, calls, end = "", [], None
    for choice in [choice for event in events for choice in event["choices"]]:
        delta = choice.get("delta", choice)
        text += delta.get("content") or delta.get("text") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        end = choice["finish_reason"] or end
    return text, calls, end
