"""Another engine's command line, word by word, and what is refused before anything is started."""

import json
import logging
import sys

import pytest

from blockdraft.hub.resolve import resolve_model
from blockdraft.server.address import bind
from blockdraft.server.config import ServeConfig
from blockdraft.server.engines import run
from tests.command_line import refusal
from tests.command_line import run as run_command
from tests.fake_engine import FakeEngine
from tests.tiny import edit_json, tiny_drafter_folder, tiny_target_folder

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return tiny_target_folder(root), tiny_drafter_folder(root, block_size=BLOCK_SIZE)


@pytest.fixture(autouse=True)
def started(tmp_path, monkeypatch):
    """Engines are installed, and started ones only listed."""
    for name, value in FakeEngine(tmp_path).environment.items():
        monkeypatch.setenv(name, value)
    commands = []

    def run_engine(name, command, host, port):
        commands.append((name, command, host, port))
        return 0

    monkeypatch.setattr(run, "run_engine", run_engine)
    return commands


@pytest.fixture
def serve(folders, started):
    def serve(engine, *arguments, drafter=folders[1], **options):
        pair = ["--target", folders[0], "--drafter", drafter]
        result = run_command("serve", "--engine", engine, *pair, *arguments, **options)
        assert result.exit_code == 0, result.output
        ((name, command, host, port),) = started
        assert (name, host) == (engine, "127.0.0.1")
        assert command.arguments[0] == sys.executable
        assert command.arguments[command.arguments.index("--port") + 1] == str(port)
        return command

    return serve


def value(command, option):
    return command.arguments[command.arguments.index(option) + 1]


def test_the_whole_command_for_vllm(folders, serve):
    command = serve("vllm", "--port", 0)
    port = value(command, "--port")
    drafts = {"method": "dflash", "model": str(folders[1]), "num_speculative_tokens": 3}
    assert command.arguments == (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folders[0]), "--served-model-name", str(folders[0])),
        *("--host", "127.0.0.1", "--port", port, "--dtype", "auto"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
        *("--data-parallel-size", "1", "--shutdown-timeout", "30"),
        *("--speculative-config", json.dumps(drafts)),
    )
    assert command.environment == {}
    assert int(port) > 0


