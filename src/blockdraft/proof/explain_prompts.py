"""Prompts to explain, out of a JSONL file."""

from dataclasses import dataclass
from pathlib import Path

from blockdraft.core.errors import ConfigError
from blockdraft.core.jsonl import prompt_text, read_jsonl

MAX_NAMED = 20
"""Bad lines that a refusal names; more are counted."""


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
    bad: list[ConfigError] = []
    questions = []
    for number, row in read_jsonl(path, on_bad_row=bad.append):
        try:
            text = prompt_text(row, path, number)
        except ConfigError as error:
            bad.append(error)
            continue
        category = row.get("category")
        questions.append(
            Question(
                id=str(row.get("id", number)),
                category=None if category is None else str(category),
                text=text,
            )
        )
    if bad:
        named = [str(error) for error in bad[:MAX_NAMED]]
        if len(bad) > MAX_NAMED:
            named.append(f"and {len(bad) - MAX_NAMED} more bad lines")
        raise ConfigError(" | ".join(named))
    if not questions:
        raise ConfigError(f"{path} holds no prompts; give JSONL rows with prompt or turns")
    return questions
