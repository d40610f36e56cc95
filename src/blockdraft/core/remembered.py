"""What an earlier start found out about the same models on the same machine.

A start tests its kernels and times its steps. What it finds depends on the weights, the code and
the machine, so the next start of the same need not find it out again. Only outcomes of tests and
times are kept here, never a number that a model computes with: whoever changes the file can skip a
test on their own machine, and nothing more.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH = "BLOCKDRAFT_REMEMBER"
"""Environment variable: "off" reads and writes nothing."""
MAX_FILES = 64
"""Files that are kept beside each other; the oldest go first."""

logger = logging.getLogger(__name__)


class Remembered:
    """Findings by name, as JSON has them."""

    def __init__(self, found: Mapping[str, Any] | None = None) -> None:
        self.found: dict[str, Any] = dict(found or {})
        self.is_new = False
        self._asked: Counter[str] = Counter()

    def get(self, name: str, find_out: Callable[[], T], holds: Callable[[T], bool]) -> T:
        """What is known under this name and still holds, or what is found out now.

        A name may be asked for again, for the next of several things: their order is that of the
        first start.
        """
        numbered = f"{name} #{self._asked[name]}"
        self._asked[name] += 1
        if numbered not in self.found or not holds(self.found[numbered]):
            self.found[numbered] = find_out()
            self.is_new = True
        known: T = self.found[numbered]
        return known


_in_force: ContextVar[Remembered | None] = ContextVar("remembered", default=None)


def _always(_found: object) -> bool:
    return True


def once(name: str, find_out: Callable[[], T], holds: Callable[[T], bool] = _always) -> T:
    """Find something out, unless an earlier start of the same has; see `remembering`.

    What is found must be the same after JSON: lists, not tuples. `holds` is asked about what an
    earlier start found: if it says no, this start finds out again.
    """
    remembered = _in_force.get()
    return find_out() if remembered is None else remembered.get(name, find_out, holds)


@contextmanager
def remembering(path: Path, key: Mapping[str, Any], *, recheck: bool) -> Iterator[Remembered]:
    """Let `once` know what `path` says of `key`; what is new is written if all went well.

    Args:
        path: the file. A disk that cannot be written hinders nothing.
        key: all that the findings depend on. A file with another one is as good as none.
        recheck: find everything out again.
    """
    is_off = os.environ.get(SWITCH, "").lower() == "off"
    remembered = Remembered({} if recheck or is_off else _read(path, key))
    token = _in_force.set(remembered)
    try:
        yield remembered
    finally:
        _in_force.reset(token)
    if remembered.is_new and not is_off:
        try:
            _write(path, key, remembered.found)
        except (OSError, TypeError, ValueError) as error:
            logger.debug("%s cannot be written, so the next start tests again: %s", path, error)


def digest(value: object) -> str:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read(path: Path, key: Mapping[str, Any]) -> dict[str, Any]:
    """The findings of a file; none if there is any doubt about it."""
    try:
        with path.open("rb") as file:
            # Asked of the open file: the one that is read, whatever its name stands for meanwhile.
            status = os.fstat(file.fileno())
            content = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.info("%s cannot be read (%s): tests run again", path, error)
        return {}
    if (reason := _doubt(status, content, key)) is not None:
        logger.info("%s %s: tests run again", path, reason)
        return {}
    found: dict[str, Any] = content["found"]
    return found


def _doubt(status: os.stat_result, content: object, key: Mapping[str, Any]) -> str | None:
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is writable by other users"
    if not isinstance(content, dict) or not isinstance(content.get("found"), dict):
        return "is not what was written"
    if content.get("key") != json.loads(json.dumps(key)):
        return "is for something else"
    if content.get("sha256") != digest(content["found"]):
        return "is damaged"
    return None


def _write(path: Path, key: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps({"key": key, "sha256": digest(found), "found": found}, indent=1)
    # Made for this user alone, and whole under its name or not at all.
    number, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    _forget_oldest(path.parent)


def _forget_oldest(folder: Path) -> None:
    by_age = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[:-MAX_FILES]:
        path.unlink(missing_ok=True)
