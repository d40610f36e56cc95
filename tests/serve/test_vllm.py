"""vLLM on the default pair, started by `blockdraft serve --engine vllm`.

Runs where $BLOCKDRAFT_VLLM_PYTHON names an interpreter that has vLLM.
"""

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

PYTHON = os.environ.get("BLOCKDRAFT_VLLM_PYTHON")
PATIENCE = 600.0
KEY = "a-key-of-this-test"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(not PYTHON, reason="BLOCKDRAFT_VLLM_PYTHON names no interpreter with vLLM"),
]


def test_it_drafts_and_answers_and_ends():
    command = [sys.executable, "-m", "blockdraft.cli.main", "serve", "--engine", "vllm"]
    command += ["--engine-python", str(PYTHON), "--port", "0", "--max-concurrency", "4"]
    # Compiling takes minutes.
    command += ["--memory", "0.5", "--", "--enforce-eager"]
    environment = {**os.environ, "BLOCKDRAFT_API_KEY": KEY}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if match := re.search(r"vllm serves on (\S+),", line):
                    break
            else:
                pytest.fail("".join(said[-40:]))
            _ask(match[1])
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(PATIENCE) == 0, rest[-4000:]
        finally:
            process.terminate()


def _ask(url):
    question = {"role": "user", "content": "How many days are there in 17 weeks?"}
    body = {"model": "smollm2-135m", "messages": [question], "temperature": 0, "max_tokens": 48}
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "17" in answer.json()["choices"][0]["message"]["content"]
        accepted = _counter(client.get("/metrics").text, "spec_decode_num_accepted_tokens_total")
        drafts = _counter(client.get("/metrics").text, "spec_decode_num_drafts_total")
        # Layers of features that are off by one still draft, but hardly anything is accepted.
        assert accepted / drafts > 0.5


def _counter(metrics, name):
    (value,) = re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE)
    return float(value)
