"""Options of the test suite."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockdraft.core.machine import num_cpus

# Processes that test side by side share the cores. Read when torch is loaded, here and by every
# program that a test starts.
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cpus() // _NUM_WORKERS)))


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Undo what the command line does to the log: its stream is closed when its test ends."""
    logger = logging.getLogger("blockdraft")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operations only, as on a machine without a compiler."""
    monkeypatch.setattr("blockdraft.kernels.ops.library", lambda: None)


@pytest.fixture(params=["kernels", "torch"])
def either_way(request: pytest.FixtureRequest) -> str:
    """With kernels, where they can be compiled, and without."""
    if request.param == "torch":
        request.getfixturevalue("without_kernels")
    return str(request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--golden`."""
    parser.addoption(
        "--golden",
        type=Path,
        default=Path(__file__).parent / "parity" / "golden",
        help="folder of golden drafters to replay (default: the ones in the repository)",
    )
