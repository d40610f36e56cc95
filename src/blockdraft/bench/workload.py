"""Prompts to measure with."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.errors import ConfigError

BUNDLED = Path(__file__).with_name("prompts.jsonl")
"""Sixteen prompts of our own, four of each kind: math, code, chat and rewriting."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The first turn of a conversation."""

    id: str
    category: str
    text: str


def read_workload(path: Path, limit: int | None = None) -> list[BenchPrompt]:
    """Read (gzipped) JSONL; a row holds `turns`, of which the first is used, or `prompt`.

    `category` (else the file's name) groups the figures, `id` (else the line) names the prompt.

    Raises:
        ConfigError: the file cannot be read, a row holds neither, or there is no row at all.
    """
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            rows = [
                _read_row(line, name, number)
                for number, line in enumerate(lines, 1)
                if line.strip() and (limit is None or number <= limit)
            ]
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"cannot read prompts from {path}: {reason}; give JSONL rows with turns or prompt"
        ) from error
    if not rows:
        raise ConfigError(f"{path} holds no prompts; give JSONL rows with turns or prompt")
    return rows


def _read_row(line: str, name: str, number: int) -> BenchPrompt:
    row: Mapping[str, Any] = json.loads(line)
    text = row["turns"][0] if "turns" in row else row["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"line {number} holds no text")
    return BenchPrompt(str(row.get("id", f"{name}-{number}")), str(row.get("category", name)), text)


def first_of_each_category(prompts: Iterable[BenchPrompt], count: int) -> list[BenchPrompt]:
    """At most `count` prompts of each category, in order."""
    taken: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        group = taken.setdefault(prompt.category, [])
        if len(group) < count:
            group.append(prompt)
    return [prompt for group in taken.values() for prompt in group]
