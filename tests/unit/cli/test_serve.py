"""`blockdraft serve` as a command: what it refuses, and how a whole process lives and ends."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from blockdraft.cli import serve
from blockdraft.cli.main import app
from blockdraft.core.errors import MISTAKE
from blockdraft.server.address import bind
from blockdraft.server.config import ServeConfig
from tests.serving import PATIENCE, chat_body


def refusal(*arguments, **options):
    arguments = ["serve", *map(str, arguments)]
    result = CliRunner().invoke(app, arguments, prog_name="blockdraft", **options)
    assert result.exit_code == MISTAKE, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("blockdraft: ")
    return line


def test_mistakes_are_refused_on_one_line_before_anything_is_loaded(tmp_path):
    assert "--port is 70000" in refusal("--port", 70000)
    assert "--request-timeout is 0.0" in refusal("--request-timeout", 0)
    assert "--max-body is nan" in refusal("--max-body", "nan")
    assert "--drain-timeout is -1.0" in refusal("--drain-timeout", -1)
    assert "--max-waiting is -1" in refusal("--max-waiting", -1)
    for origin in ("foo", "example.org", "https://", "https://*.example.org", "https://a.org/b"):
        remedy = "give an origin such as https://example.org, or *"
        assert f"--cors-origin is {origin!r}; {remedy}" in refusal("--cors-origin", origin)
    assert "--model-name is empty; give a name" in refusal("--model-name", "")
    assert "--max-concurrency is 0" in refusal("--max-concurrency", 0)
    refused = refusal("--api-key-file", tmp_path / "none")
    assert "cannot read the API keys" in refused
    assert "one per line" in refused
    (tmp_path / "keys").write_text("# nothing\n\n", encoding="ascii")
    assert "holds no API key" in refusal("--api-key-file", tmp_path / "keys")
    with bind(ServeConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refusal("--port", port)


def test_the_reason_why_a_server_ends_is_json_as_its_log():
    arguments = ["serve", "--log-format", "json", "--max-waiting", "-1"]
    result = CliRunner().invoke(app, arguments, prog_name="blockdraft")
    assert result.exit_code == MISTAKE
    (line,) = map(json.loads, result.stderr.splitlines())
    assert line["level"] == "ERROR"
    assert line["message"] == "--max-waiting is -1; give 0 or more"
    assert "--max-waiting is -1" in refusal("--max-waiting", -1)  # the next log is text again


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://Example.org/", "http://localhost:3000", "http://[::1]:8080"]
)
def test_an_origin_that_a_browser_sends_is_taken(origin):
    assert ServeConfig(cors_origins=(origin,)).cors_origins == (origin.lower().rstrip("/"),)


def test_a_key_does_not_belong_on_the_command_line():
    line = refusal("--api-key", "very-secret")
    assert "everybody on this machine can see" in line
    assert "very-secret" not in line


def test_the_keys_of_a_file_have_their_numbers_whatever_the_environment_adds(tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(serve, "_serve_ourselves", lambda llm, config: served.append(config))
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "of-the-environment")
    text = "# two of them, für Zoë\u2028\x85\nfirst\r\n  # and\nsecond\n"
    (tmp_path / "keys").write_text(text, encoding="utf-8-sig", newline="")
    arguments = ["serve", "--api-key-file", str(tmp_path / "keys")]
    result = CliRunner().invoke(app, arguments, prog_name="blockdraft")
    assert result.exit_code == 0, result.output
    assert served[0].api_keys == ("first", "second", "of-the-environment")


@pytest.mark.parametrize("engine", ["blockdraft", "vllm"])
def test_an_empty_key_does_not_open_the_server(monkeypatch, engine):
    """As `docker run -e BLOCKDRAFT_API_KEY=$KEY` gives it where KEY is not set."""
    monkeypatch.setattr(serve, "_serve_ourselves", lambda llm, config: None)
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "")
    assert "BLOCKDRAFT_API_KEY is empty; set it to a key" in refusal("--engine", engine)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "blockdraft.server.run", raising=False)
    monkeypatch.delattr("blockdraft.server.run", raising=False)
    assert "needs the package uvicorn; run pip install '.[serve]' in a checkout" in refusal()


def test_a_process_serves_and_ends_when_it_is_told(pair, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# two of them\nfile-key\nother-key\n", encoding="ascii")
    command = [sys.executable, "-W", "error", "-m", "blockdraft.cli.main", "serve", "--port", "0"]
    command += [*pair, "--api-key-file", str(keys), "--model-name", "mine"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(m[1] for line in lines if (m := re.search(r"serving mine on (\S+)", line)))
            headers = {"authorization": "Bearer other-key"}
            with httpx.Client(base_url=url, timeout=PATIENCE, headers=headers) as client:
                answer = client.post("/v1/chat/completions", json=chat_body(model="mine"))
                assert answer.json()["usage"]["completion_tokens"] == 24
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert "draining" in rest
    assert "Traceback" not in rest
    assert "-key" not in rest  # only which of them it was
