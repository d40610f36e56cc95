"""Programs of answers: which one counts, and that it runs apart from the machine."""

import socket
import sys
import time
from pathlib import Path

import pytest

from blockdraft.bench.scores import sandbox
from blockdraft.bench.scores.programs import program_of
from blockdraft.bench.scores.sandbox import check_sandbox, passes
from blockdraft.bench.scores.scores import check_scored, is_right
from blockdraft.bench.workload import BenchPrompt, read_workload
from blockdraft.core.errors import ConfigError

CHECK = "def check(candidate):\n    assert candidate(2) == 4\n"
QUESTION = (
    'Solve it:\n```python\nfrom math import floor\n\ndef twice(x):\n    """Double it."""\n```'
)
RIGHT = "def twice(x):\n    return floor(2 * x)\n"


@pytest.fixture
def apart():
    try:
        check_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))


def answer_is_right(answer, question=QUESTION, test=CHECK, entry_point="twice"):
    prompt = BenchPrompt("a", "code", question, test=test, entry_point=entry_point)
    return is_right(prompt, answer)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"Here:\n```python\n{RIGHT}```\nand\n```python\nprint(twice(1) / 0)\n```", True),
        (f"```\nprint(1 / 0)\n```\n```python\n{RIGHT}", True),
        (RIGHT, True),
        (RIGHT.replace("2", "3"), False),
        (RIGHT.replace("twice", "thrice"), False),
        ("no program at all", False),
        ("", False),
        (f"{RIGHT}raise SystemExit(0)\n", False),
        (f"import os\n{RIGHT}os._exit(0)\n", False),
    ],
)
def test_an_answer_is_right_if_its_program_passes_the_test(answer, right):
    assert answer_is_right(answer) == right


@pytest.mark.usefixtures("apart")
def test_a_function_whose_name_was_not_told_gets_it():
    test = "assert set(double_it((2, 3))) == {4, 6}"
    answer = "```python\ndef two(x):\n    return 2 * x\n\ndef f(t):\n    return map(two, t)\n```"
    told = "Write `double_it`."
    assert answer_is_right(answer, "Write it.", test, None)
    assert not answer_is_right(answer, told, test, None)
    assert answer_is_right(answer.replace("f(t)", "double_it(t)"), told, test, None)
    assert answer_is_right("def sum(a, b): return a - b", "x", "assert sum(3, 1) == 2", None)


def test_a_text_that_is_no_program_has_none():
    assert program_of("", "```python\ndef f(:\n```", "assert f()", None) is None
    assert program_of("", "```python\nx = 1\n```", "assert f()", None) is None


@pytest.mark.usefixtures("apart")
def test_a_program_has_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        with socket.create_connection(("127.0.0.1", port), 2):
            pass
        assert not passes(connect)
    assert passes("import socket\nsocket.socket()")


@pytest.mark.usefixtures("apart")
def test_a_program_changes_no_file_but_has_a_folder(tmp_path):
    for place in (tmp_path / "new", Path.home() / "blockdraft-was-here", Path("/dev/shm/new")):
        assert not passes(f"open({str(place)!r}, 'w')")
        assert not place.exists()
    (tmp_path / "old").write_text("kept", encoding="utf-8")
    assert not passes(f"import os\nos.remove({str(tmp_path / 'old')!r})")
    assert passes("open('here', 'w').write('a')\nassert open('/tmp/here').read() == 'a'")
    # An interpreter that lies there still does.
    own = {Path(p).parts[2] for p in (sys.prefix, sys.base_prefix) if p.startswith("/tmp/")}
    assert passes(f"import os\nassert set(os.listdir('/tmp')) == {own or set()!r}")
    assert not passes("import os\nos.environ['HOME']")
    assert not passes("import ctypes\nif ctypes.CDLL(None).umount2(b'/tmp', 2): raise OSError")


@pytest.mark.usefixtures("apart")
def test_a_program_that_takes_too_much_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    assert not passes("while True: pass")
    assert not passes("x = bytes(2 * 2**30)")
    monkeypatch.setattr(sandbox, "WAIT_SECONDS", 3)
    assert not passes("import time\ntime.sleep(99)")
    monkeypatch.undo()
    assert passes("x = 'fast enough'")


@pytest.mark.usefixtures("apart")
def test_what_a_program_says_is_not_kept():
    status, said = sandbox._run("import os\nos.write(2, b'no end of it')\nraise SystemExit(96)")
    assert (status, said) == (1, "")


@pytest.mark.usefixtures("apart")
def test_what_a_program_has_started_ends_with_it(tmp_path):
    mark = f"blockdraft-{tmp_path.name}-{time.monotonic_ns()}"
    started = (
        "import subprocess, sys\n"
        f"code = 'import time; time.sleep(99)  # {mark}'\n"
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
    )
    assert passes(started)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if mark.encode() in line]


def test_where_programs_cannot_be_kept_apart_none_is_run(monkeypatch, tmp_path):
    ran = tmp_path / "ran"
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nprint('unshare: no', file=sys.stderr)\nsys.exit(96)\n")
    monkeypatch.setattr(sandbox, "_WORKER", worker)
    prompts = [BenchPrompt("a", "code", QUESTION, test=CHECK, entry_point="twice")]
    if sys.platform == "linux":
        with pytest.raises(ConfigError, match="unshare: no"):
            check_scored(prompts)
    with pytest.raises(ConfigError, match="unshare: no"):
        passes(f"open({str(ran)!r}, 'w')")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        check_scored(prompts)
    assert not ran.exists()


def test_a_row_with_a_test_is_read(tmp_path):
    path = tmp_path / "code.jsonl"
    path.write_text('{"prompt": "p", "test": "t", "entry_point": "e"}\n', encoding="utf-8")
    assert read_workload(path) == [BenchPrompt("code-1", "code", "p", test="t", entry_point="e")]
