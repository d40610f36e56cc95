"""What a server needs where it is deployed: a path prefix, a log for machines, clear refusals."""

import gzip
import io
import json
import logging
import socket
import sys

import pytest

from blockdraft import ConfigError
from blockdraft.cli.logs import LOG, JsonFormatter, log_as_server
from blockdraft.server.config import ServeConfig
from tests.serving import chat_body, error_of, running_server, wait_until
from tests.small_llm import load_llm

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(folders):
    with running_server(load_llm(folders), root_path="/models/a") as running:
        yield running


@pytest.mark.parametrize("prefix", ["", "/models/a"])
def test_a_proxy_may_take_the_prefix_off_or_leave_it_on(server, prefix):
    assert server.client.get(f"{prefix}/health").json() == {"status": "ok"}
    assert server.client.post(f"{prefix}{CHAT}", json=chat_body(max_tokens=2)).status_code == 200
    page = server.client.get(f"{prefix}/")
    assert "<title>" in page.text
    assert server.client.get(f"{prefix}/page/page.js").status_code == 200
    described = server.client.get(f"{prefix}/openapi.json").json()
    assert described["servers"] == [{"url": "/models/a"}]


@pytest.mark.parametrize(
    "path", ["/models/ab/health", "/models/health", "/models/a/models/a/health"]
)
def test_only_the_whole_prefix_is_taken_off_and_once(server, path):
    assert server.client.get(path).status_code == 404


def test_the_prefix_opens_no_path_that_needs_a_key(folders):
    with running_server(load_llm(folders), root_path="/models", api_keys=("key",)) as running:
        assert running.client.get("/models/v1/models").status_code == 401
        assert running.client.get("/models/metrics").status_code == 401
        assert running.client.get("/models/health").status_code == 200


@pytest.mark.parametrize("path", ["models", "/models/", "/", "//a", "/a b", "/a?b"])
def test_a_root_path_that_is_none_is_refused(path):
    with pytest.raises(ConfigError, match="a leading"):
        ServeConfig(root_path=path)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (None, "Content-Type is missing"),
        ("text/plain", "'text/plain'"),
        ("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded'"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize"])
def test_a_body_that_is_not_called_json_is_named_as_such(server, path, kind, named):
    headers = {} if kind is None else {"content-type": kind}
    response = server.client.post(path, content=json.dumps(chat_body()), headers=headers)
    error = error_of(response, 415)
    assert named in error["message"]
    assert "send Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("prefix", ["", "/models/a"])
def test_a_slash_too_many_is_answered_and_not_sent_elsewhere(server, prefix):
    response = server.client.post(f"{prefix}{CHAT}/", json=chat_body())
    assert "/openapi.json lists the routes" in error_of(response, 404)["message"]
    assert "location" not in response.headers


@pytest.mark.parametrize("encoding", ["gzip", "br, gzip", "Zstd"])
def test_a_compressed_body_is_refused_by_its_header(server, encoding):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = gzip.compress(json.dumps(chat_body()).encode())
    error = error_of(server.client.post(CHAT, content=body, headers=headers), 415)
    assert f"Content-Encoding is '{encoding}'" in error["message"]
    assert "send the body uncompressed" in error["message"]


def test_a_body_that_is_called_uncompressed_is_read(server):
    body = json.dumps(chat_body(max_tokens=2))
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    assert server.client.post(CHAT, content=body, headers=headers).is_success


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_another_spelling_is_read(server, kind):
    body = json.dumps(chat_body(max_tokens=2))
    assert server.client.post(CHAT, content=body, headers={"content-type": kind}).is_success


def test_a_line_of_the_log_holds_its_parts_as_json(server, caplog):
    caplog.set_level("INFO", "blockdraft")
    server.client.get("/version", headers={"x-request-id": "job-7"})
    wait_until(lambda: any("job-7" in record.getMessage() for record in caplog.records))
    record = next(r for r in caplog.records if "job-7" in r.getMessage())
    line = json.loads(JsonFormatter().format(record))
    assert line.pop("time").endswith("+00:00")
    assert line.pop("seconds") >= 0
    assert line.pop("message").startswith("job-7 GET /version 200 ")
    assert line == {
        "level": "INFO",
        "logger": "blockdraft.server.guard",
        "request_id": "job-7",
        "client": "127.0.0.1",
        "method": "GET",
        "path": "/version",
        "status": 200,
    }


def test_who_only_watches_is_not_logged_unless_it_fails(server, caplog, monkeypatch):
    caplog.set_level("INFO", "blockdraft.server.guard")
    for path in ("/health", "/ready", "/metrics"):
        assert server.client.get(path).is_success
    monkeypatch.setattr(server.service.engine, "_death", "boom")
    assert server.client.get("/health").status_code == 503
    wait_until(lambda: caplog.messages)
    (line,) = caplog.messages
    assert "GET /health 503 " in line


def test_an_error_of_the_log_is_one_line_of_json():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("blockdraft").makeRecord(
            "blockdraft", logging.ERROR, "x", 1, "it %s", ("failed",), sys.exc_info()
        )
    (line,) = JsonFormatter().format(record).splitlines()
    assert "two" in json.loads(line)["traceback"]


@pytest.fixture
def log(monkeypatch):
    """What the log of the command writes."""
    written = io.StringIO()
    monkeypatch.setattr(LOG, "handlers", [logging.StreamHandler(written)])
    for name in ("uvicorn", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    return written


def raw_answer(server, request):
    """What the server sends for these bytes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(2**16), b""))


def test_a_line_of_a_library_is_json_too(server, log):
    log_as_server("json")
    assert raw_answer(server, b"no HTTP\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (line,) = [line for line in lines if line["logger"] == "uvicorn.error"]
    assert line["level"] == "WARNING"
    assert line["message"] == "Invalid HTTP request received."


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_the_offer_of_another_protocol_is_passed_over(server, caplog, protocol):
    offer = f"connection: upgrade, close\r\nupgrade: {protocol}\r\n"
    request = f"GET /health HTTP/1.1\r\nhost: localhost\r\n{offer}\r\n"
    assert raw_answer(server, request.encode()).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


@pytest.mark.parametrize("ends", ["", "\r\n", "\n", "\r\n\r\n", "\r"])
def test_ends_of_lines_between_requests_that_come_together_cost_neither(server, caplog, ends):
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    first = f'{head}content-length: 14\r\n\r\n{{"prompt":"a"}}'
    second = "GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answers = raw_answer(server, f"{first}{ends}{second}".encode())
    assert answers.count(b"HTTP/1.1 200 ") == 2
    assert b"HTTP/1.1 400 " not in answers
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_an_end_of_line_behind_the_last_request_keeps_the_connection(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        for _ in range(2):
            sock.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n\r\n")
            answer = b""
            while b"}" not in answer:
                answer += sock.recv(2**16)
            assert answer.startswith(b"HTTP/1.1 200 ")
