"""What an answer must look like: `response_format` and `tools` become a grammar. No torch."""

import json
import re
from dataclasses import dataclass

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.server.errors import blaming
from blockdraft.server.protocol import ResponseFormat, ToolFields
from blockdraft.server.reasoning import END, START
from blockdraft.text.grammar import JSON_WHITESPACE
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_prompt import native_syntax
from blockdraft.text.tools import (
    TAGGED,
    CallSyntax,
    Tool,
    ToolChoice,
    calls_grammar,
    parse_tool_choice,
    parse_tools,
)

_FORMAT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools that may be called in an answer, and how the model writes a call."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    syntax: CallSyntax
    parallel: bool = True

    def grammar(self) -> Grammar | None:
        """See calls_grammar."""
        return calls_grammar(self.tools, self.choice, self.syntax, parallel=self.parallel)


@dataclass(frozen=True, slots=True)
class Shape:
    """A grammar, and the parameter that asked for it."""

    grammar: Grammar
    param: str


def read_toolbox(request: ToolFields, tokenizer: Tokenizer) -> Toolbox | None:
    """The tools of a request; None if it has none, or forbids to call them.

    Raises:
        RequestError: a tool or the choice is malformed.
    """
    if request.tools is None:
        if request.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice asks for a tool and no tools are given", param="tool_choice"
            )
        return None
    with blaming("tools"):
        tools = parse_tools([tool.model_dump(exclude_unset=True) for tool in request.tools])
    choice = request.tool_choice
    with blaming("tool_choice"):
        wanted = parse_tool_choice(
            choice if choice is None or isinstance(choice, str) else choice.model_dump(), tools
        )
    if wanted.mode == "none":
        return None
    syntax = native_syntax(tokenizer) or TAGGED
    return Toolbox(tools, wanted, syntax, parallel=request.parallel_tool_calls is not False)


def read_shape(
    response_format: ResponseFormat | None, toolbox: Toolbox | None, *, thinks: bool | None = None
) -> Shape | None:
    """What the answer must look like; None if it is free. For `thinks` see Answer.

    Raises:
        RequestError: the format is malformed, or there are two formats at once.
    """
    wanted = _read_format(response_format)
    if toolbox is None:
        shape = None if wanted is None else Shape(wanted, "response_format")
    elif wanted is not None:
        raise RequestError(
            "response_format and tools each say what the answer looks like; leave out one of them, "
            'or set tool_choice to "none"',
            param="response_format",
        )
    else:
        with blaming("tools"):
            calls = toolbox.grammar()
        shape = None if calls is None else Shape(calls, "tools")
    if shape is None or thinks is None:
        return shape
    return Shape(_behind_thinking(shape.grammar, begun=thinks), shape.param)


def _read_format(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None:
        return None
    given = wanted.json_schema
    if wanted.type != "json_schema":
        if given is not None:
            raise RequestError(
                f"response_format {wanted.type} takes no json_schema; leave it out",
                param="response_format",
            )
        return Grammar.json_object() if wanted.type == "json_object" else None
    if given is None:
        raise RequestError("response_format lacks json_schema; give it", param="response_format")
    if not _FORMAT_NAME.fullmatch(given.name):
        raise RequestError(
            f"the name of the format is {given.name!r:.80}; give up to 64 letters, digits, _ and -",
            param="response_format",
        )
    with blaming("response_format"):
        return Grammar.json_schema(given.schema_)


def _behind_thinking(grammar: Grammar, *, begun: bool) -> Grammar:
    """Let a section of thinking stand before the answer; it ends at its first end mark.

    Where the prompt has not begun it, the model may leave it out.
    """
    if grammar.kind == "json_schema":
        guided = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
        schema = {**guided, **json.loads(grammar.source)}
        answer = f" %json {json.dumps(schema, ensure_ascii=False)}"
    else:
        answer = grammar.source.removeprefix("start:")
    mark = "" if begun else re.escape(START)
    rules = [
        "start: thinking GAP? answer" if begun else "start: (thinking GAP?)? answer",
        rf'thinking[lazy]: THOUGHTS "{END}"',
        rf"THOUGHTS: /{mark}(.|\n)*/",
        r"GAP: /\n{1,2}/",
        f"answer:{answer}",
    ]
    return Grammar.lark("\n".join(rules))
