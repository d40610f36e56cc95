"""Prompts to explain, out of a JSONL file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.jsonl import prompt_text, read_all


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt; `category` is None where its row names none."""

    id: str
    category: str | None
    text: str


def read_questions(path: Path) -> list[Question]:
    """Read (gzipped) JSONL rows with `prompt` or `turns`, and optionally `id` and `category`.

    Raises:
        ConfigError: the file cannot be read or holds no prompt, or lines are bad; each is named.
    """

    def question(row: dict[str, Any], number: int) -> Question:
        category = row.get("category")
        return Question(
            id=str(row.get("id", number)),
            category=None if category is None else str(category),
            text=prompt_text(row, path, number),
        )

    return read_all(path, question)
