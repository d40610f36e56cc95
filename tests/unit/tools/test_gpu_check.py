"""The check of a GPU: limits hold, a part that fails stops no other, nothing private gets out."""

import getpass
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
import torch
from gpucheck import command, exactness, report, rows, training, triton_kernels, weights
from gpucheck import runner as runner_module
from gpucheck.gpu_tests import outcome_of
from gpucheck.notes import Notes, notes_path, read_notes
from gpucheck.parts import PARTS, Part
from gpucheck.private import Scrubber
from gpucheck.report import collect, page, write_report
from gpucheck.row_classes import classes_of, in_batches, in_tiles, row_classes
from gpucheck.rules import OWN, TRITON, candidate, candidates_on, ruled
from gpucheck.runner import DONE, FAILED, INTERRUPTED, OUT_OF_TIME, Runner, read_state
from gpucheck.settings import REHEARSAL, ROOT, Settings, read_settings, write_settings

from blockdraft.core.files import folder_lock
from blockdraft.hub.prepare import CONVERSION_VERSION
from blockdraft.kernels.cuda.choice import SWITCH
from blockdraft.kernels.interface import RowRule
from blockdraft.kernels.torch.rules import ROW_RULES
from blockdraft.models.draft.hydra_head import HEAD_NAME

FAKES = """
import subprocess, sys, time
def good(settings, notes):
    notes.note("deep", "value", value=settings.max_tokens)
def bad(settings, notes):
    notes.note("before", value=1)
    raise ValueError("it broke")
def slow(settings, notes):
    notes.note("before", value=1)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    time.sleep(60)
def deaf(settings, notes):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    notes.note("before", value=1)
    time.sleep(60)
"""
CHILD = "import sys; sys.path.insert(0, {folder!r}); import fakes; run = fakes.{name}\n"


