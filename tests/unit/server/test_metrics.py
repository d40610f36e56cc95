"""What /metrics tells, against what the answers say of themselves."""

import json
import re
import socket
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from blockdraft.server.metrics import MAX_TAGS
from tests.serving import MODEL, chat_body, running_server, wait_until
from tests.small_llm import load_llm

CHAT = "/v1/chat/completions"
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "blockdraft.json"
VLLM_NAMES = [
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "num_preemptions_total",
    "request_prompt_tokens_count",
    "request_generation_tokens_count",
]


def scrape(server):
    """The value of each sample by its name and labels other than the model's."""
    text = server.client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("process_"):  # Prometheus' own names
                continue
            assert labels.pop("model_name") == MODEL
            key = (sample.name, *(f"{name}={value}" for name, value in sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def total(found, name):
    return sum(value for key, value in found.items() if key[0] == name)


def test_metrics_agree_with_the_answers(llm):
    with running_server(llm) as server:
        bodies = [{}, {"n": 2, "temperature": 1}, {"num_draft_tokens": 0}, {"max_tokens": 1}]
        answers = [server.chat(**body).json() for body in bodies * 3]
        usages = [answer["usage"] for answer in answers]
        num_tokens = sum(usage["completion_tokens"] for usage in usages)
        # The last step may be counted a moment after its answer was sent.
        wait_until(lambda: total(scrape(server), "vllm:generation_tokens_total") >= num_tokens)
        found = scrape(server)
    details = [usage["completion_tokens_details"] for usage in usages]
    accepted = sum(d["accepted_prediction_tokens"] for d in details)
    drafted = accepted + sum(d["rejected_prediction_tokens"] for d in details)
    name = "vllm:spec_decode_num"
    assert total(found, f"{name}_accepted_tokens_total") == accepted
    assert total(found, f"{name}_draft_tokens_total") == drafted > 0
    assert total(found, f"{name}_accepted_tokens_per_pos_total") == accepted
    by_depth = {k[1]: v for k, v in found.items() if k[0] == "blockdraft:decode_passes_total"}
    assert found[f"{name}_drafts_total",] == sum(by_depth.values()) - by_depth["depth=0"]
    assert total(found, "vllm:generation_tokens_total") == num_tokens
    # Every sample computes its prompt, or finds it computed.
    num_samples = sum(len(answer["choices"]) for answer in answers)
    num_prompt = usages[0]["prompt_tokens"] * num_samples
    assert total(found, "vllm:prompt_tokens_total") == num_prompt
    assert total(found, "vllm:request_success_total") == num_samples == 15
    assert found["vllm:time_to_first_token_seconds_count",] == num_samples
    passes = total(found, "blockdraft:decode_passes_total")
    assert total(found, "blockdraft:decode_tokens_total") == num_tokens - num_samples
    assert found["vllm:inter_token_latency_seconds_count",] == passes
    phases = {k[1]: v for k, v in found.items() if k[0] == "blockdraft:phase_seconds_total"}
    assert phases["phase=forward"] > phases["phase=controller"] > 0
    assert found["blockdraft:steps_total",] > 0


def test_the_names_are_vllm_s(llm):
    with running_server(llm) as server:
        server.chat()
        names = {key[0] for key in scrape(server)}
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= names


def test_gauges_are_never_stale(llm):
    with running_server(llm) as server:
        for _ in range(3):
            server.chat()
        found = scrape(server)
        assert found["vllm:num_requests_running",] == 0
        assert found["vllm:num_requests_waiting",] == 0
        assert found["vllm:kv_cache_usage_perc",] == 0
        pages = [found["blockdraft:pages", f"state={state}"] for state in ("held", "kept", "free")]
        assert pages[0] == 0
        assert sum(pages) == llm.engine.target.memory.num_pages - 1


def test_lengths_are_counted_for_each_sample(llm):
    with running_server(llm) as server:
        server.chat("the abc", n=2, max_tokens=7)
        server.complete([[5] * 30, [5] * 60], max_tokens=3, n=2)
        num_prompt = len(server.post("/tokenize", **_messages("the abc")).json()["tokens"])
        found = scrape(server)
    for name, lengths in {
        "vllm:request_prompt_tokens": [num_prompt, num_prompt, 30, 30, 60, 60],
        "vllm:request_generation_tokens": [7, 7, 3, 3, 3, 3],
    }.items():
        assert found[f"{name}_count",] == len(lengths)
        assert found[f"{name}_sum",] == sum(lengths)
        for most in (5, 10, 50, 100):
            below = sum(length <= most for length in lengths)
            assert found[f"{name}_bucket", f"le={most}.0"] == below


def _messages(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="they are read from /proc")
def test_the_process_is_measured(llm):
    with running_server(llm) as server:
        text = server.client.get("/metrics").text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("process_")
    }
    assert found["process_resident_memory_bytes"] > 2**26
    assert found["process_cpu_seconds_total"] > 0
    assert 0 < found["process_open_fds"] < found["process_max_fds"]
    assert 0 < time.time() - found["process_start_time_seconds"] < 86_400


def test_who_leaves_is_counted_as_aborted(llm):
    with running_server(llm) as server:
        body = chat_body(max_tokens=400, stream=True)
        with server.client.stream("POST", CHAT, json=body) as response:
            next(response.iter_bytes())
        wait_until(lambda: server.traffic.num_active == 0)
        found = scrape(server)
    assert found["vllm:request_success_total", "finished_reason=abort"] == 1


def test_who_leaves_before_the_answer_was_refused_nothing(llm, caplog):
    body = json.dumps(chat_body(max_tokens=400)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with caplog.at_level("INFO"), running_server(llm) as server:
        address = (server.client.base_url.host, server.client.base_url.port)
        with socket.create_connection(address) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: f"POST {CHAT} 499" in caplog.text)
        found = scrape(server)
    assert not [key for key in found if key[0] == "blockdraft:refused_requests_total"]


def test_acceptance_is_counted_by_tag(llm):
    with running_server(llm) as server:
        for tag in ("code", "code", "prose"):
            headers = {"x-blockdraft-tag": tag}
            assert server.client.post(CHAT, json=chat_body(), headers=headers).status_code == 200
        server.chat()
        found = scrape(server)
        tokens = {k[1]: v for k, v in found.items() if k[0] == "blockdraft:tag_decode_tokens_total"}
        assert tokens == {"tag=code": 46, "tag=prose": 23, "tag=none": 23}
        drafted = found["blockdraft:draft_tokens_total", "source=dflash"]
        assert found["blockdraft:accepted_tokens_total", "source=dflash"] <= drafted
        assert 0 < drafted == found["vllm:spec_decode_num_draft_tokens_total",]
        for number in range(2 * MAX_TAGS):
            headers = {"x-blockdraft-tag": f"tag{number}"}
            server.client.post(CHAT, json=chat_body(max_tokens=2), headers=headers)
        tags = {key[1] for key in scrape(server) if key[0] == "blockdraft:tag_decode_tokens_total"}
    assert len(tags) == MAX_TAGS
    assert "tag=other" in tags


def test_refusals_are_counted_by_status(llm):
    with running_server(llm) as server:
        server.chat(temperature=-1)
        server.client.get("/nothing")
        found = scrape(server)
    assert found["blockdraft:refused_requests_total", "status=400"] == 1
    assert found["blockdraft:refused_requests_total", "status=404"] == 1


def test_two_servers_count_apart(llm, folders):
    with running_server(llm) as one, running_server(load_llm(folders)) as other:
        one.chat()
        assert total(scrape(one), "vllm:request_success_total") == 1
        assert total(scrape(other), "vllm:request_success_total") == 0


def test_the_dashboard_asks_for_metrics_that_exist(llm):
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = " ".join(
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    )
    with running_server(llm) as server:
        server.chat(max_tokens=60)
        text = server.client.get("/metrics").text
    names = set(re.findall(r"(?:vllm|blockdraft):[a-z0-9_]+", asked))
    assert len(names) >= 12
    assert not [name for name in names if f"{name}{{" not in text and f"# TYPE {name}" not in text]
