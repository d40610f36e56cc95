"""The schema of a function's arguments, where its calls do not have them as an object of JSON."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from blockdraft.core.errors import RequestError
from blockdraft.text.call_syntax import json_rule
from blockdraft.text.json_types import Schema
from blockdraft.text.tools import Tool

_MAX_NAME = 256
"""Letters of a parameter's name: what finds calls in an answer reads no longer ones."""
_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECTS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "title", "description"),
        *("$schema", "$id", "$comment", "default", "examples", "strict", *_DEFINITIONS),
    }
)
"""Keywords of the schema of arguments that are kept, or say nothing about which are accepted."""


class Parameter(NamedTuple):
    """A function's parameter, and the schema of its values."""

    name: str
    schema: Any
    is_required: bool


def parameters_of(tool: Tool) -> Iterator[Parameter]:
    """The parameters of a function, in the order of its schema.

    Raises:
        RequestError: the schema says more than which values each of them takes, or is malformed.
    """
    unknown = sorted(tool.parameters.keys() - _OF_OBJECTS)
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or []
    if unknown:
        raise not_kept(tool, f"its schema has {unknown[0]}")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise not_kept(tool, "its properties or required are malformed")
    if any(name not in properties for name in map(str, required)):
        raise not_kept(tool, "its required names are not among its properties")
    for name, schema in properties.items():
        if len(name) > _MAX_NAME:
            most = f"{len(name)} letters, and a parameter's name may have {_MAX_NAME}"
            raise not_kept(tool, f"{name!r:.60} has {most}")
        yield Parameter(name, schema, name in required)


def value_rule(schema: Any, root: Schema) -> str:
    """What a parameter's schema accepts as JSON, as a part of a Lark rule.

    root: the schema of all arguments, which has what it refers to.
    """
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    given = dict(schema) if isinstance(schema, Mapping) else {}
    return json_rule({**given, **definitions})


def not_kept(tool: Tool, reason: str) -> RequestError:
    """What to raise where calls of a function cannot be kept to its schema."""
    return RequestError(
        f"the arguments of {tool.name!r} cannot be constrained to their schema in this model's "
        f"format of calls: {reason}; change the schema, or leave out strict and tool_choice"
    )
