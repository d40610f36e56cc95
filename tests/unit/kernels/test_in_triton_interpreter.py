"""Triton kernels on a machine without a card: interpreted, and compiled for cards elsewhere.

Both happen in processes of their own: how Triton runs kernels is settled when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import triton_interpreter

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
SHARED = {"80": 163 * 1024, "89": 99 * 1024, "90": 227 * 1024, "120": 99 * 1024}
"""Bytes that a program may have on an A100, an H100, and cards for desktops."""
MOST_SPILLED = 128
"""Bytes of a thread that its registers need not hold: what is next to nothing."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton_interpreter.MISSING is not None, reason="triton is not installed"),
    pytest.mark.skipif(triton_interpreter.IS_ON, reason="this is the process of the interpreter"),
]


def run(*arguments: str, **variables: str) -> str:
    """What a Python process prints; fails with its last lines if it does."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
    )
    said = finished.stdout + finished.stderr
    assert finished.returncode == 0, said[-4000:]
    return said


@pytest.mark.parametrize(
    "tests", [("test_triton.py",), ("test_backends.py", "-k", "triton")], ids=lambda own: own[0]
)
def test_kernels_in_the_interpreter(tests):
    file, *chosen = tests
    said = run(
        *("-m", "pytest", str(FOLDER / file), *chosen, "-q", "-n", "0", "-p", "no:cacheprovider"),
        TRITON_INTERPRET="1",
    )
    assert " passed" in said
    assert " skipped" not in said


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_for_cards(capability, tmp_path):
    """They fit its memory and its registers. Nothing is said about what they would compute."""
    most = SHARED[capability]
    said = run(
        *(str(FOLDER / "compile_triton.py"), capability, str(most)), TRITON_CACHE_DIR=str(tmp_path)
    )
    compiled = [line.split() for line in said.splitlines() if line.startswith("compiled")]
    assert len(compiled) == 38
    for *what, shared, spilled in compiled:
        assert int(shared) <= most, what
        assert int(spilled) <= MOST_SPILLED, what
