"""Prompts to explain, out of a JSONL file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.conversations import read_conversation, without_nulls
from blockdraft.core.jsonl import read_all


@dataclass(frozen=True, slots=True)
class Question:
    """The first turn of a conversation; `category` is None where its row names none."""

    id: str
    category: str | None
    text: str
    system: str | None = None


def read_questions(path: Path) -> list[Question]:
    """Read (gzipped) JSONL rows with conversations, and optionally `id` and `category`.

    See core/conversations.py.

    Raises:
        ConfigError: the file cannot be read or holds no prompt, or lines are bad; each is named.
    """

    def question(row: dict[str, Any], number: int) -> Question:
        row = without_nulls(row)
        category, conversation = row.get("category"), read_conversation(row, path, number)
        return Question(
            id=str(row.get("id", number)),
            category=None if category is None else str(category),
            text=conversation.turns[0],
            system=conversation.system,
        )

    return read_all(path, question)
