"""Conversations in rows of files: what a user says, in one turn or in several.

A row holds one of: `messages` or `conversations` (a chat, whose answers are dropped because the
target gives its own), `turns`, `prompt` (text, or a chat as TRL has it), or a question as data sets
name it (`question`, `instruction` with its `input` if there is one, `problem`, `query`). The first
of these counts, and what is None counts as left out. A text in `system` is the system message of a
chat that has none, and of everything else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockdraft.core.jsonl import bad_row, later_turns, prompt_text

_QUESTIONS = ("question", "instruction", "problem", "query")

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "developer": "system"}
"""The other common names of who speaks."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, at least one turn, and the system message before all."""

    turns: tuple[str, ...]
    system: str | None = None


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row holds: tables that are written as JSONL have null where a row has nothing."""
    return {key: value for key, value in row.items() if value is not None}


def as_messages(
    turns: Sequence[str], system: str | None, answers: Sequence[str] = ()
) -> list[dict[str, str]]:
    """The system message and the user's turns, up to the one behind the last of the answers."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": turns[0]})
    for answer, turn in zip(answers, turns[1:], strict=False):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turn})
    return messages


def as_text(turns: Sequence[str], system: str | None, answers: Sequence[str] = ()) -> str:
    """The same for a model without a chat template: what is said, in paragraphs."""
    return "\n\n".join(m["content"] for m in as_messages(turns, system, answers) if m["content"])


def read_conversation(row: Mapping[str, Any], path: Path, number: int) -> Conversation:
    """The conversation of a row.

    Args:
        row: see this module.
        path, number: where an error says that it was.

    Raises:
        ConfigError: it holds none, or a turn is empty or no text.
    """
    row = without_nulls(row)
    conversation, system = _read_turns(row, path, number), row.get("system")
    if conversation.system is None and isinstance(system, str) and system.strip():
        return replace(conversation, system=system)
    return conversation


def _read_turns(row: Mapping[str, Any], path: Path, number: int) -> Conversation:
    if chat := _chat_of(row):
        return _read_chat(chat, path, number)
    asked = [key for key in _QUESTIONS if key in row]
    if asked and not {"turns", "prompt"} & row.keys():
        row = {"prompt": _question(row, asked[0])}
    return Conversation((prompt_text(row, path, number), *later_turns(row, path, number)))


def holds_conversation(row: Mapping[str, Any]) -> bool:
    """Whether a row has one of the keys that `read_conversation` looks for."""
    return bool(_chat_of(row)) or not row.keys().isdisjoint({"turns", "prompt", *_QUESTIONS})


def _chat_of(row: Mapping[str, Any]) -> Any:
    """The messages of a row, which TRL's conversations have in `prompt`; nothing if it has none."""
    prompt = None if "turns" in row else row.get("prompt")
    is_chat = isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt)
    return row.get("messages") or row.get("conversations") or (prompt if is_chat else None)


def _question(row: Mapping[str, Any], key: str) -> Any:
    """The column `key`, behind an instruction what it is about."""
    about = row.get("input") if key == "instruction" else None
    has_more = isinstance(row[key], str) and isinstance(about, str) and about.strip()
    return f"{row[key]}\n\n{about}" if has_more else row[key]


def _read_chat(chat: Any, path: Path, number: int) -> Conversation:
    remedy = 'give "messages": [{"role": "user", "content": "text"}, ...]'
    system, turns, roles = None, [], dict[str, None]()
    for message in chat if isinstance(chat, list) else [None]:
        if not isinstance(message, dict):
            raise bad_row(path, number, "its messages are not a list of objects", remedy)
        role, text = message.get("role", message.get("from")), message.get("content")
        text = _joined_parts(message.get("value") if text is None else text)
        role = _ROLES.get(str(role), str(role))
        roles[role] = None
        if role not in ("system", "user"):
            continue  # an answer, which may be calls of tools and no text
        if not isinstance(text, str):
            reason = "parts that are not text" if isinstance(text, list) else "no text"
            raise bad_row(path, number, f"a message has {reason}", remedy)
        if role == "system":
            system = text
        elif text.strip():
            turns.append(text)
    if not turns:
        reason = f"no message has the role user (roles: {', '.join(roles)})"
        if "user" in roles:
            reason = "every user message is empty"
        raise bad_row(path, number, reason, remedy)
    return Conversation(tuple(turns), system)


def _joined_parts(content: Any) -> Any:
    """The text of a message that OpenAI's format divides into parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content
