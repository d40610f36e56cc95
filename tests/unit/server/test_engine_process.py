"""Another engine as a process: waiting for it, signals, its end; with a program in its place."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from blockdraft.server.engines import child
from blockdraft.server.engines.engine import Command
from tests.fake_engine import FakeEngine
from tests.interrupting_log import interrupting_log
from tests.serving import PATIENCE, wait_until
from tests.tiny import tiny_target_folder

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture
def serving(target, tmp_path):
    """Runs `blockdraft serve --engine vllm`, of which no process may be left in the end."""

    @contextmanager
    def serving(*arguments, **settings):
        fake = FakeEngine(tmp_path, **settings)
        paths = f"{fake.environment['PYTHONPATH']}{os.pathsep}{SOURCE}"
        environment = {**os.environ, **fake.environment, "PYTHONPATH": paths}
        command = [sys.executable, "-W", "error", "-m", "blockdraft.cli.main", "serve", "--engine"]
        command += ["vllm", "--target", str(target), "--drafter", "none", "--port", "0", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            try:
                yield process, fake
            finally:
                process.kill()
        wait_until(lambda: not is_alive(fake.record()["worker"]))

    return serving


def is_alive(pid):
    """False too for what has ended and was not waited for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] != "Z"
    return False


def read_until(process, pattern):
    lines = iter(process.stderr.readline, "")
    return next(match for line in lines if (match := re.search(pattern, line)))


def test_it_is_waited_for_and_its_command_is_told(serving):
    with serving(delay=1.5) as (process, fake):
        told = read_until(process, r"^blockdraft: [-0-9]+ [:,0-9]+ INFO running (.+)")[1].split()
        match = read_until(process, r"vllm serves on http://127\.0\.0\.1:(\d+), ready after (\d+)")
        assert int(match[2]) >= 1
        record = fake.record()
        assert record["num_questions"] > 1
        assert record["arguments"] == told[-len(record["arguments"]) :]
        assert record["arguments"][record["arguments"].index("--port") + 1] == match[1]
        process.send_signal(signal.SIGTERM)
        out, rest = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert out == ""  # the engine's words go to standard error
    assert "vllm ended with exit status 0" in rest
    assert fake.record()["signals"] == ["SIGTERM"]


def test_a_long_start_is_told_of(monkeypatch, caplog):
    monkeypatch.setattr(child, "_REPORT_EVERY", 0)
    monkeypatch.setattr(child, "_PAUSE", 0.05)
    monkeypatch.setattr(child, "_is_healthy", lambda host, port: False)
    command = Command((sys.executable, "-c", "import time; time.sleep(0.3)"), {})
    with caplog.at_level(logging.INFO, "blockdraft"):
        assert child.run_engine("vllm", command, "::1", 8000) == 0
    told = [line for line in caplog.messages if line.startswith("waiting for vllm on http://[::1]")]
    assert len(told) > 1
    assert told[0].endswith("0 s so far")


def test_a_signal_that_comes_while_the_log_is_written(monkeypatch):
    monkeypatch.setattr(child, "_is_healthy", lambda host, port: True)
    command = Command((sys.executable, "-c", "import time; time.sleep(20)"), {})
    with interrupting_log(child.logger, signal.SIGTERM, "vllm serves"):
        assert child.run_engine("vllm", command, "::1", 8000) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_exit_status_comes_back(serving, number):
    with serving(status=7) as (process, fake):
        read_until(process, "vllm serves")
        process.send_signal(number)
        assert process.wait(PATIENCE) == 7
    assert fake.record()["signals"] == [number.name]


def test_a_signal_while_it_loads(serving):
    with serving(delay=600, status=3) as (process, fake):
        wait_until(lambda: fake.record().get("num_questions"))
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 3
    assert "exit status 3 before it was ready" in rest


def test_a_second_signal_ends_it_at_once(serving):
    with serving(is_stubborn=True) as (process, fake):
        read_until(process, "vllm serves")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: fake.record()["signals"] == ["SIGTERM"])
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL
        assert time.monotonic() - start < PATIENCE / 2
    assert fake.record()["signals"] == ["SIGTERM"]


def test_an_engine_that_ends_early_takes_its_exit_status_along(serving):
    with serving(early_status=9) as (process, _):
        rest = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 9
    assert "vllm ended with exit status 9 before it was ready" in rest
    assert "the engine's own words" in rest
    assert "Traceback" not in rest


def test_the_key_is_not_told(serving, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "very-secret")
    with serving() as (process, fake):
        told = read_until(process, r"^blockdraft: [-0-9]+ [:,0-9]+ INFO running (.+)")[1]
        assert told.startswith("VLLM_API_KEY=... ")
        read_until(process, "vllm serves")
        process.send_signal(signal.SIGTERM)
        assert "very-secret" not in told + process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 0
    assert fake.record()["key"] == "very-secret"
