"""Tools that a model may call, in OpenAI's form: how they are checked, and how calls look."""

import json
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar, check_numbers
from blockdraft.core.request import MAX_TOOLS
from blockdraft.text.grammar import JSON_WHITESPACE

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function by its name; `parameters` is the JSON schema of its arguments, an object.

    `strict` calls match it even where none is required. `declaration` is what the user gave, as
    chat templates take it.
    """

    name: str
    strict: bool
    parameters: Mapping[str, Any]
    declaration: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """auto: text or calls, as the model likes. none: text. required: calls.

    `name` is the one function that must be called, once. `allowed` are those that may be called;
    None allows all.
    """

    mode: Mode
    name: str | None = None
    allowed: frozenset[str] | None = None

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Those of the tools that may be called."""
        names = self.allowed if self.name is None else {self.name}
        return tuple(tool for tool in tools if names is None or tool.name in names)


class CallSyntax(Protocol):
    """How a model writes a call: begin, the name and the arguments, end.

    `mark` is the end of `begin` that is always there where a model writes a call on its own.
    """

    @property
    def begin(self) -> str:
        """See above."""
        ...

    @property
    def mark(self) -> str:
        """See above."""
        ...

    @property
    def end(self) -> str:
        """See above."""
        ...

    def function_rules(self, rule: str, tool: Tool) -> list[str]:
        """Rules of a Lark grammar: `rule` is what stands between begin and end of a call.

        Raises:
            RequestError: the schema of the arguments cannot be kept in this syntax.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """A CallSyntax: an object with the name and the arguments."""

    begin: str
    end: str
    arguments_key: str

    @property
    def mark(self) -> str:
        """See CallSyntax."""
        return self.begin

    def function_rules(self, rule: str, tool: Tool) -> list[str]:
        """See CallSyntax."""
        return [f'{rule}: {quoted(self.head(tool.name))} {json_rule(tool.parameters)} "}}"']

    def write(self, name: str, arguments: str) -> str:
        """A call; `arguments` is the text of a JSON object."""
        return f"{self.begin}{self.head(name)}{arguments}}}{self.end}"

    def head(self, name: str) -> str:
        """The start of the object, up to its arguments."""
        return f'{{"name": "{name}", "{self.arguments_key}": '


TAGGED = JsonSyntax("<tool_call>\n", "\n</tool_call>", "arguments")
"""Of the Hermes models, Qwen, SmolLM3 and others."""
CALL_MARKS = (TAGGED.begin.strip(), TAGGED.end.strip())
"""Around a call, as a model may have them in its vocabulary; of XmlSyntax too."""
BARE = JsonSyntax("", "", "parameters")
"""Of Llama 3: one call is the whole answer."""


def parse_tools(tools: object) -> tuple[Tool, ...]:
    """Check a request's tools.

    Raises:
        RequestError: one is malformed, or two have the same name. Whether a schema can be followed
            shows when the grammar is compiled.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise RequestError(f"tools is {tools!r:.60}; give a list of functions, or leave it out")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} functions; give at most {MAX_TOOLS}")
    parsed = tuple(_parse_tool(tool) for tool in tools)
    names = [tool.name for tool in parsed]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"tools holds the function {name!r} twice; rename one")
    return parsed


