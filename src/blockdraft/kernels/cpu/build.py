"""Compile the kernels once on this machine, and keep the library in the cache."""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from blockdraft.core.machine import cpu_features, num_cpus
from blockdraft.hub.cache_dir import cache_dir

SOURCES = Path(__file__).parent / "source"
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    # Neither reorders a sum: the order of operations is the one in the source.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # lanes are passed between inlined functions only
    "-Wno-unknown-pragmas",  # without OpenMP everything runs on one thread
)
COMPILER = "CXX"
"""Environment variable: the command of another compiler than the system's."""
EXTRA_FLAGS = "BLOCKDRAFT_KERNEL_FLAGS"
"""Environment variable: more flags for the compiler and the linker, as for a sanitizer."""
LOCK_TIMEOUT_S = 300.0
"""Longest wait for another process that compiles, seconds."""
COMPILE_TIMEOUT_S = 240.0
_OURS_ALONE = 0o755
"""Rights of what is made here, also where the user's umask would let others write to it."""

logger = logging.getLogger(__name__)


class NoKernels(Exception):
    """There is no library; says why."""


def build() -> Path:
    """The compiled library; compiles it if this machine has none of these sources yet.

    The name is a digest of all that decides what the library is: sources, flags, a compiler that
    the user names, torch with its threads, the C library, and what this CPU can do, since home
    folders travel between machines. It appears under its name by one rename; other processes wait
    meanwhile.

    Raises:
        NoKernels: no compiler, no success, no place to write to, or somebody else may write there.
    """
    threads = _loaded_openmp()
    library = cache_dir() / "kernels" / f"{_digest(threads)}.so"
    _check_owners(library)
    if library.exists():
        return library
    try:
        library.parent.mkdir(mode=_OURS_ALONE, parents=True, exist_ok=True)
        _check_owners(library)
        with FileLock(library.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
            if not library.exists():  # else another process made it while we waited
                logger.info("compiling kernels for this CPU, once, which may take a minute")
                _compile(library, threads)
    except (OSError, subprocess.SubprocessError, Timeout) as error:
        raise NoKernels(str(error)) from error
    _check_owners(library)  # it may have come from another process while we waited
    return library


def _check_owners(library: Path) -> None:
    """Refuse a library that another user may have put there: its code runs as whoever loads it.

    Only root's and our own are taken. A group that may write is trusted, and so is what holds the
    folder: volumes of containers are often mounted so, the whole cache even for everybody.
    """
    for path in (library.parent, library):
        if not path.exists():
            continue
        status = path.stat()
        # In a folder such as /tmp nobody may replace what is another user's.
        is_sticky = path.is_dir() and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not is_sticky:
            reason = "is writable by everybody"
        elif status.st_uid not in _trusted_owners():
            reason = f"belongs to user {status.st_uid}"
        else:
            continue
        raise NoKernels(
            f"{path} {reason}, whose code could run here; make it yours alone, or set "
            "BLOCKDRAFT_CACHE to a folder of your own"
        )


def _trusted_owners() -> frozenset[int]:
    return frozenset({0, os.getuid()})


def _digest(threads: Path | None) -> str:
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.is_file()]
    decisive = (
        *(" ".join(compile_flags()), torch.__version__, str(threads), cpu_features()),
        *platform.libc_ver(),
        *filter(None, [os.environ.get(COMPILER)]),
    )
    parts += [text.encode() for text in decisive]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _compile(library: Path, threads: Path | None) -> None:
    compiler = _compiler()
    if "clang" in compiler[0]:
        threads = None  # its OpenMP needs another runtime than torch's
    flags = [*compile_flags(), *(["-fopenmp"] if threads else [])]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(folder, source.stem + ".o")) for source in sources]
        commands = [
            [*compiler, *flags, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(num_cpus()) as compilers:
            list(compilers.map(_run, commands))
        part = Path(folder, library.name)
        # torch's own runtime by its path, not -fopenmp: a second one would bring its own threads.
        runtime = [str(threads)] if threads else []
        _run([*compiler, *_extra_flags(), "-shared", *objects, *runtime, "-o", str(part)])
        part.chmod(_OURS_ALONE)
        part.replace(library)


def compile_flags() -> list[str]:
    """Of the compiler, those that the user adds among them."""
    return [*COMPILE_FLAGS, *_extra_flags()]


def _extra_flags() -> list[str]:
    return shlex.split(os.environ.get(EXTRA_FLAGS, ""))


def _compiler() -> list[str]:
    """The user's own command, or the system's compiler."""
    if own := os.environ.get(COMPILER, "").strip():
        command = shlex.split(own)
        if shutil.which(command[0]) is None:
            remedy = "install or unset it"
            raise NoKernels(f"{command[0]}, which {COMPILER} names, is not found; {remedy}")
        return command
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise NoKernels("no C++ compiler is found; install one, such as g++")


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=COMPILE_TIMEOUT_S,
    )
    if done.returncode:
        raise NoKernels(f"{command[0]} failed: {_complaint(done.stderr)}")


def _complaint(output: str) -> str:
    """The line of a compiler's or a linker's messages that tells what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and "warning" not in line]
    # A linker's own lines need no such word; collect2 only says that it failed.
    errors = [line for line in lines if "error" in line and not line.startswith("collect2")]
    return next(iter([*errors, *lines]), "no message")


def _loaded_openmp() -> Path | None:
    """GNU's OpenMP runtime as torch has loaded it; None if it runs another one, or none."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libgomp" in line}
    return Path(paths.pop()) if len(paths) == 1 else None
