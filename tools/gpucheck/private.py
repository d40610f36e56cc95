"""Takes out of a report what says whose machine it was made on."""

import contextlib
import getpass
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_A_NAME = {"root", "user", "ubuntu", "runner", "admin", "localhost", "cuda", "home", "work"}
"""Users and hosts called so are nobody."""
_PATH = re.compile(r"(?<![\w./<-])~?/(?:[^\s/:'\",()\[\]<>|]+/)+([^\s/:'\",()\[\]<>|]*)")


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Replaces absolute paths by their last name, and words that name user or host."""

    words: tuple[str, ...]

    @classmethod
    def of_this_machine(cls, *folders: Path) -> "Scrubber":
        """What must not leave this machine; of `folders`, the names of their parents."""
        words = {platform.node(), platform.node().partition(".")[0], Path.home().name}
        with contextlib.suppress(OSError, KeyError):  # a user without a name
            words.add(getpass.getuser())
        for folder in folders:
            if folder.is_relative_to(Path.home()):
                words |= set(folder.relative_to(Path.home()).parts[:-1])
        return cls(tuple(sorted(w for w in words if len(w) > 2 and w.lower() not in NOT_A_NAME)))

    def text(self, text: str) -> str:
        """The same without them."""
        text = _PATH.sub(lambda found: f".../{found[1]}" if found[1] else "...", text)
        for word in self.words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "...", text)
        return text

    def value(self, value: Any) -> Any:
        """Plain values for JSON, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value
