"""The prompts of a proof: a bundled corpus of odd texts, and the user's own.

Loads no model library.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.conversations import Conversation, read_conversation, without_nulls
from blockdraft.core.jsonl import bad_row, read_all, set_name

BUNDLED = Path(__file__).with_name("corpus.jsonl")


@dataclass(frozen=True, slots=True)
class ProofPrompt:
    """The first turn of a conversation, and how it becomes token ids.

    raw: no chat template. take: keep `ids[:take]`, so 1 is the first token alone and -1 cuts the
    last one off, in the middle of a character perhaps. thinking: on or off, where the chat template
    has such a switch; None leaves it alone.
    """

    id: str
    kind: str
    text: str
    raw: bool = False
    take: int | None = None
    thinking: bool | None = None
    system: str | None = None


def read_prompts(path: Path) -> list[ProofPrompt]:
    """Read (gzipped) JSONL with conversations, and optionally the fields of ProofPrompt.

    See core/conversations.py.

    Raises:
        ConfigError: the file cannot be read or holds no prompt, or lines of it are bad; names all.
    """
    name = set_name(path)
    return read_all(path, lambda row, number: _prompt(row, path, number, name))


def _prompt(row: dict[str, Any], path: Path, number: int, name: str) -> ProofPrompt:
    def taken(field: str, kind: type, default: Any) -> Any:
        value = row.get(field, default)
        if value is not default and type(value) is not kind:
            remedy = f"give {'true or false' if kind is bool else 'a whole number'}"
            raise bad_row(path, number, f"its {field} is {value!r}", remedy)
        return value

    row = without_nulls(row)
    raw = taken("raw", bool, False)
    if raw and isinstance(row.get("prompt"), str) and row["prompt"]:
        conversation = Conversation((row["prompt"],))  # blanks alone will do where no template is
    else:
        conversation = read_conversation(row, path, number)
    return ProofPrompt(
        id=str(row.get("id", f"{name}-{number}")),
        kind=str(row.get("kind", row.get("category", name))),
        text=conversation.turns[0],
        raw=raw,
        take=taken("take", int, None),
        thinking=taken("thinking", bool, None),
        system=conversation.system,
    )


def first_of_each_kind(prompts: Iterable[ProofPrompt]) -> list[ProofPrompt]:
    """One prompt a kind, and both where the kind is about thinking on and off."""
    kept: dict[tuple[str, bool | None], ProofPrompt] = {}
    for prompt in prompts:
        kept.setdefault((prompt.kind, prompt.thinking), prompt)
    return list(kept.values())
