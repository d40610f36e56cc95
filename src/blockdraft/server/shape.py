"""What an answer must look like: formats and tools become a grammar. No torch."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.core.thinking import THINK, Tags
from blockdraft.server.errors import blaming
from blockdraft.server.protocol import (
    ResponseFormat,
    ShapeFields,
    StructuredOutputs,
    ToolFields,
)
from blockdraft.text.call_syntax import TAGGED, calls_grammar, is_watched, marked, quoted
from blockdraft.text.harmony_grammar import FREE_TEXT, harmony_grammar
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_prompt import AnySyntax, native_syntax
from blockdraft.text.tools import Tool, ToolChoice, parse_tool_choice, parse_tools

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda _: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
"""By the names that vLLM has for them."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools that the model is told of, which it may call, and how it writes a call.

    `mark_ids`: see Tokenizer.mark_ids.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    syntax: AnySyntax
    parallel: bool = True
    mark_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """See ToolChoice.among."""
        return self.choice.among(self.tools)

    @property
    def begins(self) -> tuple[tuple[str, str], ...]:
        """The marks with which a call may begin, each with what follows it."""
        syntax = self.syntax
        return tuple(
            (mark, (syntax.opening.partition(mark)[2] + syntax.before[:1]).strip())
            for mark in dict.fromkeys((*syntax.openers, *syntax.watched))
        )

    def grammar(self) -> Grammar | None:
        """See calls_grammar."""
        return calls_grammar(
            *(self.tools, self.choice, self.syntax),
            parallel=self.parallel,
            special=self.mark_ids,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """A grammar, and the parameter that asked for it.

    `parts` are the shapes that it consists of: what is wrong with one of them is its own fault.
    """

    grammar: Grammar
    param: str
    parts: tuple["Shape", ...] = ()


def read_toolbox(request: ToolFields, tokenizer: Tokenizer) -> Toolbox | None:
    """The tools of a request; None if it has none, or forbids to call them.

    Raises:
        RequestError: a tool or the choice is malformed.
    """
    if not request.tools:
        if request.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice asks for a tool, but no tools are given; give some, or leave it out",
                param="tool_choice",
            )
        return None
    with blaming("tools"):
        tools = parse_tools([tool.model_dump(exclude_unset=True) for tool in request.tools])
    with blaming("tool_choice"):
        choice = parse_tool_choice(request.tool_choice, tools)
    if choice.mode == "none":
        return None
    syntax = native_syntax(tokenizer) or TAGGED
    parallel = request.parallel_tool_calls is not False
    return Toolbox(tools, choice, syntax, parallel, tokenizer.mark_ids(syntax.marks))


def read_shape(
    request: ShapeFields,
    toolbox: Toolbox | None,
    *,
    thinks: bool | None = None,
    tags: Tags = THINK,
    is_harmony: bool = False,
    special: Mapping[str, int] = MappingProxyType({}),
) -> Shape | None:
    """What the answer must look like; None if it is free.

    With tools that may be called, the model calls one or answers in the shape, as it likes.

    Args:
        thinks: a section of thinking has begun in the prompt; None if the model knows none.
        tags: the marks around thinking.
        is_harmony: the model answers in the format of text/harmony.py.
        special: those of them that a grammar must name as tokens, see Tokenizer.mark_ids.

    Raises:
        RequestError: a shape is malformed, or there are several.
    """
    shape = _wanted_shape(request)
    if is_harmony:
        return _harmony_shape(shape, toolbox)
    if toolbox is not None:
        shape = _with_calls(shape, toolbox)
    if shape is None or thinks is None:
        return shape
    return replace(shape, grammar=_behind_thinking(shape.grammar, tags, special, begun=thinks))


def _with_calls(shape: Shape | None, toolbox: Toolbox) -> Shape | None:
    if shape is not None and toolbox.choice.mode == "auto":
        required = replace(toolbox.choice, mode="required")
        calls = _with_calls(None, replace(toolbox, choice=required))
        assert calls is not None, "what is required has a grammar"
        either = Grammar.lark("start: @calls | @shaped", calls=calls.grammar, shaped=shape.grammar)
        return Shape(either, shape.param, (calls, shape))
    with blaming("tools"):
        grammar = toolbox.grammar()
    return None if grammar is None else Shape(grammar, "tools")


