"""What real traffic does to a server: leaving, filling the queue, cheating, ending."""

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn

from blockdraft import ConfigError
from blockdraft.core.errors import FAILED, EngineDead, exit_status
from blockdraft.server import run
from blockdraft.server.address import bind
from blockdraft.server.config import ServeConfig
from blockdraft.server.guard import Traffic
from blockdraft.server.responses import EventStream
from blockdraft.server.run import DrainingServer, serve
from tests.serving import PATIENCE, chat_body, error_of, read_events, running_server, wait_until
from tests.small_llm import Gate, assert_nothing_left

CHAT = "/v1/chat/completions"


@pytest.fixture
def gate(llm, monkeypatch):
    gate = Gate(llm, monkeypatch)
    yield gate
    gate.let()


def in_background(server, **fields):
    """A request in a thread of its own; the future holds its response."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(server.chat, **fields)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_who_leaves_costs_one_more_step_at_most(llm, gate, stream, num_steps):
    """Before anything was computed, behind the prompt, and in the middle of the answer."""
    with running_server(llm) as server:
        body = json.dumps(chat_body(max_tokens=400, n=2, stream=stream)).encode()
        sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: len(server.service.engine._running) == 2)
        gate.let(num_steps)
        wait_until(lambda: gate.num_steps == num_steps)
        sock.close()
        wait_until(lambda: server.traffic.num_active == 0)
        gate.let(1)  # the engine stands at the gate already
        wait_until(lambda: not server.service.engine._running)
        assert gate.num_steps <= num_steps + 1
        # The engine's thread may still be giving back what the last of them had.
        wait_until(lambda: not llm.engine.drafter._known)
        assert_nothing_left(llm)
        gate.let()
        assert server.chat().status_code == 200


def test_a_full_queue_answers_429(llm, gate):
    with running_server(llm, max_waiting=2) as server:
        waiting = [in_background(server, max_tokens=4) for _ in range(6)]
        engine = server.service.engine
        wait_until(lambda: len(engine._running) + len(engine._queue) == 6)
        gate.let(1)  # the engine may stand at the gate with fewer than it has room for
        wait_until(lambda: (len(engine._running), len(engine._queue)) == (4, 2))
        response = server.chat()
        assert error_of(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        gate.let()
        assert [future.result().status_code for future in waiting] == [200] * 6
        assert server.client.get("/ready").json() == {"ready": True}


def test_a_server_without_a_queue_is_not_ready_while_all_places_are_taken(llm, gate):
    with running_server(llm, max_waiting=0) as server:
        running = in_background(server, max_tokens=40, n=server.service.engine.max_running)
        wait_until(lambda: len(server.service.engine._running) == 4)
        gate.let(1)
        wait_until(lambda: server.service.engine.load().num_running == 4)
        assert server.client.get("/ready").status_code == 503
        assert error_of(server.chat(), 429)["code"] == "queue_full"
        gate.let()
        assert running.result().status_code == 200
        assert server.client.get("/ready").json() == {"ready": True}


def test_a_request_that_can_never_fit_is_no_overload(llm):
    with running_server(llm, max_waiting=2) as server:
        assert server.chat(n=6).status_code == 200
        assert error_of(server.chat(n=7), 400)["param"] == "n"
        assert error_of(server.complete(["a"] * 7), 400)["param"] == "prompt"


def test_a_request_may_take_only_so_long(llm, gate):
    with running_server(llm, request_seconds=0.3) as server:
        response = server.chat()
        error = error_of(response, 408)
        assert error["code"] == "request_timeout"
        assert "queueing included; ask for fewer tokens, or start the server" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        with server.client.stream("POST", CHAT, json=chat_body(stream=True)) as streamed:
            (line,) = [line for line in streamed.iter_lines() if line]
        assert json.loads(line.removeprefix("data: "))["error"]["code"] == "request_timeout"
        gate.let()
        wait_until(lambda: not server.service.engine.load().num_running)


def test_a_request_that_only_waited_is_told_so(llm, gate):
    with running_server(llm, request_seconds=0.3) as server:
        running = in_background(server, n=4)
        wait_until(lambda: len(server.service.engine._running) == 4)
        response = server.chat()
        message = error_of(response, 408)["message"]
        assert "waited 0.3 seconds without getting a place; try again when" in message
        assert response.headers["x-should-retry"] == "false"
        assert "ask for fewer tokens" in error_of(running.result(), 408)["message"]
        gate.let()


def test_a_large_body_is_refused(llm):
    with running_server(llm, max_body=1000) as server:
        for size in (2000, 10 * 2**20):
            error = error_of(server.chat("x" * size), 413)
            assert error["code"] == "body_too_large"
        chunks = (b"x" * 600 for _ in range(4))  # without a length in the head
        response = server.client.post(CHAT, content=chunks)
        error_of(response, 413)
        assert server.chat().status_code == 200


KEYS = ("first-key", "second-key")


def test_keys_open_the_server(llm, caplog):
    with running_server(llm, api_keys=KEYS) as server:
        for key in KEYS:
            headers = {"authorization": f"Bearer {key}"}
            response = server.client.post(CHAT, json=chat_body(), headers=headers)
            assert response.status_code == 200
        wrong = [{}, {"authorization": "Bearer first-ke"}, {"authorization": "first-key"}]
        wrong += [{"authorization": "Basic first-key"}, {"authorization": b"Bearer \xff"}]
        for headers in wrong:
            response = server.client.post(CHAT, json=chat_body(), headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
            assert server.client.get(path).status_code == 401
        for path in ("/health", "/ready"):
            assert server.client.get(path).status_code == 200
    assert "key" not in caplog.text
    assert "first-key" not in repr(ServeConfig(api_keys=KEYS))


def test_prompts_are_logged_only_if_asked_for(llm, caplog):
    caplog.set_level("INFO", "blockdraft")
    with running_server(llm) as server:
        text = server.chat("the secret word").json()["choices"][0]["message"]["content"]
    assert "POST /v1/chat/completions 200" in caplog.text
    assert "secret" not in caplog.text
    with running_server(llm, log_prompts=True) as server:
        server.chat("the secret word")
    assert "secret word" in caplog.text
    assert repr(text) in caplog.text


def test_a_path_writes_no_line_of_its_own_into_the_log(llm, caplog):
    caplog.set_level("INFO", "blockdraft")
    with running_server(llm) as server:
        assert server.client.get("/v1/models/a%0Ablockdraft:%20b%1B%5B2J%C3%A9").status_code == 404
    (line,) = [line for line in caplog.messages if "/v1/models/" in line]
    request_id, rest = line.split(" ", 1)
    assert request_id.startswith("req-")
    assert rest.startswith("GET /v1/models/a%0Ablockdraft%3A%20b%1B%5B2J%C3%A9 404 ")


def test_other_pages_may_ask_only_if_allowed(llm):
    headers = {"origin": "http://page.example"}
    with running_server(llm) as server:
        response = server.client.post(CHAT, json=chat_body(), headers=headers)
        assert "access-control-allow-origin" not in response.headers
    with running_server(llm, cors_origins=("http://page.example",), api_keys=KEYS) as server:
        asked = {**headers, "access-control-request-method": "POST"}
        response = server.client.options(CHAT, headers=asked)
        assert response.headers["access-control-allow-origin"] == "http://page.example"
        other = {**asked, "origin": "http://other.example"}
        refused = server.client.options(CHAT, headers=other)
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("keys", [(), KEYS])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_that_others_reach_without_a_key_says_so(llm, monkeypatch, caplog, host, keys):
    monkeypatch.setattr(DrainingServer, "run", lambda self, sockets: None)
    config = ServeConfig(host=host, port=0, api_keys=keys)
    with bind(config) as sock:
        serve(llm, config, sock)
    told = [record for record in caplog.records if "no API key" in record.message]
    assert bool(told) == (host == "0.0.0.0" and not keys)


def drain(server):
    server.server.handle_exit(signal.SIGTERM, None)
    wait_until(lambda: server.traffic.is_draining)


def test_draining_finishes_what_runs_and_refuses_the_rest(llm, gate):
    with running_server(llm) as server:
        running = [in_background(server, max_tokens=8) for _ in range(3)]
        with server.client.stream("POST", CHAT, json=chat_body(stream=True)) as streamed:
            wait_until(lambda: server.traffic.num_active == 4)
            drain(server)
            health = server.client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert health.json()["active"] == 4
            assert server.client.get("/ready").status_code == 503
            for path in ("/health", "/ready"):
                head = server.client.head(path)
                assert (head.status_code, head.content) == (503, b"")
            assert server.client.get("/metrics").status_code == 200
            refused = server.chat()
            assert error_of(refused, 503)["code"] == "shutting_down"
            assert refused.headers["retry-after"]
            gate.let()
            assert read_events(streamed)
        assert [future.result().status_code for future in running] == [200] * 3
        wait_until(lambda: server.server.should_exit)
        assert server.server.has_answered_all


def test_what_does_not_end_in_time_is_told_so(llm, gate):
    with running_server(llm, drain_seconds=0.2) as server:
        whole = in_background(server)
        with server.client.stream("POST", CHAT, json=chat_body(stream=True)) as streamed:
            wait_until(lambda: server.traffic.num_active == 2)
            drain(server)
            wait_until(lambda: server.service.engine._is_stopping)
            gate.let(1)
            *_, line = [line for line in streamed.iter_lines() if line]
        assert json.loads(line.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert error_of(whole.result(), 503)["code"] == "shutting_down"
        assert whole.result().headers["retry-after"] == "10"


@pytest.mark.slow
def test_a_second_signal_ends_at_once(llm, gate):
    with running_server(llm) as server:
        cut_off = in_background(server)
        wait_until(lambda: server.traffic.num_active == 1)
        drain(server)
        assert not server.server.should_exit
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.server.should_exit
        assert not server.server.has_answered_all
        gate.let(1)
        assert error_of(cut_off.result(), 503)["code"] == "shutting_down"


def test_a_server_answers_what_is_open_and_ends_with_its_engine(llm, gate, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr(llm.engine.target, "forward", fail)
    with running_server(llm) as server:
        running = [in_background(server, n=3) for _ in range(3)]
        wait_until(lambda: server.traffic.num_active == 3)
        gate.let()
        for future in running:
            assert error_of(future.result(), 503)["code"] == "engine_dead"
        wait_until(lambda: server.server.should_exit)
        assert "RuntimeError" in server.server.death
        assert "boom" not in server.server.death
    assert "boom" in caplog.text
    assert "the server stops with its engine" in caplog.text


def test_a_request_with_which_steps_fail_gets_an_error_alone(server, llm, monkeypatch):
    expected = server.chat(seed=1).json()["choices"]
    real = llm.engine.target.forward

    def forward(plan):
        if any(planned.row.sequence.seed == 13 for planned in plan):
            raise RuntimeError("inner secret")
        return real(plan)

    monkeypatch.setattr(llm.engine.target, "forward", forward)
    others = [in_background(server, seed=1) for _ in range(2)]
    error = error_of(server.chat(seed=13), 500)
    assert error["code"] == "internal_error"
    assert error["message"] == "the server failed on this request; the log says why"
    assert [future.result().json()["choices"] for future in others] == [expected] * 2
    assert server.client.get("/health").status_code == 200


def test_a_command_whose_engine_has_ended_fails(monkeypatch):
    def died(self, sockets):
        self.death = "the engine has ended: boom"

    service = SimpleNamespace(
        engine=SimpleNamespace(start=lambda: None, stop=lambda: None),
        model=SimpleNamespace(name="tiny"),
    )
    monkeypatch.setattr("blockdraft.server.run.make_service", lambda *_: service)
    monkeypatch.setattr(DrainingServer, "__init__", lambda *_: None)
    monkeypatch.setattr(DrainingServer, "run", died)
    with bind(ServeConfig(port=0)) as sock, pytest.raises(EngineDead, match="boom"):
        serve(None, ServeConfig(), sock)
    assert exit_status(EngineDead("boom")) == FAILED


def test_a_dead_engine_shows(llm, monkeypatch):
    with running_server(llm) as server:
        monkeypatch.setattr(server.service.engine, "_death", "the engine has ended: boom")
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert "boom" in health.json()["reason"]
        assert server.client.get("/ready").status_code == 503
        assert error_of(server.chat(), 503)["code"] == "engine_dead"


def test_idle_connections_outlast_those_of_a_proxy(monkeypatch):
    monkeypatch.setattr("blockdraft.server.run.create_app", lambda *_: None)
    server = DrainingServer(SimpleNamespace(config=ServeConfig()), Traffic(), drain_seconds=1.0)
    assert server.config.timeout_keep_alive > 60  # of nginx, which then opens another


def test_an_inner_error_tells_nothing_to_the_client(llm, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("inner secret")

    with running_server(llm) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.service, "chat", fail)
            error = error_of(server.chat(), 500)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]
        assert "inner secret" in caplog.text
        assert server.chat().status_code == 200


def test_an_address_that_is_taken_is_refused_at_once():
    with bind(ServeConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            bind(ServeConfig(port=port))
    with pytest.raises(ConfigError, match="cannot listen on nowhere"):
        bind(ServeConfig(host="nowhere.invalid"))
    with pytest.raises(ConfigError, match=r"cannot listen on a+:8000: .*too long.*--host"):
        bind(ServeConfig(host="a" * 64))


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 70_000},
        {"max_waiting": -1},
        {"max_body": 0},
        {"request_seconds": 0.0},
        {"request_seconds": float("inf")},
        {"drain_seconds": -1.0},
        {"api_keys": ("",)},
        {"api_keys": ("ä",)},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        ServeConfig(**options)


def test_a_reader_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr("blockdraft.server.responses.SLOW_READER_SECONDS", 0.0)
    closed = []

    async def events():
        while True:
            yield {"text": "abc"}

    async def stuck(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def serve():
        stream = EventStream(
            events(), failure=lambda error: {}, close=lambda: closed.append(True), seconds=0.1
        )
        await stream({}, asyncio.Event().wait, stuck)

    asyncio.run(asyncio.wait_for(serve(), PATIENCE))
    assert closed == [True]


def test_nothing_is_written_to_a_client_that_has_left(caplog):
    """Many events are ready when it leaves; asyncio warns of those that it writes in vain."""
    has_left = threading.Event()
    num_read = 0

    async def events():
        nonlocal num_read
        yield {"text": "first"}
        has_left.wait(PATIENCE)  # blocks the loop, which cannot notice meanwhile
        for num_read in range(1, 101):
            yield {"number": num_read}

    async def app(scope, receive, send):
        stream = EventStream(events(), failure=lambda _: {}, close=lambda: None, seconds=PATIENCE)
        await stream(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        client = socket.create_connection(listener.getsockname(), PATIENCE)
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        read = b""
        while b"first" not in read:
            read += client.recv(1000)
        # Closed by a reset, not after what is under way.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        has_left.set()
        wait_until(lambda: not server.server_state.tasks)
        server.should_exit = True
        thread.join(PATIENCE)
    assert 0 < num_read < 10
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_connections_that_bring_no_request_are_closed_and_no_others(llm, gate, monkeypatch):
    monkeypatch.setattr(run, "_KEEP_ALIVE_SECONDS", 1.0)
    with running_server(llm) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        silent, slow = (socket.create_connection(address, PATIENCE) for _ in range(2))
        answered = in_background(server, max_tokens=4)
        ends = threading.Event()
        dripping = threading.Thread(target=drip, args=(slow, ends))
        dripping.start()
        try:
            assert has_ended(silent)
            assert has_ended(slow)
            time.sleep(2 * run._KEEP_ALIVE_SECONDS)  # the third one came a little later
        finally:
            ends.set()
            dripping.join()
            gate.let()
            for sock in (silent, slow):
                sock.close()
        assert answered.result().status_code == 200
        assert server.client.get("/health").status_code == 200  # on the same connection, perhaps


def has_ended(sock):
    """True if the server closes before it has sent anything; by a reset if bytes were under way."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def drip(sock, ends):
    """A head that comes byte by byte and is never whole."""
    with suppress(OSError):
        for byte in b"GET /health HTTP/1.1\r\nx-filling: " + b"a" * 1000:
            sock.sendall(bytes([byte]))
            if ends.wait(0.02):
                return