@pytest.fixture
def parts(tmp_path, monkeypatch) -> dict[str, Part]:
    """Parts that take no time, one that fails and two that never end."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    (folder / "fakes.py").write_text(FAKES)
    names = ("good", "bad", "slow", "deaf")
    for name in names:
        (folder / f"fake_{name}.py").write_text(CHILD.format(folder=str(folder), name=name))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    endless = {"slow": 4.0, "deaf": 4.0}
    return {
        name: Part(name, f"the {name} one", f"fake_{name}", endless.get(name, 60.0), 1.0, 0.5)
        for name in names
    }


@pytest.fixture
def run(tmp_path):
    """Runs parts as the command does; returns how each ended."""

    def run_parts(parts, seconds=60.0):
        runner = Runner(tmp_path, Settings(max_tokens=7))
        runner.run(parts, seconds)
        return runner, {part.name: read_state(tmp_path, part.name).get("status") for part in parts}

    return run_parts


def test_a_failure_and_a_part_without_end_stop_no_other(parts, run, tmp_path):
    ran, states = run([parts["bad"], parts["slow"], parts["good"]])
    assert states == {"bad": FAILED, "slow": OUT_OF_TIME, "good": DONE}
    assert ran.has_failed
    assert read_notes(notes_path(tmp_path, "bad")) == {"before": 1, "error": "ValueError: it broke"}
    assert read_notes(notes_path(tmp_path, "good")) == {"deep": {"value": 7}}
    assert "it broke" in (tmp_path / "bad.log").read_text()


@pytest.mark.slow
def test_who_does_not_listen_is_killed(parts, run, tmp_path):
    begin = monotonic()
    _, states = run([parts["deaf"]])
    assert states == {"deaf": OUT_OF_TIME}
    assert monotonic() - begin < 50  # it would sleep for 60
    assert read_notes(notes_path(tmp_path, "deaf")) == {"before": 1}


@pytest.mark.slow
def test_the_next_call_goes_on(parts, run):
    order = [parts["good"], replace(parts["slow"], seconds=None), parts["bad"]]
    ran, states = run(order, seconds=8.0)
    assert states == {"good": DONE, "slow": INTERRUPTED, "bad": None}
    assert not ran.has_failed
    assert [part.name for part in ran.waiting(order)] == ["slow", "bad"]
    _, states = run([parts["bad"]])
    assert [part.name for part in ran.waiting(order)] == ["slow"]


@pytest.fixture
def interrupted(monkeypatch) -> Callable[[], list[subprocess.Popen]]:
    """Once called: Ctrl-C during each part that begins. Returns the processes of these parts."""
    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    def begin():
        monkeypatch.setattr(subprocess, "Popen", Interrupted)
        return started

    return begin


def test_kernels_for_the_cpu_are_there_when_somebody_counts_time(tmp_path):
    """As a deployment has them; a rehearsal, and parts that need none, do not wait for them."""

    def are_off(part, **settings):
        environment = Runner(tmp_path, Settings(**settings))._environment(part)
        return environment.get("BLOCKDRAFT_KERNELS") == "off"

    having = [part.name for part in PARTS if not are_off(part)]
    assert having == ["models", "proof", "ledger", "speed", "training"]
    assert all(are_off(part, is_rehearsal=True) for part in PARTS)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "tests/a/test_gpu.py::test_b[x-torch.float32] PASSED [  5%]",
            ("test_b[x-torch.float32]", "passed"),
        ),
        ("[gw3] [ 57%] FAILED tests/a/test_gpu.py::test_b[x-1.0] \n", ("test_b[x-1.0]", "failed")),
        ("[gw3] node down: Not properly terminated", None),
        ("tests/a/test_gpu.py::test_b ", None),
    ],
)
def test_outcomes_of_tests_in_one_process_or_many(line, found):
    assert outcome_of(line) == found


def test_an_interrupted_call_leaves_no_part_behind(parts, run, tmp_path, interrupted):
    started = interrupted()
    with pytest.raises(KeyboardInterrupt):
        run([parts["slow"]])
    assert started[0].wait(10) == -signal.SIGKILL
    assert read_state(tmp_path, "slow") == {}  # so the next call runs it


def test_a_part_that_is_run_again_and_cut_off_is_not_done(parts, run, tmp_path, interrupted):
    run([parts["good"]])
    interrupted()
    with pytest.raises(KeyboardInterrupt):
        run([parts["good"]])
    assert read_state(tmp_path, "good") == {}


def test_a_report_is_written_when_the_check_is_ended(parts, tmp_path, interrupted):
    interrupted()
    written = []
    runner = Runner(tmp_path, Settings(), on_result=lambda: written.append(1))
    with pytest.raises(KeyboardInterrupt):
        runner.run([parts["good"]], 60.0)
    assert written


def test_a_report_is_written_while_a_part_runs(parts, tmp_path, monkeypatch):
    """A machine that is taken away may end the check without a word before."""
    monkeypatch.setattr(runner_module, "REPORT_SECONDS", 0.5)
    found = []
    runner = Runner(
        tmp_path,
        Settings(),
        meanwhile=lambda: found.append(read_notes(notes_path(tmp_path, "slow"))),
    )
    runner.run([parts["slow"]], 60.0)
    assert len(found) > 1
    assert found[-1] == {"before": 1}


def test_what_a_part_has_found_is_reported_before_it_ends(tmp_path):
    Notes(notes_path(tmp_path, "proof")).note("load check", "bfloat16", "a rule", value="passes")
    found = collect(tmp_path, False)
    assert found["parts"]["proof"]["status"] == "not ended"
    assert "| bfloat16 | a rule | passes |" in page(found)


def test_the_pair_is_proven_before_the_next_precision_is_tried(tmp_path, monkeypatch):
    calls = []

    @contextmanager
    def loaded(settings, way, **options):
        calls.append(way)
        if way == ("bfloat16", TRITON):
            raise RuntimeError("it does not run")
        yield way

    monkeypatch.setattr(exactness, "loaded", loaded)
    monkeypatch.setattr(exactness, "_without_kernels", lambda *own: "")
    monkeypatch.setattr(exactness, "_prove_loaded", lambda llm, *own: calls.append("proof"))
    notes = Notes(notes_path(tmp_path, "proof"))
    exactness.run(Settings(), notes)
    own = "bfloat16", OWN
    assert calls == [
        ("bfloat16", TRITON), own, own, "proof", ("float32", TRITON)
    ]  # fmt: skip
    assert tuple(notes.found["taken"]) == own
    assert notes.found["load check"]["bfloat16"][TRITON] == "it does not run"


def test_a_full_disk_ends_the_check_and_not_the_part(parts, run, tmp_path, monkeypatch):
    """The next call, with room, runs it again; a state is whole or not there."""
    usage = SimpleNamespace(free=4096)
    monkeypatch.setattr("gpucheck.runner.shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="No space left"):
        run([parts["bad"]])
    assert read_state(tmp_path, "bad") == {}
    usage.free = 2**30
    assert run([parts["bad"]])[1] == {"bad": FAILED}


def test_settings_reach_the_parts(tmp_path):
    for settings in (Settings(), Settings(**REHEARSAL, answers=("a", "b"))):
        write_settings(tmp_path / "settings.json", settings)
        assert read_settings(tmp_path / "settings.json") == settings


# What users ask for


def ask(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


def test_unknown_part(tmp_path):
    with pytest.raises(SystemExit, match="'speeed' is unknown"):
        ask(tmp_path / "out", "--parts", "speeed", "--rehearse")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--minutes", "--train-minutes", "--piece-megabytes"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many"])
def test_numbers_that_are_none(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit):
        ask(tmp_path, option, value)
    assert "number above zero" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_nothing_begins(tmp_path):
    with pytest.raises(SystemExit, match="no CUDA device"):
        ask(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(SystemExit, match="File exists"):
        ask(tmp_path / "out", "--rehearse")


@pytest.fixture
def few_parts(monkeypatch):
    """A command that rehearses a part of no use in a second, its models too."""
    part = Part("environment", "Nothing", "gpucheck.notes", 60.0, 1.0)
    monkeypatch.setattr(command, "PARTS", (part,))
    monkeypatch.setattr(command, "part_named", lambda name: part)
    monkeypatch.setattr("gpucheck.tiny_pair.write_tiny_pair", lambda folder: {})
    return part


def test_a_check_does_not_go_on_with_another_one(tmp_path, few_parts, monkeypatch):
    """Else the parts of a rehearsal would stand in the report of a card."""
    out = tmp_path / "out"
    assert ask(out, "--rehearse") == 1  # this part has nothing to run
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-work"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="was a rehearsal; give another folder"):
        ask(out)
    with pytest.raises(SystemExit, match="had target smollm2-135m, not other"):
        ask(out, "--rehearse", "--target", "other")
    assert ask(out, "--rehearse") == 0  # nothing is left to do


def test_two_checks_do_not_share_a_folder(tmp_path, few_parts):
    with folder_lock(tmp_path / "out-work"), pytest.raises(SystemExit, match="another process"):
        ask(tmp_path / "out", "--rehearse")


CTRL_C = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""What Python does at first with the signals that end a check."""


