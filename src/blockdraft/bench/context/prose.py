"""Real text of any length, for long prompts. Loads no model library."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from blockdraft.core.errors import ConfigError, why_unread
from blockdraft.core.jsonl import prompt_text, read_jsonl


@dataclass(frozen=True, slots=True)
class Prose:
    """A long text, and where it comes from."""

    source: str
    text: str

    def describe(self) -> dict[str, object]:
        """Plain values for JSON; the digest tells whether two results read the same text."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"source": self.source, "num_characters": len(self.text), "sha256": digest}


def python_help() -> Prose:
    """The help topics that come with every Python: half a million characters of English prose.

    Each version of Python words them slightly differently.
    """
    return Prose("pydoc_data.topics", "\n\n".join(topics.values()))


def read_prose(paths: Sequence[Path]) -> Prose:
    """Join text files, or the prompts of (gzipped) JSONL files, in order.

    Raises:
        ConfigError: a file cannot be read, or holds no text.
    """
    documents = [document for path in paths for document in _documents(path)]
    return Prose(", ".join(map(str, paths)), "\n\n".join(documents))


def _documents(path: Path) -> list[str]:
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        documents = [prompt_text(row, path, number) for number, row in read_jsonl(path)]
    else:
        documents = [_read_text(path)]
    if not any(document.strip() for document in documents):
        raise ConfigError(f"{path} holds no text; give a text file, or JSONL rows with a prompt")
    return documents


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = why_unread(error)
        raise ConfigError(f"cannot read {path}: {reason}; give a text file in UTF-8") from error
