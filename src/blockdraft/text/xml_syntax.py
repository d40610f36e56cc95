"""The grammar of calls as Qwen3-Coder writes them, see text/xml_calls.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from blockdraft.core.errors import RequestError
from blockdraft.text.json_types import Schema, resolve, schema_types, subschemas
from blockdraft.text.tools import Tool, json_rule, quoted
from blockdraft.text.xml_calls import (
    BEGIN,
    END,
    END_OF_FUNCTION,
    END_OF_PARAMETER,
    FUNCTION,
    PARAMETER,
)

_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECTS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "title", "description"),
        *("$schema", "$id", "$comment", "default", "examples", "strict", *_DEFINITIONS),
    }
)
"""Keywords of the schema of arguments that are kept, or say nothing about which are accepted."""
_OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format", "allOf", "not", "if"})
"""Keywords that restrict a text in ways that cannot be kept here."""


class XmlSyntax:
    """A CallSyntax. A text stands as it is, up to the end of its parameter; the rest is JSON."""

    begin = f"{BEGIN}\n{FUNCTION}"
    mark = FUNCTION
    end = f"\n{END}"

    def function_rules(self, rule: str, tool: Tool) -> list[str]:
        """See CallSyntax."""
        unknown = sorted(tool.parameters.keys() - _OF_OBJECTS)
        properties = tool.parameters.get("properties") or {}
        required = tool.parameters.get("required") or []
        if unknown:
            raise _not_kept(tool, f"its schema has {unknown[0]}")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _not_kept(tool, "its properties or what is required of them is malformed")
        if any(name not in properties for name in map(str, required)):
            raise _not_kept(tool, "its schema has required without properties of these names")
        parts, rules = [], [rf"{rule}_text[lazy]: /(.|\n)*/ {quoted(END_OF_PARAMETER)}"]
        for index, (name, schema) in enumerate(properties.items()):
            if ">" in name or "\n" in name:
                raise _not_kept(tool, f"{name!r:.60} cannot stand in a tag")
            parts.append(f"{rule}_{index}" + ("" if name in required else "?"))
            value = " | ".join(_values(tool, name, schema, f"{rule}_text"))
            rules.append(f'{rule}_{index}: {quoted(f"{PARAMETER}{name}>")} "\\n" ({value}) "\\n"')
        inner = " ".join([quoted(f"{tool.name}>\n"), *parts, quoted(END_OF_FUNCTION)])
        return [f"{rule}: {inner}", *(rules if parts else [])]


XML = XmlSyntax()


def _values(tool: Tool, name: str, schema: Any, text_rule: str) -> Iterator[str]:
    """What may stand for a parameter, up to its end."""
    root = tool.parameters
    end = quoted(f"\n{END_OF_PARAMETER}")
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = resolve(schema["$ref"], root)
    types = schema_types(schema, root)
    if not isinstance(schema, Mapping) or not types or "string" not in types:
        definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        given = dict(schema) if isinstance(schema, Mapping) else {}
        yield f"{json_rule({**given, **definitions})} {end}"
        return
    if words := _words(schema):
        if any(END_OF_PARAMETER in word for word in words):
            raise _not_kept(tool, f"a value of {name!r:.60} looks like the end of a parameter")
        yield f"({' | '.join(map(quoted, words))}) {end}"
    elif types == {"string"} or types == {"string", "null"}:
        if restricted := sorted(_restrictions(schema, root)):
            raise _not_kept(tool, f"{name!r:.60} is a text with {restricted[0]}")
        yield text_rule
    else:
        raise _not_kept(tool, f"{name!r:.60} may be a text or something else")


def _words(schema: Schema) -> list[str]:
    """The texts that alone are allowed, if that is so."""
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return []
    return words


def _restrictions(schema: Schema, root: Schema) -> Iterator[str]:
    yield from _OF_TEXTS & schema.keys()
    yield from {"const", "enum"} & schema.keys()
    for key in ("anyOf", "oneOf"):
        for one in subschemas(schema, key):
            if isinstance(one, Mapping):
                yield from _restrictions(one, root)
                yield from {"$ref"} & one.keys()


def _not_kept(tool: Tool, reason: str) -> RequestError:
    return RequestError(
        f"the arguments of {tool.name!r} cannot be kept to their schema in the form in which this "
        f"model writes calls: {reason}; change the schema, or leave out strict and tool_choice"
    )
