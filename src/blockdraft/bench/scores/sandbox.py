"""Programs that a model wrote, run without network and without files that they could change.

Loads no model library.
"""

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from blockdraft.bench.scores.sandbox_worker import UNFIT
from blockdraft.core.errors import ConfigError

SECONDS = 10
"""Of processor time that a program may take."""
WAIT_SECONDS = 60
"""By the clock: it may sleep, and the machine may be busy."""
MOST_BYTES = 2**30
PASSED = 97
"""Exit status of a program that came to its end: one that ends itself early has another."""

_WORKER = Path(__file__).with_name("sandbox_worker.py")


def check_sandbox() -> None:
    """Make sure that programs can be kept apart here.

    Raises:
        ConfigError: they cannot, so none is run.
    """
    if sys.platform != "linux":
        raise ConfigError(
            "--score runs programs that the model wrote, which needs Linux to isolate them from "
            "the network; leave out the sets that have tests"
        )
    status, output = _run("")
    if status == UNFIT:
        raise ConfigError(
            "--score runs programs that the model wrote, and this system does not let a process "
            f"give up its network and files ({output}); allow user namespaces, or leave out the "
            "sets that have tests"
        )


@cache
def passes(program: str) -> bool:
    """Whether a Python program comes to its end within the limits: plain and drafted run once."""
    status, output = _run(f"{program}\n\nraise SystemExit({PASSED})\n")
    if status == UNFIT:
        raise ConfigError(f"a program could not be isolated: {output}; leave out --score")
    return status == PASSED


def _run(program: str) -> tuple[int | None, str]:
    """Exit status and what the worker said; None if it took too long."""
    process = subprocess.Popen(
        [sys.executable, "-I", str(_WORKER), str(SECONDS), str(MOST_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath, "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        _, output = process.communicate(program.encode(errors="replace"), timeout=WAIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, output.decode(errors="replace").strip()
