"""The tests of the repository that need a GPU, each with its outcome as soon as it has one."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

from gpucheck.notes import Notes
from gpucheck.settings import ROOT, Settings

TESTS = ("tests/exact/test_gpu.py", "tests/unit/train/test_step.py")
"""All that are marked `gpu`, in the order of their value."""
MOST_PROCESSES = 8
"""Each has models of its own on the card."""
_OUTCOME = re.compile(
    r"::(?P<test>\S+) (?P<how>PASSED|FAILED|ERROR|SKIPPED)"
    r"|(?P<their_how>PASSED|FAILED|ERROR|SKIPPED) \S+::(?P<their_test>\S+)$"
)
"""A line of pytest, or of one of several processes: "[gw3] [ 57%] PASSED file::name"."""
_REASON = re.compile(r"^(?:FAILED|ERROR|SKIPPED) .*")


def run(settings: Settings, notes: Notes) -> None:
    """Note the outcomes, and pytest's own summary of what did not pass."""
    outcomes: dict[str, list[str]] = {}
    reasons: list[str] = []
    last = ""
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", *TESTS, "-m", "gpu", "-v", "--tb=short"),
            *("--color=no", "-p", "no:randomly"),
            # A warning of a torch that was not tested must not hide what the test would say.
            *("-W", "default", "-p", "no:cacheprovider", "-rfEs"),
            *(() if settings.device == "cpu" else _in_processes()),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            if _REASON.match(line):
                reasons.append(line.strip()[:400])
            elif (outcome := outcome_of(line)) is not None:
                test, how = outcome
                outcomes.setdefault(how, []).append(test)
                notes.note("counts", value={name: len(own) for name, own in outcomes.items()})
    notes.note("tests", value={k: v for k, v in outcomes.items() if k != "skipped"})
    notes.note("reasons", value=reasons)
    notes.note("summary", value=last)
    if process.returncode not in (0, 5):
        raise SystemExit(f"pytest exits with {process.returncode}: {last}")


def outcome_of(line: str) -> tuple[str, str] | None:
    """The name of a test and how it ended, if a line tells that."""
    found = _OUTCOME.search(line.rstrip())
    if found is None:
        return None
    test, how = found["test"] or found["their_test"], found["how"] or found["their_how"]
    return test, how.lower()


def _in_processes() -> tuple[str, ...]:
    """Most of the time goes into compiling kernels, by one core in each process."""
    number = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)
    return ("-n", str(number)) if number > 1 and find_spec("xdist") is not None else ()
