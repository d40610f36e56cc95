"""Ids of requests, warnings, effort, and comments in streams that wait."""

import asyncio
import re

import openai
import pytest

from blockdraft.server.protocol import TokenizeRequest
from blockdraft.server.responses import EventStream
from tests.serving import PATIENCE, chat_body, error_of, running_server, wait_until
from tests.small_llm import load_llm

CHAT = "/v1/chat/completions"
MADE = re.compile(r"req-[0-9a-f]{24}")


@pytest.fixture(scope="module")
def server(folders):
    with running_server(load_llm(folders), max_body=10_000, api_keys=("key",)) as running:
        running.client.headers["authorization"] = "Bearer key"
        yield running


def sent(server, method, path, **options):
    return server.client.request(method, path, **options)


ROUTES = [
    ("POST", CHAT, {"json": chat_body(max_tokens=2)}, 200),
    ("POST", CHAT, {"json": chat_body(max_tokens=2, stream=True)}, 200),
    ("POST", CHAT, {"json": chat_body(max_tokens=0)}, 400),
    ("POST", CHAT, {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
    ("POST", CHAT, {"content": b"{"}, 415),
    ("POST", CHAT, {"json": chat_body("x" * 20_000)}, 413),
    ("GET", "/v1/models", {}, 200),
    ("GET", "/v1/models", {"headers": {"authorization": "Bearer wrong"}}, 401),
    ("GET", "/nothing", {}, 404),
    ("GET", "/metrics", {}, 200),
]


@pytest.mark.parametrize(("method", "path", "options", "status"), ROUTES)
def test_every_response_has_the_id_that_the_client_gave(
    server, caplog, method, path, options, status
):
    caplog.set_level("DEBUG", "blockdraft")
    headers = {**options.get("headers", {}), "x-request-id": "job-7/a:b_c=@.+"}
    response = sent(server, method, path, **{**options, "headers": headers})
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["job-7/a:b_c=@.+"]
    # The line is written when the response has been sent.
    wait_until(lambda: f"job-7/a:b_c=@.+ {method} {path} {status} " in caplog.text)


GETS = ["/", "/page/page.js", "/version", "/v1/models", "/metrics", "/openapi.json", "/ready"]


@pytest.mark.parametrize("path", GETS)
def test_head_is_answered_as_get_without_the_body(server, path):
    head, get = sent(server, "HEAD", path), sent(server, "GET", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_needs_what_get_needs(server):
    wrong = {"authorization": "Bearer wrong"}
    assert sent(server, "HEAD", "/v1/models", headers=wrong).status_code == 401
    assert sent(server, "HEAD", "/", headers=wrong).status_code == 200
    assert sent(server, "HEAD", CHAT).status_code == 405
    assert sent(server, "HEAD", "/nothing").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/openapi.json", {"GET", "HEAD"}),
        ("GET", CHAT, {"POST"}),
    ],
)
def test_a_wrong_method_is_told_those_that_are_answered(server, method, path, allowed):
    response = sent(server, method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed


BAD_IDS = ["", "a b", "a\tb", "x" * 129, "caf\u00e9", "a;b", '"', "\x7f"]


@pytest.mark.parametrize("given", BAD_IDS)
def test_an_odd_id_is_replaced(server, given):
    headers = {"x-request-id": given.encode("latin-1")}
    ids = {sent(server, "GET", "/v1/models", headers=headers).headers["x-request-id"] for _ in "ab"}
    assert len(ids) == 2
    assert all(MADE.fullmatch(one) for one in ids)


SENT_BY_CLIENTS = "x-request-id, x-stainless-os, x-stainless-async, x-api-key, anthropic-version"


def test_clients_in_pages_of_other_origins_are_let_in_and_told(folders):
    with running_server(load_llm(folders), cors_origins=("http://Page.example/",)) as server:
        asked = {
            "origin": "http://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": SENT_BY_CLIENTS,
        }
        leave = sent(server, "OPTIONS", CHAT, headers=asked)
        assert leave.is_success
        assert leave.headers["access-control-allow-origin"] == "http://page.example"
        assert leave.headers["access-control-allow-headers"] == SENT_BY_CLIENTS
        assert MADE.fullmatch(leave.headers["x-request-id"])
        answer = sent(server, "GET", "/v1/models", headers={"origin": "http://page.example"})
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        exposed = answer.headers["access-control-expose-headers"].lower()
        told = {"x-request-id", "warning", "retry-after", "x-should-retry"}
        assert told <= set(exposed.split(", "))


def test_a_browser_asks_for_leave_without_a_key_and_learns_nothing_else(folders):
    origins = {"cors_origins": ("http://page.example",), "api_keys": ("key",)}
    with running_server(load_llm(folders), **origins) as server:
        asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
        for path in (CHAT, "/nothing"):
            leave = sent(server, "OPTIONS", path, headers=asked)
            assert (leave.status_code, leave.text) == (200, "OK")
        foreign = {**asked, "origin": "http://other.example"}
        assert sent(server, "OPTIONS", CHAT, headers=foreign).status_code == 400
        # What follows needs the key, and so does a question that no browser asks.
        page = {"origin": asked["origin"]}
        for method in ("POST", "OPTIONS"):
            assert sent(server, method, CHAT, headers=page).status_code == 401


def test_prompts_in_the_log_have_the_id(folders, caplog):
    caplog.set_level("INFO", "blockdraft")
    with running_server(load_llm(folders), log_prompts=True) as server:
        server.client.headers["x-request-id"] = "mine"
        assert server.chat("secret word").is_success
    assert re.search(r"prompt chatcmpl-\w+ of request mine: .*secret word", caplog.text)


def test_each_ignored_field_has_a_line_in_the_log(server, caplog):
    caplog.set_level("INFO", "blockdraft")
    fields = {"b\r\nad": 1, **{f"field{i}": {} for i in range(20)}}
    response = server.chat(max_tokens=2, **fields)
    names = ["b??ad", *(f"field{i}" for i in range(7)), "13 more"]
    told = f'299 blockdraft "ignored unknown parameters: {", ".join(names)}"'
    assert response.headers["warning"] == told
    request_id = response.headers["x-request-id"]
    lines = [line for line in caplog.messages if "ignored the unknown" in line]
    assert lines == [f"{request_id} ignored the unknown parameter {name}" for name in names]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_a_strict_server_refuses_unknown_fields(folders, path):
    bodies = {CHAT: chat_body(max_tokens=2), "/detokenize": {"tokens": [5]}}
    body = bodies.get(path, {"prompt": "abc"})
    with running_server(load_llm(folders), strict=True) as server:
        assert server.post(path, **body).is_success
        assert server.post(path, **body, top_z=None).is_success
        error = error_of(server.post(path, **body, top_z=1), 400)
        assert (error["param"], error["code"]) == ("top_z", "unknown_parameter")
    with running_server(load_llm(folders)) as server:
        assert "top_z" in server.post(path, **body, top_z=1).headers["warning"]


def test_unknown_options_of_a_stream_are_told_of_too(server, folders):
    known = {"include_usage": True, "include_obfuscation": False}
    body = chat_body(max_tokens=2, stream=True)
    assert "warning" not in server.post(CHAT, **body, stream_options=known).headers
    options = known | {"include_round": True}
    told = server.post(CHAT, **body, stream_options=options).headers["warning"]
    assert told.endswith('parameters: stream_options.include_round"')
    with running_server(load_llm(folders), strict=True) as strict:
        assert strict.post(CHAT, **body, stream_options=known).is_success
        error = error_of(strict.post(CHAT, **body, stream_options=options), 400)
        assert error["param"] == "stream_options.include_round"


def test_a_strict_server_too_ignores_unknown_fields_of_messages(folders):
    with running_server(load_llm(folders), strict=True) as server:
        messages = [{"role": "user", "content": "abc", "cache_control": {}, "x": 1}]
        assert server.post(CHAT, messages=messages, max_tokens=2).is_success


EFFORTS = [
    ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, "low"),
    ("{{ reasoning_effort }}", {"reasoning_effort": None}, ""),
    (
        "{{ reasoning_effort }}",
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "high",
    ),
    ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
    ("{{ enable_thinking }}", {"reasoning_effort": "low"}, ""),
    ("{{ reasoning_effort }}{{ enable_thinking }}", {"reasoning_effort": "none"}, "noneFalse"),
    ("", {"reasoning_effort": "low"}, ""),
]


@pytest.mark.parametrize(("template", "fields", "found"), EFFORTS)
def test_an_effort_goes_to_a_template_that_knows_it(folders, template, fields, found):
    llm = load_llm(folders)
    llm.tokenizer._tokenizer.chat_template = f"prompt {template}"
    with running_server(llm) as server:
        tokens = server.post("/tokenize", messages=[{"role": "user", "content": "a"}], **fields)
        prompt = llm.tokenizer.decode_all(tokens.json()["tokens"])
        assert prompt.split() == ["prompt", *found.split()]
        assert server.chat(max_tokens=2, **fields).is_success


def test_null_is_the_same_as_nothing():
    given = dict.fromkeys(TokenizeRequest.model_fields)
    assert TokenizeRequest.model_validate(given) == TokenizeRequest()


class Sent:
    """What a stream has sent, and how long it waits for each event."""

    def __init__(self, pauses):
        self.messages = []
        self._pauses = pauses

    async def events(self):
        for number, pause in enumerate(self._pauses):
            await asyncio.sleep(pause)
            yield {"number": number}

    async def send(self, message):
        self.messages.append(message)

    def run(self):
        stream = EventStream(self.events(), failure=lambda _: {}, close=lambda: None, seconds=60)
        serving = stream({}, asyncio.Event().wait, self.send)
        asyncio.run(asyncio.wait_for(serving, PATIENCE))
        return b"".join(message.get("body", b"") for message in self.messages).split(b"\n\n")[:-1]


def test_a_stream_that_waits_sends_comments(monkeypatch):
    monkeypatch.setattr("blockdraft.server.responses.KEEP_ALIVE_SECONDS", 0.02)
    sent = Sent([0.2, 0, 0.2])
    events = sent.run()
    assert sent.messages[0]["type"] == "http.response.start"
    assert [message.get("more_body") for message in sent.messages][-2:] == [True, False]
    comment = b": keep-alive"
    first, third = events.index(b'data: {"number":0}'), events.index(b'data: {"number":2}')
    assert set(events[:first]) == {comment}
    assert events[first + 1] == b'data: {"number":1}'
    assert set(events[first + 2 : third]) == {comment}
    assert events[third + 1 :] == [b"data: [DONE]"]


def test_a_comment_comes_as_soon_after_an_event_as_after_nothing(monkeypatch):
    monkeypatch.setattr("blockdraft.server.responses.KEEP_ALIVE_SECONDS", 1.0)
    events = Sent([0.1, 1.5]).run()
    first, second = (b'data: {"number":%d}' % number for number in range(2))
    assert events == [first, b": keep-alive", second, b"data: [DONE]"]


def test_a_stream_that_flows_sends_none(monkeypatch):
    monkeypatch.setattr("blockdraft.server.responses.KEEP_ALIVE_SECONDS", 0.2)
    events = Sent([0.01] * 50).run()
    assert events == [*(b'data: {"number":%d}' % i for i in range(50)), b"data: [DONE]"]


def test_clients_skip_comments(server, monkeypatch):
    """As OpenAI's client does, which the tests with a real model use."""
    monkeypatch.setattr("blockdraft.server.responses.KEEP_ALIVE_SECONDS", 0.001)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key")
    fields = chat_body(max_tokens=20)
    extra = {"ignore_eos": fields.pop("ignore_eos")}
    chunks = client.chat.completions.create(model="tiny", stream=True, extra_body=extra, **fields)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == server.chat(max_tokens=20).json()["choices"][0]["message"]["content"]
