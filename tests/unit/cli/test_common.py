"""What all commands share: exit statuses, the log, completion; and what `env` prints."""

import errno
import inspect
import json
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import fields

import pytest
import torch
import typer

from blockdraft.cli import options
from blockdraft.cli.main import app
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import (
    DISK_FAILED,
    FAILED,
    INTERRUPTED,
    MISTAKE,
    NETWORK_FAILED,
    OUTPUT_CLOSED,
    ConfigError,
    ContextTooLong,
    DiskError,
    EngineDead,
    ModelError,
    NetworkError,
    Overloaded,
    exit_status,
)
from blockdraft.core.request import SamplingParams
from blockdraft.data.config import DataConfig
from blockdraft.models.target import loading
from blockdraft.train.config import TrainConfig
from tests.command_line import refusal, run, run_json
from tests.tiny import tiny_target_folder

STATUSES = [
    (ConfigError("x"), MISTAKE),
    (ModelError("x"), MISTAKE),
    (ContextTooLong("x"), MISTAKE),
    (NetworkError("x"), NETWORK_FAILED),
    (ConnectionResetError("x"), NETWORK_FAILED),
    (TimeoutError("x"), NETWORK_FAILED),
    (socket.gaierror("x"), NETWORK_FAILED),
    (DiskError("x"), DISK_FAILED),
    (OSError(errno.ENOSPC, "full"), DISK_FAILED),
    (PermissionError("x"), DISK_FAILED),
    (EngineDead("x"), FAILED),
    (Overloaded("x", retry_after=1), FAILED),
    (ValueError("x"), FAILED),
    (KeyboardInterrupt(), INTERRUPTED),
    (BrokenPipeError(), OUTPUT_CLOSED),
]


@pytest.mark.parametrize(("error", "status"), STATUSES, ids=lambda value: type(value).__name__)
def test_every_error_has_its_exit_status(error, status):
    assert exit_status(error) == status


