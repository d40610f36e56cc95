"""Starts random cases in processes of their own and gathers what they show."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.runner import Tally
from tests.fuzz.settings import fuzz_seconds, fuzz_seed

ROOT = Path(__file__).parents[2]
MAX_FAILURES = 5
"""So many failing cases are shown; then it ends."""
HANGS_AFTER = 300.0
"""Seconds that one case may take beside other work."""


@dataclass
class Findings:
    """What a run of many cases showed."""

    fuzz: str
    part: int
    tally: Tally = field(default_factory=Tally)
    failures: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """One line."""
        t = self.tally
        return (
            f"{self.fuzz} {self.part}: {t.num_cases} cases ({t.num_refused} models refused), "
            f"{t.num_samples} samples, {t.num_tokens} tokens, {t.num_long} outputs of 1,000, "
            f"{len(t.widths)} widths, {t.num_rejected} drafts rejected of {t.num_drafted}, "
            f"{t.num_preempted} preemptions, {t.num_aborted} aborts, {t.num_reused} tokens reused; "
            f"compared {t.num_logits} rows of logits, {t.num_keys} positions of keys and values"
        )

    def fail(self, seed: int, what: str) -> None:
        """Note a failing case and how to run it again."""
        again = f"{sys.executable} -m tests.fuzz.run {self.fuzz} --case {seed}"
        self.failures.append(f"case {seed}; again by: {again}\n{what}")


PROGRAM = ("-m", "tests.fuzz.run")


def fuzz(name: str, part: int, program: Sequence[str] = PROGRAM) -> Findings:
    """Run cases for the seconds that are set, past crashes and hangs."""
    findings, index = Findings(name, part), 0
    end = time.monotonic() + fuzz_seconds()
    while time.monotonic() < end and len(findings.failures) < MAX_FAILURES:
        index = _Child(findings, program, index, end - time.monotonic()).run()
    return findings


class _Child:
    """A process that runs cases until the time is over, or one of them ends it."""

    def __init__(
        self, findings: Findings, program: Sequence[str], first: int, seconds: float
    ) -> None:
        self._findings = findings
        self._command = [
            *(sys.executable, *program, findings.fuzz),
            *("--seed", str(fuzz_seed()), "--part", str(findings.part)),
            *("--first", str(first), "--seconds", f"{seconds:.1f}"),
        ]
        self._index, self._seed = first, 0
        self._is_running_case = self._is_hanging = False

    def run(self) -> int:
        """Returns the index of the next case."""
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as child:
                self._read(child)
            errors.seek(0)
            said = errors.read()[-3000:]
        if child.returncode != 0 and len(self._findings.failures) < MAX_FAILURES:
            assert self._is_running_case, f"the fuzz itself failed:\n{said}"
            how = f"the process ended with {child.returncode}"
            if self._is_hanging:
                how = f"it took more than {HANGS_AFTER:g} seconds: it hangs, or cores are busy"
            self._findings.fail(self._seed, f"{how}\n{said}")
        return self._index + 1

    def _read(self, child: "subprocess.Popen[str]") -> None:
        assert child.stdout is not None
        watchdog = _Watchdog(child)
        try:
            for line in child.stdout:
                watchdog.reset()
                self._take(json.loads(line))
                if len(self._findings.failures) >= MAX_FAILURES:
                    child.kill()
        finally:
            watchdog.stop()
            self._is_hanging = watchdog.has_killed

    def _take(self, line: dict[str, Any]) -> None:
        if "case" in line:
            self._index, self._seed, self._is_running_case = line["index"], line["case"], True
            return
        self._is_running_case = False
        tally = {**line["tally"], "widths": set(line["tally"]["widths"])}
        self._findings.tally.add(Tally(**tally))
        if line["refused"]:
            self._findings.refusals.append(line["refused"])
        if line["wrong"]:
            self._findings.fail(line["done"], _shown(line["wrong"]))


class _Watchdog:
    """Kills a process that says nothing for too long."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child
        self._timer: threading.Timer | None = None
        self.has_killed = False
        self.reset()

    def reset(self) -> None:
        self.stop()
        self._timer = threading.Timer(HANGS_AFTER, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _kill(self) -> None:
        self.has_killed = True
        self._child.kill()


def _shown(wrong: Sequence[str]) -> str:
    more = f"\n... and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    return "\n".join(wrong[:8]) + more


def _environment() -> dict[str, str]:
    """Ours, with the sources that were imported here, and no hub to ask."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
