"""What the compiled kernels were made with, for results that depend on their bits."""

import re

from blockdraft.kernels.cpu.build import COMPILE_FLAGS, build

_COMPILER = re.compile(rb"(?:GCC: \(|clang version )[^\0]+")
"""What compilers write into what they make, its section .comment. It begins with fixed letters: a
search that may begin anywhere reads a megabyte again from every byte of it, for seconds."""
_OPENMP_FLAG, _OPENMP_CALL = "-fopenmp", b"GOMP_parallel"
"""Where there are threads, sources are compiled with the one, and then call the other."""


def made_with() -> dict[str, str]:
    """Compiler and flags, read from the library that is loaded.

    It may have been made before another compiler was installed.
    """
    content = build().read_bytes()
    compilers = sorted({found.decode(errors="replace") for found in _COMPILER.findall(content)})
    threads = [_OPENMP_FLAG] if _OPENMP_CALL in content else []
    return {
        "compiler": ", ".join(compilers) or "unknown",
        "flags": " ".join([*COMPILE_FLAGS, *threads]),
    }
