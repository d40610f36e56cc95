"""The tests of the repository that need a GPU, each with its outcome as soon as it has one."""

import re
import subprocess
import sys

from gpucheck.notes import Notes
from gpucheck.settings import ROOT, Settings

TESTS = ("tests/exact/test_gpu.py", "tests/unit/train/test_step.py")
"""All that are marked `gpu`, in the order of their value."""
_OUTCOME = re.compile(r"::(\S+) (PASSED|FAILED|ERROR|SKIPPED)")
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
            if (outcome := _OUTCOME.search(line)) is not None:
                outcomes.setdefault(outcome[2].lower(), []).append(outcome[1])
                notes.note("counts", value={name: len(own) for name, own in outcomes.items()})
            elif _REASON.match(line):
                reasons.append(line.strip()[:400])
    notes.note("tests", value={k: v for k, v in outcomes.items() if k != "skipped"})
    notes.note("reasons", value=reasons)
    notes.note("summary", value=last)
    if process.returncode not in (0, 5):
        raise SystemExit(f"pytest exits with {process.returncode}: {last}")