def test_who_started_it_with_nohup_may_close_the_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command._signals_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", CTRL_C)
def test_a_check_that_is_ended_ends_its_part(tmp_path, few_parts, monkeypatch, number):
    """A closed terminal leaves nothing on the card."""
    begun = []

    class Ended(subprocess.Popen):
        def wait(self, timeout=None):
            if not begun:
                begun.append(self)
                os.kill(os.getpid(), number)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Ended)
    before = signal.signal(number, CTRL_C[number])
    try:
        ended = ask(tmp_path / "out", "--rehearse")
        assert signal.getsignal(number) is CTRL_C[number]
    finally:
        signal.signal(number, before)
    assert ended == command.ENDED_BY_USER
    assert begun[0].poll() == -signal.SIGKILL
    assert (tmp_path / "out" / "report.md").exists()


# What the rows part looks for


def test_equal_bits_are_told_from_others():
    company, row = torch.randn(9, 4), torch.randn(4)
    tried = (1, 2, 3, 8)
    assert str(classes_of(lambda x: 2 * x, company, row, tried)) == "same bits"
    by_number = classes_of(lambda x: x + (len(x) > 2), company, row, tried)
    assert (str(by_number), by_number.holds) == ("1-2, then 3-8", False)
    by_place = classes_of(lambda x: x + torch.arange(len(x))[:, None], company, row, tried)
    assert str(by_place) == "same bits; depends on the place" or not by_place.holds
    by_company = classes_of(lambda x: x + x.sum(), company, row, tried)
    assert str(by_company) == "1, then 2, then 3, then 8"
    again = row_classes(lambda n: [torch.tensor([n % 2])], (1, 2, 3))
    assert str(again) == "1, then 2, then 3 (as 1)"


