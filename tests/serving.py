"""A real server in a thread, around an LLM that the test holds too."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from blockdraft import LLM, Grammar
from blockdraft.server.address import bind
from blockdraft.server.config import ServeConfig
from blockdraft.server.guard import Traffic
from blockdraft.server.run import DrainingServer, make_service
from blockdraft.server.service import Service
from blockdraft.server.shape import Shape
from tests.small_llm import PATIENCE, assert_nothing_left

MODEL = "tiny"


@dataclass(frozen=True)
class Running:
    """What a test needs of a server that runs."""

    url: str
    service: Service
    traffic: Traffic
    server: DrainingServer
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        # httpx itself refuses to send what is no proper JSON.
        headers = {"content-type": "application/json"}
        return self.client.post(path, content=json.dumps(body), headers=headers)

    def chat(self, content: str = "the abc", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", **chat_body(content, **fields))

    def complete(self, prompt: Any = "the abc", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", **{**body, **fields})

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return read_events(response)


def chat_body(content: str = "the abc", **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {**body, **fields}


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of all events; they must end with [DONE]. Comments come where the server is busy."""
    lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


@contextmanager
def running_server(
    llm: LLM, *, patience: float | None = PATIENCE, **options: Any
) -> Iterator[Running]:
    """Serve until the block ends; then nothing may be left behind.

    patience: seconds that the client waits for a sign of life, None without end.
    """
    config = ServeConfig(**{"port": 0, "model_name": MODEL, "max_waiting": 64, **options})
    with bind(config) as sock:
        service, traffic = make_service(llm, config), Traffic()
        server = DrainingServer(service, traffic, config.drain_seconds)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        service.engine.start()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            with httpx.Client(base_url=url, timeout=patience) as client:
                yield Running(url, service, traffic, server, client)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            service.engine.stop()
        assert not thread.is_alive()
        assert traffic.num_active == 0
        assert_nothing_left(llm)


def saying(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Leave the target nothing but this text to answer."""
    shape = Shape(Grammar.choice([text]), "tools")
    monkeypatch.setattr("blockdraft.server.service.read_shape", lambda *_, **__: shape)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer with this status, in OpenAI's envelope."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])
