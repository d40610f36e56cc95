"""Triton kernels on a CPU: in a process that has TRITON_INTERPRET=1, by Triton's interpreter.

The variable counts when Triton is imported, so such tests run in a process of their own, which
tests/unit/kernels/test_in_triton_interpreter.py starts.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from blockdraft.kernels.interface import Backend

MISSING = None if find_spec("triton") is not None else "triton is not installed"
IS_ON = MISSING is None and os.environ.get("TRITON_INTERPRET") == "1"
WHY_NOT = MISSING or "not in a process of Triton's interpreter"


def triton_on_cpu(dtype: torch.dtype) -> Backend:
    """The backend of a card, its kernels interpreted; skips the test where that is not possible."""
    if not IS_ON:
        pytest.skip(WHY_NOT)
    from blockdraft.kernels.cuda.backend import TritonBackend

    return TritonBackend(dtype, "cpu")