@pytest.mark.parametrize("number", [1, 4, 6])
def test_tiles_compute_the_product(number):
    weight, x = torch.randn(5, 3, dtype=torch.float64), torch.randn(number, 3, dtype=torch.float64)
    sizes: list[int] = []

    def product(rows):
        sizes.append(len(rows))
        return rows @ weight.T

    torch.testing.assert_close(in_tiles(product, 4)(x), x @ weight.T)
    assert set(sizes) == {4}
    torch.testing.assert_close(in_batches(weight, 4)(x), x @ weight.T)


def test_a_rule_is_in_force_only_inside():
    before = dict(ROW_RULES)
    rule = RowRule(64, 64, 64)
    with ruled(torch.bfloat16, rule), ruled(torch.float16, rule):
        assert ROW_RULES[torch.bfloat16] is ROW_RULES[torch.float16] is rule
    assert before == ROW_RULES


def test_torch_is_tried_without_triton_kernels(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    for name in candidates_on("cuda"):
        with candidate(torch.float32, name):
            assert (os.environ[SWITCH] == "off") == (name != TRITON)
    assert os.environ[SWITCH] == "off"
    assert TRITON not in candidates_on("cpu")


def test_a_row_that_depends_on_its_company_is_reported(tmp_path, monkeypatch):
    def by_number(x, weight):
        return (x @ weight.T) * (1 + (len(x) > 4) * 1e-3)

    monkeypatch.setattr(rows.F, "linear", by_number)
    notes = Notes(tmp_path / "rows.found.json")
    rows.run(Settings(**REHEARSAL | {"dtypes": ("float32",)}), notes)
    layers = notes.found["linear"]["float32"]["small"]
    assert all(layer["plain"] != "same bits" for layer in layers.values())
    state = {"status": DONE, "seconds": 1.0}
    (tmp_path / "rows.state.json").write_text(json.dumps(state))
    assert "| float32 | small | 0 of 6 |" in page(collect(tmp_path, True))


def test_a_kernel_that_fails_leaves_the_others(tmp_path):
    notes = Notes(tmp_path / "triton.found.json")
    with triton_kernels._noted(notes, "float32", "small", "head"):
        raise torch.OutOfMemoryError("no memory is left\nand more")
    assert read_notes(tmp_path / "triton.found.json") == {
        "failed": {"float32": {"small": {"head": "no memory is left"}}}
    }


# Weights without internet


def test_pieces_are_joined_where_the_cache_looks(tmp_path):
    source = weights.CATALOG[weights.DEFAULT_TARGET].source
    folder, cache = tmp_path / "pieces", tmp_path / "cache"
    folder.mkdir()
    with pytest.raises(SystemExit, match="holds 0 bytes"):
        weights.join_pieces(folder, cache)
    half = source.num_bytes // 2
    for name, size, first in (("0", half, b"a"), ("1", source.num_bytes - half, b"b")):
        with (folder / f"{source.file_name}.part{name}").open("wb") as piece:
            piece.write(first)
            piece.truncate(size)  # a hole, no 98 MB
    whole = weights.join_pieces(folder, cache)
    assert whole == cache / "work" / "smollm2-135m" / source.file_name
    assert whole.stat().st_size == source.num_bytes
    with whole.open("rb") as file:
        assert file.read(1) == b"a"
        file.seek(half)
        assert file.read(1) == b"b"
    whole.unlink()
    (cache / "models" / f"smollm2-135m-v{CONVERSION_VERSION}").mkdir(parents=True)
    weights.join_pieces(folder, cache)  # it is converted already
    assert not whole.exists()


# The report


def test_nothing_private_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "secrethost.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jdoe"))
    scrubber = Scrubber.of_this_machine(Path("/home/jdoe/clients/acme/out"))
    text = scrubber.text(
        'File "/home/jdoe/clients/acme/blockdraft/engine.py", line 3: jdoe@secrethost, '
        "~/x/y.json, /opt/torch/lib/, secrethost.example.org, acme, 12 tokens/s, and/or, 3 / 4"
    )
    for private in ("jdoe", "secrethost", "acme", "/home", "/opt", "clients"):
        assert private not in text
    assert 'File ".../engine.py", line 3' in text
    assert "12 tokens/s, and/or, 3 / 4" in text
    assert scrubber.value({"/a/b/c.py": [1, ("jdoe",), None]}) == {".../c.py": [1, ["..."], None]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cc -I/opt/acme/python -L/usr/acme/lib64 -lcuda", "cc -I.../python -L.../lib64 -lcuda"),
        ("/tmp/torchinductor_jdoe", ".../torchinductor_..."),
        ("JDoe at GPU07.corp.acme.com", "... at ..."),
        ("https://jdoe:token@pypi.corp.example/simple failed", "https://... failed"),
        ("no answer from 10.1.22.3:8080", "no answer from ...:8080"),
        ("/srv/big corp/acme/out/x/y.json", ".../y.json"),
        *(
            (harmless, harmless)
            for harmless in (
                "torch 2.13.0, driver 580.65.06",
                "<function f at 0x7f>, tests/exact/test_gpu.py:31",
            )
        ),
    ],
)
def test_hidden_in_a_log(monkeypatch, text, expected):
    monkeypatch.setattr(platform, "node", lambda: "gpu07")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    scrubber = Scrubber.of_this_machine(Path("/srv/big corp/acme/out"))
    assert scrubber.text(text) == expected


