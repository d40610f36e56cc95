"""Takes out of a report what says whose machine it was made on."""

import contextlib
import getpass
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.hub.cache_dir import cache_dir
from gpucheck.settings import ROOT

NOT_A_NAME = {"root", "user", "ubuntu", "runner", "admin", "localhost", "cuda", "home", "work"}
"""Users and hosts called so are nobody."""
_PART = r"[^\s/:'\",()\[\]<>|]"
# Also behind a compiler's -I and -L.
_PATH = re.compile(rf"(?:(?<![\w./<-])~?|(?<=-[IL]))/(?:{_PART}+/)+({_PART}*)")
_INSIDE = re.compile(rf"(?<!\.)\.\.\./(?:{_PART}+/)*({_PART}*)")
"""Below a folder that is known, and is three dots already."""
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\"<>()\[\]]+", re.IGNORECASE)
_NUMBER = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_ADDRESS = re.compile(rf"(?<![\w.])(?:{_NUMBER}\.){{3}}{_NUMBER}(?![\w.]|-)")


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Replaces absolute paths by their last name, addresses, and words that name user or host.

    folders: known ones, of which nothing is left. Their names may hold spaces, which end a path
    that nobody knows.
    """

    words: tuple[str, ...]
    folders: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls, *folders: Path) -> "Scrubber":
        """What must not leave this machine; of `folders`, the names of their parents."""
        words = {platform.node(), platform.node().partition(".")[0], Path.home().name}
        with contextlib.suppress(OSError, KeyError):  # a user without a name
            words.add(getpass.getuser())
        for folder in folders:
            if folder.is_relative_to(Path.home()):
                words |= set(folder.relative_to(Path.home()).parts[:-1])
        known = (ROOT, sys.prefix, Path.home(), cache_dir(), tempfile.gettempdir(), *folders)
        return cls(
            _longest_first(w for w in words if len(w) > 2 and w.lower() not in NOT_A_NAME),
            # Of a folder right below the root there is not enough to be told from other words.
            _longest_first(str(folder) for folder in known if str(folder).count("/") > 1),
        )

    def text(self, text: str) -> str:
        """The same without them."""
        text = _URL.sub(r"\1://...", text)
        for folder in self.folders:
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])", "...", text)
        for pattern in (_PATH, _INSIDE):
            text = pattern.sub(_shortened, text)
        text = _ADDRESS.sub("...", text)
        for word in self.words:
            # With a host goes its domain; in the names of files an underline ends a word.
            name = rf"(?<![^\W_]){re.escape(word)}(?:(?:\.[a-z][\w-]*)+|(?![^\W_]))"
            text = re.sub(name, "...", text, flags=re.IGNORECASE)
        return text

    def value(self, value: Any) -> Any:
        """Plain values for JSON, keys too. A key that is such a word and nothing else stays."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self._key(str(key)): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def _key(self, key: str) -> str:
        # It is the report's own: a user may be called "training".
        return key if key.lower() in map(str.lower, self.words) else self.text(key)


def _longest_first(names: Any) -> tuple[str, ...]:
    return tuple(sorted(set(names), key=lambda name: (-len(name), name)))


def _shortened(found: re.Match[str]) -> str:
    return f".../{found[1]}" if found[1] else "..."
