"""Prompts to train on, and their tokens.

A row of a file holds a conversation, see core/conversations.py, or `text` (plain text, whose
beginning is continued), beside an optional `id`.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from blockdraft.core.config import Thinking
from blockdraft.core.conversations import (
    as_messages,
    holds_conversation,
    read_conversation,
    without_nulls,
)
from blockdraft.core.errors import ConfigError, ModelError, reason_of
from blockdraft.core.jsonl import bad_row, read_each, set_name
from blockdraft.text.tokenizer import TEMPLATE_ERRORS, thinking_options

SELF_WRITTEN_TOKENS = 96
"""Most tokens that the target adds to the words of a self-written prompt."""


CONTINUED_TOKENS = 48
"""Tokens of a plain text that stand as its prompt; at most half of the text."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a user says; `set` names where it came from.

    text: the first turn, or with `is_plain` a text to continue without any template.
    later: the user's turns after that. system: the system message before all.
    """

    id: str
    set: str
    text: str
    later: tuple[str, ...] = ()
    system: str | None = None
    is_plain: bool = False

    @property
    def turns(self) -> tuple[str, ...]:
        """All turns of the user."""
        return (self.text, *self.later)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of one (gzipped) JSONL file.

    Raises:
        ConfigError: the file is missing, or rows hold none: all of them are named.
    """
    name = set_name(path)
    # Named by its place among the rows, which an answered prompt is known by.
    places = itertools.count()
    return read_each(path, lambda row, number: prompt_of_row(row, name, next(places), path, number))


def prompt_of_row(row: Mapping[str, Any], name: str, place: int, path: Path, number: int) -> Prompt:
    """The prompt of a row.

    Args:
        row: see this module; what is None counts as left out.
        name: of the set; with `place` it names a prompt without an id.
        place: of the row among the rows.
        path, number: where an error says that it was.
    """
    row = without_nulls(row)
    id_ = str(row.get("id", f"{name}-{place}"))
    if "text" in row and not holds_conversation(row):
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise bad_row(path, number, "its text is empty", "give some text, or delete that line")
        return Prompt(id=id_, set=name, text=row["text"], is_plain=True)
    conversation = read_conversation(row, path, number)
    return Prompt(
        id=id_,
        set=name,
        text=conversation.turns[0],
        later=conversation.turns[1:],
        system=conversation.system,
    )


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first of those that say the same but for case and white space."""
    kept: dict[object, Prompt] = {}
    for prompt in prompts:
        kept.setdefault(_content(prompt), prompt)
    return list(kept.values())


def with_own_ids(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts, of which no two that say something else have the same id in any turn.

    The first one keeps it; the others add a hash of what they say, the same in every run.
    """
    owners: dict[str, object] = {}
    named = []
    for prompt in prompts:
        content = _content(prompt)
        names = [turn_id(prompt, turn) for turn in range(len(prompt.turns))]
        if any(owners.setdefault(name, content) != content for name in names):
            digest = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
            prompt = replace(prompt, id=f"{prompt.id}-{digest}")
        named.append(prompt)
    return named


def turn_id(prompt: Prompt, turn: int) -> str:
    """What a turn, from 0, is called: a later one is a variant, held out with its prompt."""
    return prompt.id if turn == 0 else f"{prompt.id}+turn{turn + 1}"


def _content(prompt: Prompt) -> object:
    """What makes two prompts the same, but for case and white space."""
    texts = ("" if prompt.system is None else prompt.system, *prompt.turns)
    return prompt.is_plain, tuple(" ".join(text.casefold().split()) for text in texts)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    answers: Sequence[str] = (),
    thinking: Thinking = "template",
) -> tuple[int, ...]:
    """Token ids of a prompt, ready to be answered.

    Args:
        tokenizer: with its chat template, which plain text does without.
        prompt: a conversation, or a text to continue.
        answers: to the first turns of the conversation; the turn after them is asked.
        thinking: what the template is told.
    """
    if prompt.is_plain:
        ids = tokenizer(prompt.text)["input_ids"]
        return tuple(ids[: max(1, min(CONTINUED_TOKENS, len(ids) // 2))])
    encoded = _in_template(
        tokenizer,
        as_messages(prompt.turns, prompt.system, answers),
        f" of prompt {prompt.id!r} of {prompt.set}",
        add_generation_prompt=True,
        return_dict=True,
        **thinking_options(thinking),
    )
    return tuple(encoded["input_ids"])


def _in_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    whose: str = "",
    **options: bool,
) -> Any:
    """Messages as the chat template writes them; `whose` they are is for the error.

    Raises:
        ConfigError: the template is broken, or refuses them.
    """
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except TEMPLATE_ERRORS as error:
        reason = reason_of(error)
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"the target's chat template fails on messages of {roles}{whose}: {reason}; fix the "
            "template, or give prompts that it accepts"
        ) from error


def check_template(tokenizer: PreTrainedTokenizerBase, thinking: Thinking = "template") -> None:
    """Refuse a chat template in which nothing can be asked as it is told.

    Raises:
        ConfigError: it is broken, opens no answer, or does not know about thinking.
        ModelError: there is none.
    """
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{tokenizer.name_or_path} has no chat template; use a chat model, or give plain text"
        )
    turn = [{"role": "user", "content": "Hello"}]
    opened, bare = (
        _in_template(tokenizer, turn, tokenize=False, add_generation_prompt=opens)
        for opens in (True, False)
    )
    if opened == bare:
        raise ConfigError(
            "the chat template has no generation prompt, so the target would continue the "
            "question; fix the template, or give plain text as prompts"
        )
    if thinking != "template" and "enable_thinking" not in str(tokenizer.chat_template):
        raise ConfigError(
            f"thinking is {thinking}, but the chat template does not know enable_thinking; "
            "leave it out"
        )


def user_opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template's text up to where the user's words begin.

    Raises:
        ConfigError: the template changes the words it is given.
    """
    turn = "blockdraft-user-turn"
    text = _in_template(tokenizer, [{"role": "user", "content": turn}], tokenize=False)
    assert isinstance(text, str)
    head, found, _ = text.partition(turn)
    if not found:
        raise ConfigError("the chat template rewrites user turns; give prompts from files instead")
    return head
