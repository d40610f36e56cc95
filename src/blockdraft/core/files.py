"""Files that a command leaves behind."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from blockdraft.core.errors import BlockdraftError, ConfigError, DiskError, why_unread

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the system's errors that say that a disk is full."""

LOCK = ".lock"
"""The file in a folder that a process holds while it writes there."""


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else, or lists in lists without end.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def check_output_folder(folder: Path) -> None:
    """Refuse a folder that could not be made or written, without making it.

    Asked before hours of work; the folder itself is made when there is something to put in.

    Raises:
        ConfigError: it, or what would hold it, is a file or not writable.
    """
    nearest = folder.absolute()
    while not nearest.exists() and not nearest.is_symlink():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"output {folder}: {nearest} is not a folder; give another name")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"output {folder}: {nearest} is not writable; give another folder")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to `folder`, which is made if need be.

    Some network disks know no locks: a line in the log says so, and nothing is kept off. A folder
    that was made and in which nothing was left is removed at the end.

    Raises:
        ConfigError: another process holds it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"output {folder}: another process is writing there; wait until it ends, or give "
            f"another folder (if no process is, delete {folder / LOCK})"
        ) from error
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): make sure that no other process writes there", folder, error
        )
    try:
        yield
    finally:
        if made and [path.name for path in folder.iterdir()] in ([], [LOCK]):
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # what is not empty stays
            for path in made:
                path.rmdir()


def is_special(path: Path) -> bool:
    """Whether it is a link, a device or a pipe, which is written to and never replaced."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; what is a device, pipe or link stays one."""
    if is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then move it there.

    It has the mode of any new file: safetensors gives its files to their owner alone, and a server
    may run as somebody else.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    try:
        part.touch()
        mode = part.stat().st_mode
        write(part)
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_room(path: Path, num_bytes: int) -> None:
    """Raise DiskError if the disk that `path` is to be on has less room."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise DiskError(
            f"{path} needs {num_bytes / 2**20:,.1f} MiB and its disk has {free / 2**20:,.1f} MiB "
            "free; make space, or give another folder"
        )


def reserve_disk(path: Path, num_bytes: int) -> None:
    """Make a file of zeros for which the disk is taken at once, where the system can do that.

    Without that, a full disk ends the process when a mapped file is written to, without a word. A
    file that exists keeps what it holds, and grows.

    Raises:
        DiskError: the disk has less room.
    """
    check_room(path, num_bytes - (path.stat().st_size if path.exists() else 0))
    with path.open("ab") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)


@contextmanager
def full_disk_refused(path: Path) -> Iterator[None]:
    """Say what to do when the disk of a file or folder fills up while something is written there.

    Raises:
        DiskError: instead of the error of whichever library was writing.
    """
    try:
        yield
    except BlockdraftError:
        raise
    # safetensors has a type of its own and no number, only the system's words.
    except Exception as error:
        is_full = getattr(error, "errno", None) in FULL
        if not is_full and os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise DiskError(
            f"cannot write to {path}: its disk is full; make space and start again, which "
            "continues from what is there"
        ) from error


@contextmanager
def write_errors_named(path: Path) -> Iterator[None]:
    """Name the file in which a line more is written, whatever the disk fails of.

    Raises:
        DiskError: instead of the system's error, which need not name it.
    """
    try:
        with full_disk_refused(path):
            yield
    except OSError as error:
        raise DiskError(
            f"cannot write to {path}: {why_unread(error)}; fix its disk and start again, which "
            "continues from what is there"
        ) from error
