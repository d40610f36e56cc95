"""Whether torch's own products give a row the same bits beside any others."""

import os

import pytest

import blockdraft  # noqa: F401 - sets what Intel's libraries read
from blockdraft.core.machine import cpu_vendor

KEEP_ROWS = cpu_vendor() == "GenuineIntel" and "STRICT" in os.environ.get("MKL_CBWR", "")
"""On Intel's processors, as they are set; on others they do not."""

must_differ = pytest.mark.skipif(
    KEEP_ROWS, reason="here torch's products do keep rows, so this fault is none"
)
