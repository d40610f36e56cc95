"""How models write calls of tools, as data, and the grammar that makes calls parse.

A call has a begin, the function's name, its arguments and an end; some models write a section
around all calls:

    section begin before name behind arguments close end between begin ... end section_end
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.text.grammar import JSON_WHITESPACE
from blockdraft.text.tools import Tool, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax(ABC):
    """What stands around each call (`begin`, `end`), and around and between all calls.

    `marks` are those that may be special tokens. `before` is what stands between the begin and the
    name, for a subclass to write. `call_id` is what the template wants as the id of a call; empty
    if it takes any.
    """

    marks: tuple[str, ...] = ()
    begin: str = ""
    before: str = ""
    end: str = ""
    section: str = ""
    between: str = "\n"
    section_end: str = ""
    call_id: str = ""

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks with which a call, or a section of calls, begins in the text."""
        found = (mark for text in (self.section, self.begin) for mark in self.marks if mark in text)
        return tuple(dict.fromkeys(found))

    @property
    def opening(self) -> str:
        """All that stands before the first call's name, as the model was told to write it."""
        return self.section + self.begin

    @property
    def watched(self) -> tuple[str, ...]:
        """The marks at which a grammar takes over where a model begins a call on its own."""
        return self.openers

    @abstractmethod
    def function_rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """Rules of a Lark grammar: `rule` is what stands between begin and end of a call.

        `special`: see calls_grammar.

        Raises:
            RequestError: the schema of the arguments cannot be kept in this syntax.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSyntax(CallSyntax):
    """The arguments are an object of JSON. So may be all of the call, with a member for its name.

    behind: what stands between the name and the arguments. aside: a mark and the pattern of what
    follows it; they may stand behind the name too. close: what stands behind the arguments.
    """

    behind: str
    aside: tuple[str, str] | None = None
    close: str = ""

    @property
    def is_object(self) -> bool:
        """Name and arguments are members of an object."""
        return self.close == "}"

    @property
    def arguments_key(self) -> str:
        """The member of the object that has the arguments."""
        return self.behind.split('"')[-2]

    def function_rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """See CallSyntax."""
        name, behind = marked(self.before + tool.name, special), marked(self.behind, special)
        aside = ""
        if self.aside is not None:
            aside = f"({marked(self.aside[0], special)} /{self.aside[1]}/)?"
        close = marked(self.close, special)
        return [f"{rule}: {name} {aside} {behind} {json_rule(tool.parameters)} {close}"]

    def write(self, name: str, arguments: str) -> str:
        """A single call; `arguments` is the text of a JSON object."""
        call = f"{self.before}{name}{self.behind}{arguments}{self.close}"
        return f"{self.opening}{call}{self.end}{self.section_end}"


_OBJECT = JsonSyntax(before='{"name": "', behind='", "arguments": ', close="}")
TAGGED = replace(
    _OBJECT,
    marks=("<tool_call>", "</tool_call>"),
    begin="<tool_call>\n",
    end="\n</tool_call>",
)
"""Of the Hermes models, Qwen, SmolLM3 and others."""
BARE = JsonSyntax(before='{"name": "', behind='", "parameters": ', close="}")
"""Of Llama 3: one call is the whole answer."""
MISTRAL_LIST = replace(
    _OBJECT,
    marks=("[TOOL_CALLS]",),
    section="[TOOL_CALLS][",
    between=", ",
    section_end="]",
    call_id="{index:09}",
)
"""Of Mistral's models up to Small 3.1."""
MISTRAL = JsonSyntax(
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    begin="[TOOL_CALLS]",
    aside=("[CALL_ID]", "[A-Za-z0-9]{9}"),
    behind="[ARGS]",
    between="",
    call_id="{index:09}",
)
"""Of Mistral's later models; some of them name each call."""
_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END = _DEEPSEEK_MARKS = tuple(
    f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
DEEPSEEK_V31 = JsonSyntax(
    marks=_DEEPSEEK_MARKS,
    section=_CALLS,
    begin=_CALL,
    behind=_SEP,
    end=_CALL_END,
    section_end=_CALLS_END,
    between="",
)
DEEPSEEK = replace(
    DEEPSEEK_V31,
    before=f"function{_SEP}",
    behind="\n```json\n",
    close="\n```",
    between="\n",
)
"""Of DeepSeek V3 and R1."""
_KIMI_MARKS = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
KIMI = JsonSyntax(
    marks=_KIMI_MARKS,
    section=_KIMI_MARKS[0],
    begin=_KIMI_MARKS[1],
    before="functions.",
    aside=(":", "[0-9]+"),
    behind=_KIMI_MARKS[2],
    end=_KIMI_MARKS[3],
    section_end=_KIMI_MARKS[4],
    between="",
    call_id="functions.{name}:{index}",
)
"""Of Kimi K2."""


def calls_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    syntax: CallSyntax,
    *,
    parallel: bool = True,
    special: Mapping[str, int] | None = None,
) -> Grammar | None:
    """What makes calls parse, with arguments that their function's schema accepts.

    A named function is called once; otherwise there may be several calls if `parallel` and the
    syntax allow it. Without an obligation the answer is free, and what it holds is looked at
    afterwards (None), unless a function is `strict` or not allowed, or `parallel` is off: then the
    grammar takes over where a call begins. `special` are those of the syntax's marks that
    are tokens for a grammar (Tokenizer.mark_ids).

    Raises:
        RequestError: a call that has no begin cannot be watched for.
    """
    special = special or {}
    # A call without a begin is the whole answer, so there is never a second one.
    is_single = not (syntax.openers or syntax.section)
    several = parallel and choice.name is None and not is_single
    callable_tools = choice.among(tools)

    def lark(*rules: str) -> Grammar:
        return Grammar.lark("\n".join([*rules, *_function_rules(callable_tools, syntax, special)]))

    begin, end, between, section, section_end = (
        marked(text, special)
        for text in (
            *(syntax.begin, syntax.end, syntax.between),
            *(syntax.section, syntax.section_end),
        )
    )
    call = f"call: {begin} function {end}"
    more = f"({between} call)*" if several else ""
    if choice.mode == "required":
        return lark(f"start: {section} call {more} {section_end}", call)
    if choice.mode == "none" or ((parallel or is_single) and not is_watched(tools, choice)):
        return None
    watched = syntax.watched
    if not watched:
        raise RequestError(
            "this model's calls have no start mark: leave out strict and allowed_tools, or require "
            "a call"
        )
    openings = [
        f"spelled_{index} {marked(syntax.opening.partition(mark)[2], special)}"
        for index, mark in enumerate(watched)
    ]
    # Free text has no special tokens: a mark that is one has its place, if it is not spelled.
    if any(mark in syntax.opening for mark in special):
        openings.append(f"TEXT {marked(syntax.opening, special)}")
    more = more if syntax.section else ""
    return lark(
        f"start: {'watched* TEXT' if several else 'watched | TEXT'}",
        f"watched: opening function {end} {more} {section_end}",
        f"opening: {' | '.join(openings)}",
        *(f"spelled_{i}[lazy]: TEXT {quoted(mark)}" for i, mark in enumerate(watched)),
        *(r"TEXT: /(.|\n)*/", *([call] if more else [])),
    )


def is_watched(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """True if a grammar must take over where the model begins a call that it need not make."""
    allowed = choice.among(tools)
    return len(allowed) < len(tools) or any(tool.strict for tool in allowed)


def _function_rules(
    tools: Sequence[Tool], syntax: CallSyntax, special: Mapping[str, int]
) -> list[str]:
    """Rules for a call: its name, and the arguments of that function."""
    rules = ["function: " + " | ".join(f"function_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        rules += syntax.function_rules(f"function_{index}", tool, special)
    return rules


def json_rule(schema: Mapping[str, Any]) -> str:
    """What a schema accepts, as a part of a Lark rule."""
    guided = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}
    return f"%json {json.dumps(guided, ensure_ascii=False)}"


def marked(text: str, special: Mapping[str, int]) -> str:
    """A text, as a part of a Lark rule, in which some marks are special tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    found = (f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part)
    return " ".join(found)


def quoted(text: str) -> str:
    """A text as JSON, and so as a part of a Lark rule."""
    return json.dumps(text, ensure_ascii=False)