def _harmony_shape(shape: Shape | None, toolbox: Toolbox | None) -> Shape | None:
    """The shape in the channel of answers, or calls in theirs; an answer ends with its call."""
    if toolbox is None:
        if shape is None:
            return None
        return replace(shape, grammar=harmony_grammar(shape.grammar, ()), parts=(shape,))
    if toolbox.choice.mode == "auto":
        if shape is None and not is_watched(toolbox.tools, toolbox.choice):
            return None
        final = FREE_TEXT if shape is None else shape.grammar
        grammar = harmony_grammar(final, toolbox.callable_tools)
        return Shape(grammar, "tools", () if shape is None else (shape,))
    return Shape(harmony_grammar(None, toolbox.callable_tools), "tools")


def _wanted_shape(request: ShapeFields) -> Shape | None:
    shapes = [
        *_format_shapes(request.response_format),
        *_structured_shapes(request.structured_outputs),
        *_guided_shapes(request),
    ]
    if len(shapes) > 1:
        first, second = shapes[0].param, shapes[1].param
        raise RequestError(
            f"{first} and {second} each define the answer's format; leave one of them out",
            param=second,
        )
    return shapes[0] if shapes else None


def _format_shapes(wanted: ResponseFormat | None) -> Iterator[Shape]:
    if wanted is None:
        return
    kind, named, schema = wanted.type, wanted.json_schema, wanted.schema_
    unfit = None
    if named is not None and kind != "json_schema":
        unfit = "json_schema"
    # llama.cpp's clients put a schema beside either type of JSON.
    elif schema is not None and (kind == "text" or named is not None):
        unfit = "schema"
    with blaming("response_format"):
        if unfit is not None:
            raise RequestError(f"response_format {kind} takes no {unfit} here; leave it out")
        if kind == "json_object":
            yield Shape(Grammar.json_schema(schema or _ANY_OBJECT), "response_format")
        elif kind == "json_schema":
            schema = schema if named is None else named.schema_
            if schema is None:
                raise RequestError("response_format lacks json_schema; give it")
            yield Shape(Grammar.json_schema(schema), "response_format")


def _structured_shapes(wanted: StructuredOutputs | None) -> Iterator[Shape]:
    if wanted is None:
        return
    values = {
        "json": wanted.json_,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "json_object": wanted.json_object or None,
    }
    for kind, value in values.items():
        yield from _shape_of(kind, value, f"structured_outputs.{kind}")


def _guided_shapes(request: ShapeFields) -> Iterator[Shape]:
    for kind in ("json", "regex", "choice", "grammar"):
        name = f"guided_{kind}"
        yield from _shape_of(kind, getattr(request, name), name)


def _shape_of(kind: str, value: Any, param: str) -> Iterator[Shape]:
    if value is None:
        return
    with blaming(param):
        yield Shape(_MAKERS[kind](value), param)


def _behind_thinking(
    grammar: Grammar, tags: Tags, special: Mapping[str, int], *, begun: bool
) -> Grammar:
    """Let a section of thinking stand before the answer; it ends at its first end mark.

    Where the prompt has not begun it, the model may leave it out.
    """
    start, end = tags
    begin = marked(start, special) if start in special and not begun else ""
    spelled = "" if start in special or begun else re.escape(start)
    # An end that is a token may be written letter by letter too, and is one all the same.
    as_token = f"| THOUGHTS {marked(end, special)}" if end in special else ""
    rules = [
        "start: thinking GAP? @answer" if begun else "start: (thinking GAP?)? @answer",
        f"thinking: {begin} (spelled {as_token})",
        f"spelled[lazy]: THOUGHTS {quoted(end)}",
        rf"THOUGHTS: /{spelled}(.|\n)*/",
        r"GAP: /\n{1,2}/",
    ]
    return Grammar.lark("\n".join(rules), answer=grammar)
