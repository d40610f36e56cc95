"""What is done before a request waits for the engine: bounded, in time, and at nobody's cost."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import median

import httpx
import pytest

from blockdraft import Grammar, RequestError
from blockdraft.server.app import MAX_CHARACTERS, MAX_IDS
from blockdraft.server.preparing import MAX_GRAMMAR
from tests.serving import PATIENCE, chat_body, error_of, running_server, wait_until
from tests.tiny import CONTEXT

CHAT = "/v1/chat/completions"
SLOW = "made slow"
KEYS = ("one", "other", "third")


@pytest.fixture
def gate(llm, monkeypatch):
    """Grammars that say so are not compiled before it opens."""
    gate, grammars = threading.Event(), llm.samples.grammars
    real = grammars._compile

    def compile_slowly(grammar):
        if SLOW in grammar.source:
            gate.wait(PATIENCE)
        return real(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    yield gate
    gate.set()


_number = count()


def with_schema(title="quick", **schema):
    """A request with a schema that no other has."""
    schema = {"title": title, "$comment": str(next(_number)), "type": "boolean", **schema}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return chat_body(response_format=shape, ignore_eos=False)


def send(server, body, key=KEYS[0], client=None):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return (client or server.client).post(CHAT, content=json.dumps(body), headers=headers)


def client_of_many(server):
    """Keeps a connection for each; closing some of them at once is more than httpx can do."""
    limits = httpx.Limits(max_connections=300, max_keepalive_connections=300)
    return httpx.Client(base_url=server.url, timeout=PATIENCE, limits=limits)


def steps_of(llm, monkeypatch):
    steps, real = [], llm.engine.advance

    def step(only=None):
        steps.append(1)
        real(only)

    monkeypatch.setattr(llm.engine, "advance", step)
    return steps


def test_200_slow_schemas_delay_nobody_else(llm, gate, monkeypatch):
    steps = steps_of(llm, monkeypatch)
    seconds = 5.0
    with (
        running_server(llm, api_keys=KEYS, prepare_seconds=seconds) as server,
        client_of_many(server) as client,
        ThreadPoolExecutor(200) as pool,
    ):
        alone = send(server, chat_body(max_tokens=4), KEYS[1]).json()
        num_alone = len(steps)
        sent = time.monotonic()
        slow = [pool.submit(send, server, with_schema(SLOW), KEYS[0], client) for _ in range(200)]
        # Four are compiled, 35 wait, half of all places, and there is no place for the others.
        wait_until(lambda: sum(one.done() for one in slow) >= 161)
        # All that have a place are stuck, and the others are served as if they were not there.
        for key in (KEYS[1], KEYS[0]):
            steps.clear()
            answer = send(server, chat_body(max_tokens=4), key).json()
            assert answer.get("choices") == alone["choices"], answer
            assert len(steps) <= num_alone + 1
        assert send(server, with_schema(), KEYS[1]).status_code == 200
        assert sum(one.done() for one in slow) < 200
        answers = [one.result() for one in slow]
        waited = time.monotonic() - sent
        assert {answer.status_code for answer in answers} == {408, 429}
        stuck = [answer for answer in answers if answer.status_code == 408]
        assert len(stuck) == 4  # the threads of one client
        message = error_of(stuck[0], 408)["message"]
        assert "5 s" in message
        assert "make it simpler" in message
        assert waited < PATIENCE
        # Another client compiles while the threads are still stuck; all can when they are not.
        assert send(server, with_schema(), KEYS[2]).status_code == 200
        gate.set()
        wait_until(lambda: not server.service.preparing._grammars._num_busy)
        assert send(server, with_schema()).status_code == 200


def test_many_requests_with_one_new_schema_compile_it_once(llm, gate, monkeypatch):
    compiled, grammars = [], llm.samples.grammars
    slow = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda g: compiled.append(1) or slow(g))
    with running_server(llm, max_waiting=64) as server, ThreadPoolExecutor(40) as pool:
        body = with_schema(SLOW)
        answers = [pool.submit(server.post, CHAT, **body) for _ in range(40)]
        wait_until(lambda: server.service.engine.load().num_preparing == 40)
        gate.set()
        assert {answer.result().status_code for answer in answers} == {200}
        assert len(compiled) == 1


def test_429_comes_before_the_work(llm, gate, monkeypatch):
    """What is being prepared counts as well as what is queued."""
    with running_server(llm, max_waiting=2) as server, ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(server.post, CHAT, **with_schema(SLOW), n=2) for _ in range(3)]
        wait_until(lambda: server.service.engine.load().num_preparing == 6)
        assert server.client.get("/ready").status_code == 503
        assert "blockdraft:num_requests_preparing" in server.client.get("/metrics").text
        with monkeypatch.context() as patch:
            patch.setattr(server.service, "prompts", None)  # would fail
            response = server.chat()
            assert error_of(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
            assert error_of(server.complete(["a", "b"]), 429)
        gate.set()
        assert [one.result().status_code for one in slow] == [200] * 3
        assert server.service.engine.load().num_preparing == 0
        assert server.chat().status_code == 200


def test_whoever_leaves_while_a_grammar_is_compiled_gives_the_place_back(llm, gate):
    with running_server(llm, max_waiting=0) as server:
        body = {**with_schema(SLOW), "n": 4}
        with pytest.raises(Exception, match="timed out"):
            server.client.post(CHAT, json=body, timeout=0.3)
        wait_until(lambda: server.service.engine.load().num_preparing == 0)
        assert server.chat(n=4).status_code == 200


def test_a_prompt_that_takes_too_long_is_told_so(llm, gate, monkeypatch):
    with running_server(llm, prepare_seconds=0.2) as server:
        with monkeypatch.context() as patch:
            patch.setattr(
                server.service.tokenizer, "encode_chat", lambda *_, **__: gate.wait(PATIENCE)
            )
            error = error_of(server.chat(), 408)
        assert "tokenizing the prompt takes longer than 0.2 s; send less" in error["message"]
        assert server.chat().status_code == 200


def test_a_queue_of_grammars_does_not_compile_them_in_the_engine(llm, monkeypatch):
    """More than are kept: each is held by the request that waits with it."""
    threads, grammars = set(), llm.samples.grammars
    real = grammars._compile

    def compile_here(grammar):
        threads.add(threading.current_thread().name)
        return real(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_here)
    with running_server(llm, max_waiting=200) as server, ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: server.post(CHAT, **with_schema()), range(100)))
        assert {answer.status_code for answer in answers} == {200}
    assert threads == {"compiling the grammar"}


def test_a_grammar_may_have_only_so_many_characters(llm):
    with running_server(llm) as server:
        body = with_schema(description="x" * MAX_GRAMMAR)
        error = error_of(server.post(CHAT, **body), 400)
        assert error["param"] == "response_format"
        assert str(MAX_GRAMMAR) in error["message"]
        # Those that a grammar refers to count too.
        part = Grammar.json_schema({"description": "x" * MAX_GRAMMAR})
        whole = Grammar.lark("start: @part", part=part)
        with pytest.raises(RequestError, match=f"at most {MAX_GRAMMAR} are"):
            asyncio.run(server.service.preparing.grammar(whole, "one"))


def test_a_conversation_may_have_only_so_many_messages(llm):
    with running_server(llm) as server:
        messages = [{"role": "user", "content": "a"}] * (CONTEXT + 1)
        for path in (CHAT, "/tokenize"):
            error = error_of(server.post(path, messages=messages), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/tokenize", {"prompt": "a" * (MAX_CHARACTERS + 1)}, MAX_CHARACTERS),
        ("/detokenize", {"tokens": [5] * (MAX_IDS + 1)}, MAX_IDS),
    ],
)
def test_only_so_much_is_converted(llm, path, body, limit):
    with running_server(llm) as server:
        error = error_of(server.post(path, **body), 413)
        assert error["param"] in body
        assert f"{limit + 1} " in error["message"]
        assert f"at most {limit}" in error["message"]


def test_converting_much_leaves_the_event_loop_alone(llm, monkeypatch):
    """The longest text and list that are taken."""
    threads = []
    with running_server(llm) as server:
        tokenizer = server.service.tokenizer
        for name in ("encode", "decode_all"):
            real = getattr(tokenizer, name)

            def convert(value, real=real):
                threads.append(threading.current_thread().name)
                return real(value)

            monkeypatch.setattr(tokenizer, name, convert)
        text = "the abc " * (MAX_CHARACTERS // 8)
        assert server.post("/tokenize", prompt=text).json()["count"] > 100_000
        assert server.post("/detokenize", tokens=[5] * MAX_IDS).status_code == 200
    assert threads == 2 * ["converting the tokens"]


def test_who_converts_holds_up_no_request(llm, gate, monkeypatch):
    with running_server(llm, max_waiting=2) as server, ThreadPoolExecutor(20) as pool:
        tokenizer = server.service.tokenizer
        monkeypatch.setattr(tokenizer, "encode", lambda *_: gate.wait(PATIENCE) and [])
        stuck = [pool.submit(server.post, "/tokenize", prompt="abc") for _ in range(20)]
        wait_until(lambda: sum(one.done() for one in stuck) >= 15)
        assert server.chat().status_code == 200
        gate.set()
        assert {one.result().status_code for one in stuck} == {200, 429}


@pytest.mark.slow
def test_schemas_that_are_really_slow_delay_nobody(llm):
    """As many properties as OpenAI allows: seconds of work each, on all processors."""
    names = [f"p{i}" for i in range(5000)]
    properties = {name: {"type": "integer"} for name in names}
    bodies = [with_schema(type="object", properties=properties) for _ in range(200)]
    with (
        running_server(llm, max_waiting=256, api_keys=KEYS) as server,
        client_of_many(server) as client,
        ThreadPoolExecutor(200) as pool,
    ):

        def seconds_of_chat():
            asked = time.monotonic()
            assert send(server, chat_body(max_tokens=4), KEYS[1]).status_code == 200
            return time.monotonic() - asked

        alone = median(seconds_of_chat() for _ in range(20))
        slow = [pool.submit(send, server, body, KEYS[0], client) for body in bodies]
        compiling = server.service.preparing._grammars
        wait_until(lambda: server.traffic.num_active > 100)
        during = [seconds_of_chat() for _ in range(40) if compiling._num_busy]
        assert len(during) > 20
        assert median(during) < alone + 0.2
        answers = [one.result() for one in slow]
        # What is compiled in time cannot be followed: so many properties are too many alternatives.
        assert not [a.text for a in answers if a.status_code not in (200, 400, 408, 429)]