def _parse_tool(tool: object) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"tool {tool!r:.60} is no function; its type must be 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"tool {tool!r:.60} lacks the object 'function'")
    # Clients send null for what they have no value for.
    function = {key: value for key, value in function.items() if value is not None}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"the name of a function is {name!r:.80}; give up to 64 letters, digits, _ and -"
        )
    if not isinstance(function.get("description", ""), str):
        raise RequestError(f"the description of function {name!r} is no text")
    strict = function.get("strict", False)
    if not isinstance(strict, bool):
        raise RequestError(f"strict of function {name!r} is {strict!r:.60}; give true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"the parameters of function {name!r} are no JSON schema of an object")
    return Tool(name, strict, {"type": "object", **parameters}, {**tool, "function": function})


def parse_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """Check a request's tool choice: a mode, a function by name, or allowed tools; None is auto.

    Raises:
        RequestError: it is none of these, or names a function that is not there.
    """
    if choice is None:
        return ToolChoice("auto")
    if choice in get_args(Mode):
        return ToolChoice(choice)  # type: ignore[arg-type]
    names = {tool.name for tool in tools}
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return ToolChoice("required", _chosen_name(choice, names))
    given = choice.get("allowed_tools")
    given = given if isinstance(given, Mapping) else {}
    mode, chosen = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(chosen, list) or not chosen:
        raise RequestError(
            f"tool_choice is {choice!r:.80}; give allowed_tools the mode auto or required, and at "
            "least one of the tools"
        )
    return ToolChoice(mode, allowed=frozenset(_chosen_name(one, names) for one in chosen))


def _chosen_name(choice: object, names: Set[str]) -> str:
    """The name of a function that is chosen, which must be one of `names`."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if (
        not isinstance(choice, Mapping)
        or choice.get("type") != "function"
        or not isinstance(name, str)
    ):
        modes = ", ".join(get_args(Mode))
        raise RequestError(
            f"tool_choice is {choice!r:.60}; give {modes}, a function by its name, or allowed_tools"
        )
    if name not in names:
        raise RequestError(
            f"tool_choice names {name!r:.60}, which is not among the tools; name one that is"
        )
    return name


def calls_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    syntax: CallSyntax,
    *,
    parallel: bool = True,
    special: Collection[str] = (),
) -> Grammar | None:
    """What makes calls parse, with arguments that their function's schema accepts.

    A named function is called once; otherwise there may be several calls if `parallel` and the
    syntax allow it. Without an obligation the answer is free, and what it holds is looked at
    afterwards (None), unless a function is `strict` or not allowed, or `parallel` is off: then the
    grammar takes over where a call begins. `special` are those of CALL_MARKS that are special
    tokens.

    Raises:
        RequestError: a call that has no begin cannot be watched for.
    """
    several = parallel and choice.name is None and bool(syntax.end)
    callable_tools = choice.among(tools)
    if choice.mode == "required":
        start = 'call ("\\n" call)*' if several else "call"
        return _lark([f"start: {start}", *_call_rules(callable_tools, syntax, special)])
    if choice.mode == "none" or (parallel and not is_watched(tools, choice)):
        return None
    if not syntax.mark:
        raise RequestError(
            "this model's calls have no mark at their begin: where it need not call a tool, leave "
            "out strict, parallel_tool_calls and allowed_tools, or require a call"
        )
    start = "watched* TEXT" if several else "watched | TEXT"
    # Free text has no special tokens: the mark that is one must have its place.
    is_special = any(mark in syntax.begin for mark in special)
    begin = f"begin: TEXT {marked(syntax.begin, special)}"
    if not is_special:
        begin = f"begin[lazy]: TEXT {quoted(syntax.mark)}"
    watched = f"watched: begin function {marked(syntax.end, special)}"
    rules = [watched, begin, r"TEXT: /(.|\n)*/"]
    return _lark([f"start: {start}", *rules, *_function_rules(callable_tools, syntax)])


def is_watched(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """True if a grammar must take over where the model begins a call that it need not make."""
    allowed = choice.among(tools)
    return len(allowed) < len(tools) or any(tool.strict for tool in allowed)


def _lark(rules: Sequence[str]) -> Grammar:
    return Grammar.lark("\n".join(rules))


def _call_rules(tools: Sequence[Tool], syntax: CallSyntax, special: Collection[str]) -> list[str]:
    marks = [marked(mark, special) for mark in (syntax.begin, syntax.end)]
    return [f"call: {marks[0]} function {marks[1]}", *_function_rules(tools, syntax)]


def _function_rules(tools: Sequence[Tool], syntax: CallSyntax) -> list[str]:
    """Rules for a call: its name, and the arguments of that function."""
    rules = ["function: " + " | ".join(f"function_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        rules += syntax.function_rules(f"function_{index}", tool)
    return rules


def json_rule(schema: Mapping[str, Any]) -> str:
    """What a schema accepts, as a part of a Lark rule."""
    check_numbers(schema)
    guided = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}
    return f"%json {json.dumps(guided, ensure_ascii=False)}"


def marked(text: str, special: Collection[str]) -> str:
    """A text, as a part of a Lark rule, in which some marks are special tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(part if part in special else quoted(part) for part in parts if part)


def quoted(text: str) -> str:
    """A text, as a part of a Lark rule."""
    return json.dumps(text, ensure_ascii=False)
