"""Tools that a model may call, in OpenAI's form: how they are checked."""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

from blockdraft.core.errors import RequestError
from blockdraft.core.request import MAX_TOOLS

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
        raise RequestError(f"tool {tool!r:.60} is not a function; its type must be 'function'")
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
        raise RequestError(f"the description of function {name!r} is not text")
    strict = function.get("strict", False)
    if not isinstance(strict, bool):
        raise RequestError(f"strict of function {name!r} is {strict!r:.60}; give true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"the parameters of function {name!r} are not a JSON schema of an object"
        )
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