def test_the_whole_command_for_sglang(folders, serve):
    command = serve("sglang", "--port", 0)
    assert command.arguments == (
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(folders[0]), "--served-model-name", str(folders[0])),
        *("--host", "127.0.0.1", "--port", value(command, "--port"), "--dtype", "auto"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
        *("--data-parallel-size", "1", "--enable-metrics"),
        *("--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(folders[1])),
        *("--speculative-num-draft-tokens", str(BLOCK_SIZE)),
    )


def test_every_option_that_vllm_can_honor(serve, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "very-secret")
    command = serve(
        "vllm",
        *("--port", 0, "--model-name", "mine", "--dtype", "float32", "--drain-timeout", 7),
        *("--tensor-parallel", 2, "--pipeline-parallel-size", 3, "--data-parallel", 4),
        *("--max-concurrency", 8, "--memory", 0.5, "--num-draft-tokens", 2),
        *("--cors-origin", "https://a.example", "--", "--enforce-eager", "--seed=3"),
    )
    assert value(command, "--served-model-name") == "mine"
    assert value(command, "--dtype") == "float32"
    assert value(command, "--shutdown-timeout") == "7"
    assert value(command, "--tensor-parallel-size") == "2"
    assert value(command, "--pipeline-parallel-size") == "3"
    assert value(command, "--data-parallel-size") == "4"
    assert value(command, "--max-num-seqs") == "8"
    assert value(command, "--kv-cache-memory-bytes") == str(2**29)
    assert json.loads(value(command, "--speculative-config"))["num_speculative_tokens"] == 2
    assert json.loads(value(command, "--allowed-origins")) == ["https://a.example"]
    assert command.arguments[-2:] == ("--enforce-eager", "--seed=3")
    assert command.environment == {"VLLM_API_KEY": "very-secret"}
    assert "very-secret" not in " ".join(command.arguments)


def test_every_option_that_sglang_can_honor(serve):
    command = serve(
        "sglang",
        *("--port", 0, "--model-name", "mine", "--tensor-parallel", 2, "--data-parallel", 4),
        *("--max-concurrency", 8, "--num-draft-tokens", 2, "--", "--mem-fraction-static", "0.7"),
    )
    assert value(command, "--tensor-parallel-size") == "2"
    assert value(command, "--data-parallel-size") == "4"
    assert value(command, "--max-running-requests") == "8"
    assert value(command, "--speculative-num-draft-tokens") == "3"
    assert command.arguments[-2:] == ("--mem-fraction-static", "0.7")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_a_drafter_nothing_is_drafted(serve, engine):
    command = serve(engine, "--port", 0, drafter="none")
    assert not any(argument.startswith("--spec") for argument in command.arguments)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_draft_tokens_are_plain_decoding_there_too(serve, engine):
    command = serve(engine, "--port", 0, "--num-draft-tokens", 0)
    assert not any(argument.startswith("--spec") for argument in command.arguments)


def test_a_known_pair_is_found_by_its_name(tmp_path, folders, started, monkeypatch):
    """The embedded drafter; the target is not fetched here."""
    monkeypatch.setattr("blockdraft.server.engines.settings.resolve_model", lambda name: folders[0])
    monkeypatch.setattr("blockdraft.server.engines.settings._num_drafted", lambda *_, **__: 5)
    assert run_command("serve", "--engine", "vllm", "--port", 0).exit_code == 0
    ((_, command, _, _),) = started
    assert value(command, "--served-model-name") == "smollm2-135m"
    drafts = json.loads(value(command, "--speculative-config"))
    assert drafts["model"] == str(resolve_model("smollm2-135m-dflash"))
    assert drafts["num_speculative_tokens"] == 5


@pytest.mark.parametrize(
    ("option", "engines"),
    [
        ("--device cpu", ("vllm", "sglang")),
        ("--threads 1", ("vllm", "sglang")),
        ("--draft-depth 2", ("vllm", "sglang")),
        ("--max-waiting 3", ("vllm", "sglang")),
        ("--request-timeout 5", ("vllm", "sglang")),
        ("--max-body 1", ("vllm", "sglang")),
        ("--log-prompts", ("vllm", "sglang")),
        ("--exact on", ("vllm", "sglang")),
        ("--allowed-host a.example", ("vllm", "sglang")),
        ("--trusted-proxy 10.0.0.1", ("vllm", "sglang")),
        ("--prepare-timeout 5", ("vllm", "sglang")),
        ("--memory 1", ("sglang",)),
        ("--drain-timeout 5", ("sglang",)),
        ("--cors-origin https://a.example", ("sglang",)),
    ],
)
def test_what_an_engine_cannot_honor_is_refused_by_its_name(started, option, engines):
    for engine in engines:
        line = refusal("serve", "--engine", engine, *option.split())
        assert line.startswith(f"blockdraft: {option.split()[0]} ")
        assert f"cannot be honored by {engine}" in line
    assert not started


def test_values_that_an_engine_cannot_take(tmp_path, folders, started, monkeypatch):
    pair = ["--target", folders[0], "--drafter", folders[1], "--port", 0]
    vllm, sglang = (["serve", "--engine", name, *pair] for name in ("vllm", "sglang"))
    assert "at most 3 tokens per step" in refusal(*vllm, "--num-draft-tokens", BLOCK_SIZE)
    assert "--tensor-parallel is 0" in refusal(*vllm, "--tensor-parallel", 0)
    assert "dtype is float64" in refusal(*vllm, "--dtype", "float64")
    assert "--pipeline-parallel is 2" in refusal(*sglang, "--pipeline-parallel", 2)
    assert "there is no drafter" in refusal(*vllm, "--drafter", "none", "--num-draft-tokens", 1)
    assert "--port is already in the engine's command" in refusal(*vllm, "--", "--port=1")
    assert "--max-num-seqs is already" in refusal(
        *vllm, "--max-concurrency", 2, "--", "--max_num_seqs"
    )
    for key in (["--api-key", "very-secret"], ["--api_key=very-secret"]):
        line = refusal(*vllm, "--", *key)
        assert "--api-key on the command line can be read by everybody" in line
        assert "very-secret" not in line
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n", encoding="ascii")
    assert "2 API keys are given" in refusal(*vllm, "--api-key-file", keys)
    monkeypatch.setenv("BLOCKDRAFT_API_KEY", "very-secret")
    line = refusal(*sglang)
    assert "an API key is given" in line
    assert "very-secret" not in line
    assert not started


def test_a_pair_that_does_not_fit_is_refused(tmp_path, folders, started):
    other = tiny_drafter_folder(tmp_path, hidden_size=32, target_hidden_size=32)
    pair = ["--target", folders[0], "--drafter", other]
    assert "does not fit the target" in refusal("serve", "--engine", "vllm", "--port", 0, *pair)
    assert not started


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("BlockDiffusionDraftModel", "diffusion"),
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("DSparkDraftModel", "dspark"),
        ("DominoDraftModel", "domino"),
        ("Qwen3DFlyModel", "dfly"),
        ("DFlareDraftModel", "dflare"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_by_its_kind(
    tmp_path, folders, started, architecture, kind
):
    drafter = tiny_drafter_folder(tmp_path)
    config = json.loads((drafter / "config.json").read_text()) | {"architectures": [architecture]}
    (drafter / "config.json").write_text(json.dumps(config))
    line = refusal("serve", "--engine", "vllm", "--target", folders[0], "--drafter", drafter)
    assert f"a drafter of the kind {kind}, and this engine runs only dflash or dflash2" in line
    assert not started


def test_a_drafter_with_a_name_that_other_engines_do_not_know_is_refused(
    tmp_path, folders, started
):
    drafter = tiny_drafter_folder(tmp_path)
    edit_json(drafter / "config.json", architectures=["Qwen3DFlashDraftModel"])
    line = refusal("serve", "--engine", "vllm", "--target", folders[0], "--drafter", drafter)
    assert (
        "calls the drafter Qwen3DFlashDraftModel, and other engines know DFlashDraftModel; write"
        in line
    )
    assert not started


def test_a_drafter_whose_anchors_slot_drafts_is_refused(tmp_path, folders, started):
    drafter = tiny_drafter_folder(tmp_path, drafts_from_anchor=True)
    line = refusal("serve", "--engine", "vllm", "--target", folders[0], "--drafter", drafter)
    assert "drafts too, which this engine may not know" in line
    assert not started


def test_a_folder_whose_other_files_would_be_read_as_weights_is_refused(tmp_path, folders, started):
    drafter = tiny_drafter_folder(tmp_path)
    (drafter / "ngrams.safetensors").write_bytes(b"")
    pair = ["--target", folders[0], "--drafter", drafter]
    (drafter / "model.safetensors.index.json").unlink()
    line = refusal("serve", "--engine", "vllm", *pair)
    assert "holds ngrams.safetensors beside the weights, and no model.safetensors.index" in line
    assert not started


def test_an_address_that_is_taken_is_told_before_the_long_start(started):
    with bind(ServeConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refusal(
            "serve", "--engine", "vllm", "--port", port
        )
    assert not started


def test_an_engine_that_is_not_there(tmp_path, monkeypatch):
    line = refusal("serve", "--engine", "vllm", "--engine-python", tmp_path / "none")
    assert "No such file or directory" in line
    monkeypatch.setenv("PYTHONPATH", "")
    line = refusal("serve", "--engine", "sglang")
    assert f"sglang is not installed for {sys.executable}" in line
    assert "--engine-python or BLOCKDRAFT_ENGINE_PYTHON" in line
    (tmp_path / "elsewhere" / "vllm").mkdir(parents=True)  # a folder of that name is no engine
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    assert "vllm is not installed" in refusal("serve", "--engine", "vllm")


def test_options_of_another_engine_need_one():
    assert "--tensor-parallel is for another engine" in refusal("serve", "--tensor-parallel", 2)
    assert "--enforce-eager is for another engine" in refusal("serve", "--", "--enforce-eager")
    for engine in ("blockdraft", "vllm"):
        refused = refusal("serve", "--engine", engine, "Qwen/Qwen3-4B")
        assert "if it is a model, give --target Qwen/Qwen3-4B" in refused


@pytest.mark.parametrize("name", ["blockdraft", "asyncio", "uvicorn"])
def test_a_refused_start_leaves_no_log_to_other_tests(name):
    """Its stream is closed: what is logged later would be a traceback in another's output."""
    before = logging.getLogger(name).handlers
    refusal("serve", "--tensor-parallel", 2)
    assert logging.getLogger(name).handlers == before