def test_statuses_differ():
    statuses = (MISTAKE, NETWORK_FAILED, DISK_FAILED, FAILED, INTERRUPTED, OUTPUT_CLOSED)
    assert len({0, 1, *statuses}) == 2 + len(statuses)
    help_text = " ".join(run("--help").stdout.split())
    assert "3 the network failed; 4 the disk failed" in help_text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NetworkError("no network"), NETWORK_FAILED),
        (OSError(errno.ENOSPC, "no room", "/x"), DISK_FAILED),
        (EngineDead("it died"), FAILED),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_command_that_fails_says_so_on_one_line(error, status, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr("blockdraft.cli.models.resolve_model", fail)
    found = run("models", "path", "x")
    assert (found.exit_code, found.stdout) == (status, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("blockdraft: ")
    assert (str(error) or "interrupted") in line


def test_a_cache_that_cannot_be_written_is_a_failure_of_the_disk(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    found = run("models", "path", "smollm2-135m")
    assert found.exit_code == DISK_FAILED
    assert "cannot write the model cache" in found.stderr
    assert "make it writable, or set BLOCKDRAFT_CACHE" in found.stderr


def program(code, *arguments, **variables):
    """Run the command line in a process of its own, after `code`."""
    code = f"import sys; sys.argv = ['blockdraft', *{arguments!r}]\n{code}\nmain()"
    return subprocess.run(
        [sys.executable, "-c", "from blockdraft.cli.main import main\n" + code],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )


def test_a_fault_of_ours_is_no_answer_no():
    damage = "import blockdraft.cli.models as models\nmodels.CATALOG = None"
    found = program(damage, "models", "list")
    assert found.returncode == FAILED
    (line,) = found.stderr.splitlines()
    assert "AttributeError" in line
    assert "`blockdraft env`" in line
    assert "Traceback" in program(damage, "models", "list", "-v").stderr


def test_what_the_encoding_of_the_output_lacks_is_no_fault():
    foreign = (
        "import blockdraft.cli.models as models\nfrom dataclasses import replace\n"
        "models.CATALOG = {n: replace(e, about='\u20ac') for n, e in models.CATALOG.items()}"
    )
    for arguments, shown in ((["-q"], "?"), (["--json"], '"\\u20ac"')):
        found = program(foreign, "models", "list", *arguments, PYTHONIOENCODING="ascii")
        assert (found.returncode, found.stderr) == (0, "")
        assert shown in found.stdout


def test_an_interrupt_while_libraries_are_imported_is_one_line():
    """Whatever the import makes of the exception, or does with it."""
    damage = (
        "import os, signal, types\n"
        "class Swallowing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'blockdraft.llm':\n"
        "            try: os.kill(os.getpid(), signal.SIGINT)\n"
        "            except BaseException: raise ImportError('no such thing')\n"
        "sys.meta_path.insert(0, Swallowing())\n"
        "import blockdraft.cli.options as options\n"
        "options.resolve_model = options.resolve_drafter = lambda *_: None\n"
    )
    found = program(damage, "generate", "-q", "hi")
    assert (found.returncode, found.stderr) == (130, "blockdraft: interrupted\n")


@pytest.mark.parametrize("is_imported", [True, False])
def test_triton_prints_nothing_at_the_end(is_imported):
    """Its bindings write a page of their own there, about modules that are never collected."""
    code = (
        "import atexit, os, sys, types\n"
        "atexit.register(os.write, 2, b'a page')\n"
        "from blockdraft.cli.imports import quick_imports\n"
        "with quick_imports(): import decimal\n"
        f"if {is_imported}: sys.modules['triton'] = types.ModuleType('triton')\n"
        "print('ours', file=sys.stderr)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr == ("ours\n" if is_imported else "ours\na page")


def test_a_reader_that_leaves_ends_the_command_quietly():
    leave = "import os\nread, write = os.pipe(); os.close(read); os.dup2(write, 1)"
    found = program(leave, "models", "list", "--json")
    assert (found.returncode, found.stderr) == (OUTPUT_CLOSED, "")


@pytest.mark.parametrize(
    ("damage", "arguments", "status"),
    [
        ("", ["verify", os.devnull], MISTAKE),
        ("", ["generate", "--nope"], MISTAKE),
        ("import blockdraft.cli.models as models\nmodels.CATALOG = None", ["models"], FAILED),
    ],
    ids=["file", "option", "bug"],
)
def test_a_mistake_that_nobody_reads_is_no_answer_no(damage, arguments, status):
    """Where the reader of standard error has left."""
    leave = "import os\nread, write = os.pipe(); os.close(read); os.dup2(write, 2)\n"
    found = program(leave + damage, *arguments)
    assert (found.returncode, found.stdout) == (status, "")


def test_a_reader_that_leaves_a_table_is_no_answer_no():
    """rich makes an exit with 1 of it."""
    leave = (
        "import os, threading\nread, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "from rich.console import Console\nimport blockdraft.cli.models as models\n"
        "models.print = Console().print"
    )
    for arguments in (["--help"], ["generate", "--help"], ["models", "list"]):
        found = program(leave, *arguments)
        assert (found.returncode, found.stderr) == (OUTPUT_CLOSED, "")


def test_an_interrupt_while_the_command_line_is_imported_is_one_line():
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'blockdraft.cli.bench':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from blockdraft.__main__ import main\nmain()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (INTERRUPTED, "blockdraft: interrupted\n")


def commands(command=None, words=()):
    """The words of every command, and the command."""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from commands(inner, (*words, name))


WITHOUT_OPTION = {
    *("prefill_chunk", "adaptive", "grammar", "prompt_logprobs", "drafters"),
}
"""Fields that no option sets, or several do."""


@pytest.mark.parametrize(
    ("group", "config"), [(options.models, LLMConfig()), (options.sampling, SamplingParams())]
)
def test_every_field_of_a_config_is_an_option_with_its_default(group, config):
    names = {field.name for field in fields(config)} - WITHOUT_OPTION
    if isinstance(config, SamplingParams):
        names -= set(options.DRAFTED)  # a command has one request, so they are its LLM's
    assert names <= set(group.kinds)
    for name in names - {"exact", "logit_bias", "stop", "stop_token_ids", "prediction"}:
        assert group.defaults[name] == getattr(config, name)


@pytest.mark.parametrize(("words", "command"), list(commands()), ids=lambda value: str(value))
def test_a_default_is_the_same_in_every_command(words, command):
    for option in command.params:
        if option.name in options.models.defaults and option.param_type_name == "option":
            assert option.default == options.models.defaults[option.name], option.name


@pytest.mark.parametrize(("words", "command"), list(commands()), ids=lambda value: str(value))
def test_help_in_80_columns_cuts_no_name_and_fills_its_lines(words, command):
    shown = run(*words, "--help", env={"COLUMNS": "80"}, terminal_width=80).stdout
    assert "…" not in shown
    assert "default: True" not in shown  # says less than "on"
    whole = set(re.split(r"[\s,│]+", shown))
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            spelled = [*parameter.opts, *parameter.secondary_opts]
            assert whole.issuperset(name for name in spelled if name.startswith("-"))
    lines = [line.strip() for line in shown.splitlines()]
    for paragraph in inspect.cleandoc(command.help).split("\n\n"):
        assert set(textwrap.wrap(" ".join(paragraph.split()), 78)) <= set(lines)


@pytest.mark.parametrize(("words", "command"), list(commands()), ids=lambda value: str(value))
def test_every_command_takes_v_and_q(words, command):
    spelled = {spelling for option in command.params for spelling in option.opts}
    assert {"-v", "--verbose", "-q", "--quiet"} <= spelled


def test_verbose_shows_where_an_error_arises_and_quiet_drops_notices(monkeypatch):
    from blockdraft.hub import resolve

    def notice(name):
        resolve.logger.info("a notice")
        raise ModelError("no such model")

    monkeypatch.setattr("blockdraft.cli.models.resolve_model", notice)
    assert run("models", "path", "x").stderr.splitlines() == [
        "blockdraft: a notice",
        "blockdraft: no such model",
    ]
    assert run("models", "path", "-q", "x").stderr == "blockdraft: no such model\n"
    verbose = run("models", "path", "-v", "x").stderr
    assert "INFO blockdraft.hub.resolve: a notice" in verbose
    assert "Traceback" in verbose
    assert "contradict" in refusal("models", "path", "-v", "-q", "x")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("blockdraft ", {"generate", "prove", "env", "bench", "models"}),
        ("blockdraft bench ", {"speed", "demo", "concurrency"}),
        ("blockdraft generate --max-t", {"--max-tokens"}),
    ],
)
def test_completion_offers_commands_and_loads_no_model_library(words, offered):
    at_exit = (
        "import atexit; heavy = {'torch', 'transformers', 'numpy'}\n"
        "atexit.register(lambda: print(*(heavy & set(sys.modules)), file=sys.stderr))"
    )
    asked = {"_TYPER_COMPLETE_ARGS": words, "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    found = program(at_exit, _BLOCKDRAFT_COMPLETE="complete_bash", **asked)
    assert offered <= set(found.stdout.split())
    assert found.stderr.strip() == ""


def test_completion_can_be_installed():
    assert "--install-completion" in run("--help").stdout


def test_env_tells_a_bug_report_what_it_needs(monkeypatch, without_kernels):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hf_secret@mirror.example/hub")
    monkeypatch.setenv("BLOCKDRAFT_KERNELS", "off")
    found = run_json("env")
    assert {"blockdraft", "commit", "python", "torch", "transformers", "llguidance"} <= set(
        found["versions"]
    )
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["cores"] >= 1
    assert found["memory_bytes"] > 0
    assert found["torch"]["no_kernels_because"].startswith("BLOCKDRAFT_KERNELS=off")
    assert found["torch"]["kernels"]["bfloat16"]["used"] is False
    assert found["environment"]["BLOCKDRAFT_KERNELS"] == "off"
    people = run("env").stdout
    assert torch.__version__ in people
    assert "hf_secret" not in people + json.dumps(found)
    assert found["environment"]["HF_ENDPOINT"] == "https://...@mirror.example/hub"


def test_env_reports_a_broken_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "blockdraft.kernels.backends", None)
    assert "ModuleNotFoundError" in run_json("env")["torch"]["error"]


@pytest.fixture
def no_choice():
    loading._chosen_device.cache_clear()
    yield
    loading._chosen_device.cache_clear()


@pytest.mark.parametrize(
    ("has_gpu", "reason", "device", "said"),
    [
        (False, None, "cpu", "cpu, because CUDA finds no GPU"),
        (True, "no kernel image", "cpu", "cpu, because the GPU is not usable (no kernel image)"),
        (True, None, "cuda", "cuda, H200"),
    ],
)
def test_the_chosen_device_is_said_once(
    has_gpu, reason, device, said, no_choice, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(loading, "_unusable_because", lambda name: reason)
    monkeypatch.setattr(logging.getLogger("blockdraft"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="blockdraft"):
        assert [loading.resolve_device("auto") for _ in range(2)] == [device] * 2
    assert caplog.messages == [f"device auto: {said}"]


def test_auto_is_the_default_everywhere(no_choice, tmp_path):
    kinds = (LLMConfig, TrainConfig, DataConfig)
    assert [kind.__dataclass_fields__["device"].default for kind in kinds] == ["auto"] * 3
    for words, command in commands():
        defaults = [option.default for option in command.params if option.name == "device"]
        assert set(defaults) <= {"auto"}, words
    pair = ["--target", tiny_target_folder(tmp_path), "--drafter", "none", "--max-tokens", 2]
    assert "blockdraft: device auto: " in run("generate", *pair, "abc").stderr
    loading._chosen_device.cache_clear()
    assert "device auto" not in run("generate", *pair, "-q", "abc").stderr


@pytest.mark.parametrize("command", [("generate", "hi"), ("doctor",)], ids=str)
def test_commands_for_one_process_are_refused_in_several(command, monkeypatch):
    """They would load the models to one GPU, several times."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = run(*command, "--target", "no/such folder")
    assert result.exit_code == MISTAKE
    assert "torchrun has started 4 processes, and only `blockdraft train` works" in result.stderr
    # A cluster says how many machines there are, and nobody was started several times.
    for name, value in (("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", None)):
        with monkeypatch.context() as patch:
            if value is None:
                patch.delenv(name)
            else:
                patch.setenv(name, value)
            assert "torchrun" not in run(*command, "--target", "no/such folder").stderr