def test_what_is_written_is_sent_at_once(llm):
    """Else the body of an answer would wait until its head is acknowledged."""
    with running_server(llm) as server:
        assert server.client.get("/health").status_code == 200
        (connection,) = server.server.server_state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def connected(server, num_bytes=1):
    """A socket, and what it was to be sent waits for it early: both sides buffer little."""
    (listener,) = server.server.servers[0].sockets
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return sock


LARGE = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("num_requests", [1, 3])
def test_who_reads_nothing_is_given_up(llm, monkeypatch, num_requests):
    """When all is written and the connection rests, and while an answer waits to be written."""
    monkeypatch.setattr(run, "_KEEP_ALIVE_SECONDS", 0.5)
    with running_server(llm) as server, connected(server) as sock:
        sock.sendall(LARGE * num_requests)
        connections = server.server.server_state.connections
        wait_until(lambda: any(c.transport.get_write_buffer_size() for c in connections))
        wait_until(lambda: not connections)
        wait_until(lambda: not server.traffic.num_active)


def test_who_reads_slowly_gets_all(llm, monkeypatch):
    monkeypatch.setattr(run, "_KEEP_ALIVE_SECONDS", 0.5)
    with running_server(llm) as server, connected(server, 2**16) as sock:
        sock.sendall(LARGE * 30)
        num_read = 0
        while piece := sock.recv(50_000):  # until the connection rests for long enough
            num_read += len(piece)
            time.sleep(0.05)
        assert num_read > 30 * len(server.client.get("/openapi.json").content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", ["HTTP/1.0", "HTTP/1.1\r\nconnection: close"])
def test_the_end_of_a_line_behind_the_last_request_costs_no_answer(llm, gate, ending, stream):
    with running_server(llm) as server:
        body = json.dumps(chat_body(max_tokens=4, stream=stream)).encode()
        head = f"POST {CHAT} {ending}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, PATIENCE) as sock:
            sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: server.service.engine._running)
            sock.sendall(b"\r\n")
            wait_until(lambda: server.client.get("/health").status_code == 200)
            gate.let()
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason":"length"' in answer