def test_a_user_may_be_called_as_a_part(tmp_path):
    """Or as anything else that the report is made of."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    scrubber = Scrubber(("training", "status", "found"))
    write_report(out, work, scrubber, is_rehearsal=False)
    assert json.loads((out / "report.json").read_text())["parts"]["training"]["status"] == "not run"


def test_the_folder_stays_below_what_can_be_sent(tmp_path, monkeypatch, caplog):
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    (out / "drafter.tar.007").write_bytes(b"of an earlier, larger drafter")
    (work / "drafter.tar.000").write_bytes(bytes(1000))
    (work / "rows.log").write_text("x" * 10_000_000)
    state = json.dumps({"status": FAILED, "seconds": 1.0, "limit": 1})
    (work / "rows.state.json").write_text(state)
    scrubber = Scrubber(())
    write_report(out, work, scrubber, is_rehearsal=False)
    assert [path.name for path in out.glob("drafter*")] == ["drafter.tar.000"]
    small = sum(path.stat().st_size for path in out.iterdir())
    assert small < 30_000
    monkeypatch.setattr(report, "MOST_BYTES", small - 1)
    write_report(out, work, scrubber, is_rehearsal=False)
    assert list(out.glob("drafter*")) == []
    assert "too large to be sent" in caplog.text


def test_the_drafter_that_ships_can_be_sent():
    """One that is trained from it has its size, but no Hydra head, which is trained apart."""
    folder = ROOT / "src" / "blockdraft" / "hub" / "drafters" / "smollm2-135m"
    sizes = [path.stat().st_size for path in folder.iterdir() if path.name != HEAD_NAME]
    assert sum(sizes) < report.MOST_BYTES - 2_000_000


def test_more_than_ten_pieces_of_a_drafter_are_joined_in_order(tmp_path):
    """In the order of a shell's `cat drafter.tar.*`."""
    drafter, work = tmp_path / "drafter", tmp_path / "work"
    drafter.mkdir()
    work.mkdir()
    (drafter / "weights").write_bytes(bytes(range(256)) * 100)
    pieces = training.pack(drafter, work, 1000)
    assert len(pieces) > 20
    joined = b"".join(path.read_bytes() for path in sorted(work.glob("drafter.tar.*")))
    with tarfile.open(fileobj=io.BytesIO(joined)) as archive:
        assert archive.extractfile("drafter/weights").read() == (drafter / "weights").read_bytes()


