"""The library is compiled once a machine, appears whole, and its absence harms nobody."""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from blockdraft.kernels.cpu import build as build_module
from blockdraft.kernels.cpu import library as library_module
from blockdraft.kernels.cpu import provenance
from blockdraft.kernels.cpu.build import COMPILE_FLAGS, EXTRA_FLAGS, SOURCES, NoKernels, build
from blockdraft.kernels.cpu.library import SWITCH, Library, library

Patch = pytest.MonkeyPatch
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv(EXTRA_FLAGS, "-O0")  # an eighth of the time
    return tmp_path / "kernels"


@pytest.fixture
def load() -> Callable[[], Library | None]:
    """`library` as at the start of a process."""
    return library.__wrapped__


def libraries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.suffix != ".lock")


@needs_compiler
def test_it_is_compiled_once(cache: Path, monkeypatch: Patch) -> None:
    path = build()
    assert libraries(cache) == [path]
    Library(str(path))
    monkeypatch.setattr(build_module.shutil, "which", lambda name: None)
    assert build() == path


@needs_compiler
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    strict = ["-Werror", "-Wshadow", "-Wconversion", "-fopenmp", "-fsyntax-only"]
    for source in sorted(SOURCES.glob("*.cpp")):
        done = subprocess.run(["c++", *COMPILE_FLAGS, *strict, str(source)])
        assert done.returncode == 0, source


@pytest.mark.parametrize(
    ("written", "compiler"),
    [
        (b"x\0GCC: (GNU) 12.2.0\0GCC: (GNU) 12.2.0\0", "GCC: (GNU) 12.2.0"),
        (b"x\0Ubuntu clang version 14.0.0\0", "Ubuntu clang version 14.0.0"),
        (b"x\0GCC: (GNU) 13\0clang version 18.1.3\0", "GCC: (GNU) 13, clang version 18.1.3"),
        (b"nobody", "unknown"),
    ],
)
def test_compilers_are_named_as_they_wrote_themselves(
    tmp_path: Path, monkeypatch: Patch, written: bytes, compiler: str
) -> None:
    made = tmp_path / "kernels.so"
    made.write_bytes(b"\x7fELF" + written)
    monkeypatch.setattr(provenance, "build", lambda: made)
    assert provenance.made_with()["compiler"] == compiler


def test_flags_of_the_user_are_told(tmp_path: Path, monkeypatch: Patch) -> None:
    made = tmp_path / "kernels.so"
    made.write_bytes(b"\x7fELF, which calls GOMP_parallel\0")
    monkeypatch.setattr(provenance, "build", lambda: made)
    monkeypatch.setenv(EXTRA_FLAGS, "-O1 -DNAME='a b'")
    flags = " ".join([*COMPILE_FLAGS, "-O1", "-DNAME=a b", "-fopenmp"])
    assert provenance.made_with()["flags"] == flags


def test_its_name_tells_apart_whatever_makes_it_another_library(monkeypatch: Patch) -> None:
    names = {build_module._digest(None)}
    names.add(build_module._digest(Path("libgomp.so")))
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "cpu_features", lambda: "another one")
        names.add(build_module._digest(None))
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "COMPILE_FLAGS", ("-O0",))
        names.add(build_module._digest(None))
    with monkeypatch.context() as patch:
        patch.setattr(build_module.torch, "__version__", "0.1")
        names.add(build_module._digest(None))
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "another-compiler")
        names.add(build_module._digest(None))
    assert len(names) == 6


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no-such-compiler, which CXX names, is not found; install or"),
        ("false", "failed"),
    ],
)
def test_a_failure_leaves_nothing_behind(
    compiler: str, reason: str, cache: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NoKernels, match=reason):
        build()
    assert libraries(cache) == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["a.cpp: In function 'f':", "a.cpp:3:1: error: no type"], "a.cpp:3:1: error: no type"),
        (["ld: warning: old", "ld: b.o: multiple definition of 'k'", "collect2: error: ld failed"],
         "ld: b.o: multiple definition of 'k'"),
        (["collect2: error: ld failed"], "collect2: error: ld failed"),
    ],
)  # fmt: skip
def test_a_failure_names_what_the_compiler_or_linker_says(
    said: list[str], told: str, cache: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "said").write_text("\n".join(said))
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ncat '{tmp_path}/said' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NoKernels) as failure:
        build()
    assert str(failure.value) == f"{compiler} failed: {told}"


