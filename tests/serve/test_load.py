"""500 mixed requests at concurrency 32, a fifth of which leave at random; and an end under load."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockdraft.models.target.paged import PagedTarget
from tests.serve.pair import default_llm, prompts
from tests.serving import Running, read_events, running_server, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.model]

CHAT = "/v1/chat/completions"
NUM_REQUESTS = 500
CONCURRENCY = 32
SHARE_OF_LEAVERS = 0.2
MEMORY_SLACK = 0.05
"""Of the memory after the first half; what grows with each request would show as more."""
START_SECONDS = 300.0


@dataclass(frozen=True)
class Asked:
    """One request of the load: its body, and after how many events its client leaves."""

    body: dict[str, Any]
    leaves_after: int | None


@dataclass
class Outcome:
    """What came of all of them."""

    texts: dict[int, str] = field(default_factory=dict)
    num_left: int = 0


def draw_requests(num: int, draw: random.Random) -> list[Asked]:
    """Greedy and sampled, drafted and plain, short and long, streamed and not."""
    found = []
    for _ in range(num):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": draw.choice(prompts())}],
            "max_tokens": draw.choice([1, 8, 24, 48]),
            "temperature": draw.choice([0, 0, 0.7]),
            "seed": draw.randrange(3),
            "num_draft_tokens": draw.choice([None, None, 0, 2]),
            "stream": draw.random() < 0.6,
        }
        leaves = draw.random() < SHARE_OF_LEAVERS
        if leaves:
            body |= {"stream": True, "max_tokens": 400, "ignore_eos": True}
        found.append(Asked(body, draw.randrange(6) if leaves else None))
    return found


def text_of(response: httpx.Response, body: dict[str, Any]) -> str:
    if not body["stream"]:
        content: str = response.json()["choices"][0]["message"]["content"]
        return content
    pieces = [choice["delta"] for event in read_events(response) for choice in event["choices"]]
    return "".join(piece.get("content") or "" for piece in pieces)


def ask(server: Running, asked: Asked) -> str | None:
    """The text, or None of somebody who left. A connection of its own, to be cut."""
    with (
        httpx.Client(base_url=server.url, timeout=None) as client,
        client.stream("POST", CHAT, json=asked.body) as response,
    ):
        assert response.status_code == 200, response.read()
        if asked.leaves_after is None:
            if not asked.body["stream"]:
                response.read()
            return text_of(response, asked.body)
        for number, _ in enumerate(response.iter_lines()):
            if number >= asked.leaves_after:
                break
    return None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_load(server: Running, requests: list[Asked]) -> Outcome:
    outcome, lock = Outcome(), threading.Lock()

    def run(number: int) -> None:
        text = ask(server, requests[number])
        with lock:
            if text is None:
                outcome.num_left += 1
            else:
                outcome.texts[number] = text

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(run, range(len(requests))))
    return outcome


def expected_texts(requests: list[Asked]) -> dict[str, str]:
    """Of each distinct request, from a server with nobody else in it, without drafts."""
    found: dict[str, str] = {}
    with running_server(default_llm(), patience=None, request_seconds=3600.0) as server:
        for asked in requests:
            if asked.leaves_after is None and key_of(asked) not in found:
                plain = {**asked.body, "stream": False, "num_draft_tokens": 0}
                answer = server.post(CHAT, **plain).json()
                found[key_of(asked)] = answer["choices"][0]["message"]["content"]
    return found


def key_of(asked: Asked) -> str:
    """What the text of a request depends on."""
    names = ("messages", "max_tokens", "temperature", "seed")
    return json.dumps([asked.body[name] for name in names])


def test_nothing_is_lost_under_load():
    requests = draw_requests(NUM_REQUESTS, random.Random(0))
    expected = expected_texts(requests)
    llm, half = default_llm(), NUM_REQUESTS // 2
    with running_server(llm, max_waiting=2 * CONCURRENCY, request_seconds=3600.0) as server:
        first = run_load(server, requests[:half])
        memory = resident_bytes()
        second = run_load(server, requests[half:])
        assert resident_bytes() < memory * (1 + MEMORY_SLACK)
        wait_until(lambda: server.traffic.num_active == 0)
        wait_until(lambda: server.service.engine.load().num_running == 0)
        target = llm.engine.target
        assert isinstance(target, PagedTarget)
        target.memory.check_integrity()
        assert target.memory.num_available == target.memory.num_pages - 1
    for outcome, own in ((first, requests[:half]), (second, requests[half:])):
        assert len(outcome.texts) + outcome.num_left == half
        assert outcome.num_left > half * SHARE_OF_LEAVERS / 2
        for number, text in outcome.texts.items():
            assert text == expected[key_of(own[number])]


def test_sigterm_under_load_drains(tmp_path):
    """The command itself: what runs is finished, what comes is refused, the status is 0."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "blockdraft.cli.main", "serve", "--port", "0"]
    command += ["--drain-timeout", "300"]
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            url = wait_for_url(process, log)
            body = {"messages": [{"role": "user", "content": prompts()[0]}], "ignore_eos": True}
            body |= {"max_tokens": 60}
            with ThreadPoolExecutor(16) as pool, httpx.Client(base_url=url, timeout=300) as client:
                running = [pool.submit(client.post, CHAT, json=body) for _ in range(16)]
                wait_until(lambda: active(client) == 16)
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: client.get("/health").status_code == 503)
                assert client.post(CHAT, json=body).status_code == 503
                answers = [future.result() for future in running]
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "Traceback" not in log.read_text(encoding="utf-8")
    tokens = [answer.json()["usage"]["completion_tokens"] for answer in answers]
    assert tokens == [60] * 16


def active(client: httpx.Client) -> float:
    """Samples that run or wait."""
    lines = client.get("/metrics").text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = START_SECONDS
    while deadline > 0:
        for line in log.read_text(encoding="utf-8").splitlines():
            if "serving " in line:
                return line.rsplit(" ", 1)[1]
        assert process.poll() is None, log.read_text(encoding="utf-8")
        threading.Event().wait(0.2)
        deadline -= 0.2
    raise AssertionError("the server did not start")
