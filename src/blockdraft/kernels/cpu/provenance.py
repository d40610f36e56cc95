"""Which kernels compute, and what they were made with, for results that depend on their bits."""

import re
from pathlib import Path
from typing import Any

import torch

from blockdraft.kernels.cpu.build import COMPILE_FLAGS, build
from blockdraft.kernels.cpu.ops import kernels_for

_COMPILER = re.compile(rb"(?:GCC: \(|[^\0]*\bclang version )[^\0]+")
"""What compilers write into what they make, its section .comment."""
_OPENMP_FLAG, _OPENMP_CALL = "-fopenmp", b"GOMP_parallel"
"""Where there are threads, sources are compiled with the one, and then call the other."""


def describe_kernels(dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Whether kernels run for models of this type on this device; compiler and flags if they do.

    Plain values for JSON. The compiler is read from the library that is loaded: it may have been
    made before another compiler was installed.
    """
    if kernels_for(torch.empty(0, dtype=dtype, device=device)) is None:
        return {"used": False, "compiler": None, "flags": None}
    return {"used": True, **_made_with(build())}


def _made_with(library: Path) -> dict[str, str]:
    content = library.read_bytes()
    compilers = sorted({found.decode(errors="replace") for found in _COMPILER.findall(content)})
    threads = [_OPENMP_FLAG] if _OPENMP_CALL in content else []
    return {
        "compiler": ", ".join(compilers) or "unknown",
        "flags": " ".join([*COMPILE_FLAGS, *threads]),
    }
