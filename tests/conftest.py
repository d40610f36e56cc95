"""Options of the test suite."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--golden`."""
    parser.addoption(
        "--golden",
        type=Path,
        default=Path(__file__).parent / "parity" / "golden",
        help="folder of golden drafters to replay (default: the ones in the repository)",
    )