def test_without_any_compiler_it_says_so(cache: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CXX", " ")  # as if it were unset
    monkeypatch.setattr(build_module.shutil, "which", lambda name: None)
    with pytest.raises(NoKernels, match=r"no C\+\+ compiler .* install one"):
        build()


def test_a_failure_is_one_line_in_the_log(
    cache: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, load: Callable[[], object]
) -> None:
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING, logger=library_module.__name__):
        assert load() is None
    (record,) = caplog.records
    assert "no kernels" in record.message


@pytest.mark.slow
@needs_compiler
def test_a_library_that_does_not_load_is_compiled_again(
    cache: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, load: Callable[[], object]
) -> None:
    path = build()
    path.write_bytes(b"half")
    assert load() is not None
    assert "compiled again" in caplog.text
    assert path.stat().st_size > len(b"half")


def planted(cache: Path) -> Path:
    """A library under the name that is looked for."""
    cache.mkdir(exist_ok=True)
    path = cache / f"{build_module._digest(build_module._loaded_openmp())}.so"
    path.write_bytes(b"code")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("place", ["the library", "its folder"])
def test_what_everybody_may_write_is_not_loaded(place: str, cache: Path) -> None:
    path = planted(cache)
    assert build() == path
    open_path = {"the library": path, "its folder": cache}[place]
    open_path.chmod(0o777)
    with pytest.raises(
        NoKernels, match=rf"{open_path} is writable by everybody, .*BLOCKDRAFT_CACHE to"
    ):
        build()


@pytest.mark.parametrize("is_there", [True, False])
def test_what_belongs_to_another_user_is_not_loaded_or_compiled_there(
    is_there: bool, cache: Path, monkeypatch: Patch
) -> None:
    path = planted(cache)
    if not is_there:
        path.unlink()
    monkeypatch.setattr(build_module, "_trusted_owners", lambda: frozenset({-1}))
    with pytest.raises(NoKernels, match="kernels belongs to user"):
        build()


def test_what_another_user_puts_there_while_we_wait_is_not_loaded(
    cache: Path, monkeypatch: Patch
) -> None:
    class Waited(build_module.FileLock):
        def __enter__(self) -> "Waited":
            planted(cache).chmod(0o777)
            return super().__enter__()

    monkeypatch.setattr(build_module, "FileLock", Waited)
    with pytest.raises(NoKernels, match="is writable by everybody"):
        build()


def test_a_library_of_ours_is_loaded_from_a_folder_in_which_nobody_may_replace_it(
    cache: Path,
) -> None:
    path = planted(cache)
    cache.parent.chmod(0o777)  # as Kubernetes mounts an emptyDir
    cache.chmod(0o1777)
    path.chmod(0o775)
    assert build() == path


def test_what_is_compiled_is_ours_alone_whatever_the_umask(cache: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(build_module, "_run", lambda command: Path(command[-1]).touch())
    monkeypatch.setenv(build_module.COMPILER, "true")
    previous = os.umask(0)
    try:
        path = build()
    finally:
        os.umask(previous)
    assert build() == path
    assert [one.stat().st_mode & 0o777 for one in (cache, path)] == [0o755, 0o755]


def test_a_file_that_is_no_library_is_not_used(
    cache: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, load: Callable[[], object]
) -> None:
    cache.mkdir()
    broken = cache / "broken.so"
    broken.write_bytes(b"half")
    monkeypatch.setattr(library_module, "build", lambda: broken)
    assert load() is None
    assert "broken.so" in caplog.text


def test_they_can_be_switched_off(
    cache: Path, monkeypatch: Patch, load: Callable[[], object]
) -> None:
    monkeypatch.setenv(SWITCH, "off")
    assert load() is None
    assert not cache.exists()