def test_the_end_of_a_line_between_two_requests_costs_none_of_them(llm):
    with running_server(llm) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, PATIENCE) as sock:
            for ending in (b"\r\n", b"\n", b""):
                sock.sendall(ending)
                wait_until(lambda: server.client.get("/health").status_code == 200)
                sock.sendall(ending + b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}"):
                    answer += sock.recv(1000)
                assert answer.startswith(b"HTTP/1.1 200")


def test_a_process_without_a_free_file_goes_on(llm, caplog):
    """It takes no connection meanwhile, says so once a second, and answers those that it has."""
    with running_server(llm) as server, ExitStack() as stack:
        assert server.client.get("/health").status_code == 200
        late = [stack.enter_context(socket.socket()) for _ in range(3)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_open = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, limits[1]))
            while True:
                try:
                    stack.callback(os.close, os.dup(0))
                except OSError:
                    break
            for sock in late:
                sock.settimeout(PATIENCE)
                sock.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            time.sleep(1.5)
            assert server.client.get("/health").status_code == 200
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for sock in late:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    told = [record for record in caplog.records if "out of system resource" in record.message]
    assert 1 <= len(told) < 20


def test_a_body_with_two_lengths_is_refused_and_nothing_read_behind_it(llm):
    """As requests that are smuggled past a proxy have it."""
    with running_server(llm) as server:
        body = json.dumps(chat_body()).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, PATIENCE) as sock:
            sock.sendall(
                head.encode() + chunks + b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
            )
            answers = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answers.startswith(b"HTTP/1.1 400")
    assert b"both Content-Length and Transfer-Encoding" in answers
    assert answers.count(b"HTTP/1.1") == 1


def test_what_is_no_http_behind_an_answer_closes_the_connection(llm, caplog):
    with running_server(llm) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, PATIENCE) as sock:
            head = b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
            sock.sendall(head)
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            sock.sendall(b"this is no length of a chunk\r\n")
            assert sock.recv(1000) == b""
    assert not [record for record in caplog.records if record.name == "asyncio"]
