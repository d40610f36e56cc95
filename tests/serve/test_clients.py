"""Clients that others wrote, as whole programs against the server with the default pair.

Each is skipped where it is not installed; clients/README.md says how to run them.
"""

import json
import re

import pytest

from tests.serve.clients import FOLDER, find_client, interpreter_of, run_client
from tests.serve.pair import default_llm
from tests.serving import running_server

pytestmark = [pytest.mark.slow, pytest.mark.model]

MODEL = "smollm2-135m"
KEY = "a-key-of-this-test"
CONTEXT = 2048


@pytest.fixture(scope="module")
def server():
    with running_server(default_llm(), model_name=MODEL) as server:
        yield server


@pytest.fixture
def server_with_key():
    with running_server(default_llm(), model_name=MODEL, api_keys=(KEY,)) as server:
        yield server


def counter(server, name):
    metrics = server.client.get("/metrics").text
    return float(re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)[1])


def test_litellm(server_with_key):
    python = interpreter_of("litellm")
    said = run_client(python, "litellm_client.py", server_with_key.url, KEY, MODEL)
    assert re.findall(r"^(\w+): fine$", said, re.MULTILINE) == ["chat", "texts", "shapes", "errors"]


def test_vllm_bench_reads_the_acceptance(server, tmp_path):
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    before = [counter(server, f"spec_decode_{name}") for name in names]
    run_client(
        *(interpreter_of("vllm"), "vllm_bench.py", "--backend", "openai-chat"),
        *("--endpoint", "/v1/chat/completions", "--base-url", server.url, "--model", MODEL),
        *("--tokenizer", default_llm().folder, "--temperature", 0, "--num-prompts", 4),
        *("--dataset-name", "custom", "--dataset-path", "prompts.jsonl", "--disable-shuffle"),
        *("--custom-output-len", 48, "--save-result", "--result-dir", tmp_path),
        *("--result-filename", "result.json"),
    )
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (4, 0)
    now = [counter(server, f"spec_decode_{name}") for name in names]
    drafts, drafted, accepted = (b - a for a, b in zip(before, now, strict=True))
    assert result["spec_decode_num_drafts"] == drafts > 0
    assert result["spec_decode_draft_tokens"] == drafted
    assert result["spec_decode_accepted_tokens"] == accepted > 0
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_reads_the_acceptance(server, tmp_path, path):
    before = counter(server, "spec_decode_num_draft_tokens_total")
    run_client(
        *(find_client("guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={server.url},model={MODEL},request_format={path}"),
        *("--tokenizer", f"kind=huggingface_auto,model={default_llm().folder}"),
        *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=24"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=8"),
        *("--output", f"kind=json,path={tmp_path / 'out.json'}"),
        cwd=tmp_path,
    )
    (found,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["benchmarks"]
    assert found["metrics"]["request_totals"]["successful"] == 8
    requests = found["requests"]["successful"]
    assert {request["output_tokens"] for request in requests} == {24}
    told = [request["response_metrics"]["speculative_decoding"] for request in requests]
    num_drafted = sum(one["num_draft_tokens"] for one in told if one is not None)
    assert num_drafted == counter(server, "spec_decode_num_draft_tokens_total") - before


@pytest.mark.parametrize("batch_size", [1, 4])
def test_lm_eval(server_with_key, tmp_path, batch_size):
    options = {
        "model": MODEL,
        "base_url": f"{server_with_key.url}/v1/completions",
        "tokenizer": default_llm().folder,
        "max_length": CONTEXT,
        "num_concurrent": 4,
    }
    run_client(
        *(find_client("lm_eval"), "--model", "local-completions", "--batch_size", batch_size),
        *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
        *("--tasks", "capitals_choice,capitals_text", "--include_path", "."),
        *("--output_path", tmp_path),
        cwd=FOLDER / "lm_eval_tasks",
        OPENAI_API_KEY=KEY,
        HF_HOME=str(tmp_path),
    )
    (path,) = tmp_path.glob("**/results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    # A guess among four is right in a quarter of the cases; this target knows its capitals.
    assert results["capitals_choice"]["acc,none"] > 0.8
    assert results["capitals_text"]["exact_match,first_word"] > 0.8


def test_schemathesis(server, tmp_path):
    program = find_client("schemathesis")
    run_client(
        *(program, "run", f"{server.url}/openapi.json", "--max-examples", 60, "--seed", 1),
        *("--phases", "coverage,fuzzing", "--continue-on-failure", "--no-color"),
        # A schema cannot tell all that makes a request good, such as ids within the vocabulary.
        *("--exclude-checks", "positive_data_acceptance", "--request-timeout", 120),
        cwd=tmp_path,
        SCHEMATHESIS_HOOKS="schemathesis_hooks",
        PYTHONPATH=str(FOLDER),
    )
    assert counter(server, "request_success_total") > 0
    assert server.client.get("/health").json() == {"status": "ok"}
