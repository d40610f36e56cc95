"""Prompts to measure with."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from blockdraft.core.config import Thinking
from blockdraft.core.conversations import read_conversation, without_nulls
from blockdraft.core.grouping import grouped
from blockdraft.core.jsonl import read_all, set_name

BUNDLED = Path(__file__).with_name("prompts.jsonl")
"""Sixteen prompts of our own, four of each kind: math, code, chat and rewriting."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The user's turns of a conversation: the first, and those behind it, asked in its course.

    reference: the right answer, where the set has one. test: a program that only a right answer's
    program lets come to its end; entry_point: the function that its `check` takes, see
    `scores/programs.py`. system: instructions before the first turn. tools: functions that the
    model may call, in OpenAI's form, not checked yet. thinking: what the chat template is told.
    """

    id: str
    category: str
    text: str
    later: tuple[str, ...] = ()
    reference: str | None = None
    test: str | None = None
    entry_point: str | None = None
    system: str | None = None
    tools: tuple[Any, ...] = ()
    thinking: Thinking = "template"

    @property
    def name(self) -> str:
        """Tells it from the others of a workload."""
        return f"{self.category}/{self.id}"


def read_workload(path: Path) -> list[BenchPrompt]:
    """Read (gzipped) JSONL whose rows hold conversations, see core/conversations.py.

    `category` (else the file's name) groups the figures, `id` (else the line) names the prompt.

    Raises:
        ConfigError: the file cannot be read or holds no row, or lines are bad; each is named.
    """
    name = set_name(path)
    return read_all(path, lambda row, number: _prompt(row, path, number, name))


def _prompt(row: Mapping[str, Any], path: Path, number: int, name: str) -> BenchPrompt:
    row = without_nulls(row)
    conversation = read_conversation(row, path, number)
    return BenchPrompt(
        id=str(row.get("id", f"{name}-{number}")),
        category=str(row.get("category", name)),
        text=conversation.turns[0],
        later=conversation.turns[1:],
        reference=_text(row, "reference"),
        test=_text(row, "test"),
        entry_point=_text(row, "entry_point"),
        system=conversation.system,
        tools=_tools(row),
    )


def _text(row: Mapping[str, Any], key: str) -> str | None:
    return value if isinstance(value := row.get(key), str) else None


def _tools(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """In OpenAI's form or bare, as BFCL has them; names of functions without a definition go."""
    tools = row.get("tools")
    if not isinstance(tools, list):
        return ()
    return tuple(_in_openai_form(tool) for tool in tools if not isinstance(tool, str))


def _in_openai_form(tool: object) -> object:
    """A tool; BFCL has no frame around it, dots in names and Python's names of types."""
    if not isinstance(tool, dict) or "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    function = {**tool, "name": re.sub(r"[^A-Za-z0-9_-]", "_", tool["name"])}
    return {"type": "function", "function": _with_json_types(function)}


_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def _with_json_types(value: object) -> Any:
    """A schema whose types are Python's, with those of JSON; `any` is none."""
    if isinstance(value, list):
        return [_with_json_types(one) for one in value]
    if not isinstance(value, dict):
        return value
    # A property may be called "type": then it is a schema, and no name of a type.
    kind = value.get("type")
    found = {key: _with_json_types(one) for key, one in value.items()}
    if kind == "any":
        del found["type"]
    elif isinstance(kind, str):
        found["type"] = _JSON_TYPES.get(kind, kind)
    return found


def chosen(prompts: Sequence[BenchPrompt], limit: int | None, seed: int) -> list[BenchPrompt]:
    """So many of the prompts of a file at most, drawn by the seed, in their order."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[place] for place in sorted(Random(seed).sample(range(len(prompts)), limit))]


def first_of_each_category(prompts: Iterable[BenchPrompt], count: int) -> list[BenchPrompt]:
    """At most `count` prompts of each category, in order."""
    groups = grouped(prompts, lambda prompt: prompt.category)
    return [prompt for group in groups.values() for prompt in group[:count]]


def mixed_prompts(prompts: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """As many prompts as asked for: the categories in turn, then from the start again."""
    groups = grouped(prompts, lambda prompt: prompt.category).values()
    mixed = [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]
    return list(islice(cycle(mixed), count))
