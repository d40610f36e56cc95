"""Options of the test suite."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Undo what the command line does to the log: its stream is closed when its test ends."""
    logger = logging.getLogger("blockdraft")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--golden`."""
    parser.addoption(
        "--golden",
        type=Path,
        default=Path(__file__).parent / "parity" / "golden",
        help="folder of golden drafters to replay (default: the ones in the repository)",
    )
