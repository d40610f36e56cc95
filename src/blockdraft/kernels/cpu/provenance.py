"""What the compiled kernels were made with, for results that depend on their bits."""

import re

from blockdraft.kernels.cpu.build import build, compile_flags

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
    compilers = sorted({_whole(content, found) for found in _COMPILER.finditer(content)})
    threads = [_OPENMP_FLAG] if _OPENMP_CALL in content else []
    return {
        "compiler": ", ".join(compilers) or "unknown",
        "flags": " ".join([*compile_flags(), *threads]),
    }


def _whole(content: bytes, found: re.Match[bytes]) -> str:
    """What was found, with the name of its distribution, which clang writes in front."""
    first = found.start()
    if not found[0].startswith(b"GCC"):
        first = content.rfind(b"\0", 0, first) + 1
    return content[first : found.end()].decode(errors="replace")