def test_the_report_of_any_state_renders(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    scrubber = Scrubber(("jdoe",))
    write_report(out, work, scrubber, is_rehearsal=True)
    assert json.loads((out / "report.json").read_text())["parts"]["speed"]["status"] == "not run"
    for part in PARTS:
        Notes(notes_path(work, part.name)).note("error", value="OSError: jdoe has no /a/b/c")
        (work / f"{part.name}.log").write_text("Traceback\njdoe\n")
        state = {"status": FAILED, "seconds": 2.0, "limit": 9}
        (work / f"{part.name}.state.json").write_text(json.dumps(state))
    (work / "drafter.tar.000").write_bytes(b"x")
    write_report(out, work, scrubber, is_rehearsal=False)
    text = (out / "report.md").read_text()
    assert all(said in text for said in report.SAYS.values())
    assert text.count("OSError: ... has no .../c") == len(PARTS)
    written = {path.name: path.read_text() for path in out.iterdir()}
    assert set(written) == {"report.json", "report.md", "logs.txt", "drafter.tar.000"}
    assert not any("jdoe" in content for content in written.values())


def test_a_reader_finds_first_what_matters(tmp_path):
    point = [
        {"way": "plain", "tokens_per_second": 50.0},
        {"way": "adaptive", "tokens_per_second": 9},
    ]
    found = {
        "environment": {"gpu": {"name": "a card"}},
        "tests": {"counts": {"passed": 36, "failed": 2}},
        "triton": {"their own check": {"bfloat16": "passed"}},
        "proof": {"taken": ["float32", None], "proof": {"verdict": "proven"}},
        "speed": {
            "blockdraft": {"exact": {"8": point, "error": "no memory"}},
            "transformers": {"8": {"tokens_per_second": 12.5}},
        },
        "training": {
            "evaluations": [{"step": 0, "true_tau": {"all": 1.5}}, {"step": 7, "true_tau": {}}]
        },
    }
    whole = {part.name: found.get(part.name, {}) for part in PARTS}
    assert report._in_short(whole)[3:] == [
        "- Card: a card, torch unknown",
        "- Tests on the card: passed 36, failed 2",
        "- Own check of the Triton kernels: bfloat16 passed",
        "- Load check of the pair: no rule passes",
        "- Proof of the pair: proven",
        "- Tokens/s at 8 requests (exact): plain 50.0, adaptive 9, transformers 12.5",
        "- Tau before training and after 7 steps: 1.500, nan",
    ]
    assert report._in_short({part.name: {} for part in PARTS}) == []


# All of it


@pytest.mark.slow
def test_the_rehearsal(tmp_path, monkeypatch):
    """Every part runs on a CPU, the drafter comes back, and the report has no path of this run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    assert command.main([str(out), "--rehearse", "--minutes", "10"]) == 0
    parts = json.loads((out / "report.json").read_text())["parts"]
    assert {own["status"] for own in parts.values()} == {DONE}
    found = {name: own["found"] for name, own in parts.items()}
    assert found["proof"]["proof"]["verdict"] == "proven"
    assert found["forwards"]["rules"]["float32"]["the library's"]["tiny"] == "holds"
    assert "there is no card" in found["triton"]["skipped"]
    assert set(found["speed"]["transformers"]) == {"1", "3"}
    drafted = found["ledger"]["steps"]["exact off, float32"]["1 drafted"]
    assert drafted["operations"] > 100
    assert [row["step"] for row in found["training"]["evaluations"]] == [0, 2]
    assert list(out.glob("drafter.tar.*"))
    for name in ("report.json", "report.md", "logs.txt"):
        text = (out / name).read_text()
        assert str(tmp_path) not in text
        assert str(ROOT) not in text
        assert sys.prefix not in text
    assert sum(path.stat().st_size for path in out.iterdir()) < report.MOST_BYTES
    assert command.main([str(out), "--rehearse"]) == 0  # nothing is left to do
