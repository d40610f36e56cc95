"""The grammar of calls with tags for each argument, see text/xml_calls.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.text.argument_schema import not_kept, parameters_of, value_rule
from blockdraft.text.argument_values import from_text
from blockdraft.text.call_syntax import CallSyntax, marked, quoted
from blockdraft.text.json_types import Schema, resolve, schema_types, subschemas
from blockdraft.text.tools import Tool
from blockdraft.text.xml_calls import GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, Tags

_OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format", "allOf", "not", "if"})
"""Keywords that restrict a text in ways that cannot be kept here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlSyntax(CallSyntax):
    """A text stands as it is, up to the end of its parameter; the rest is JSON.

    `gap` is what stands between tags.
    """

    tags: Tags
    gap: str = "\n"

    @property
    def watched(self) -> tuple[str, ...]:
        """See CallSyntax."""
        return (self.tags.function,) if self.tags.function else self.openers

    def function_rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """See CallSyntax."""
        tags, gap = self.tags, self.gap
        end = tags.end_of_parameter
        # An end that is a token may be written letter by letter too, and is one all the same.
        as_token = rf" | /(.|\n)*/ {marked(end, special)}" if end in special else ""
        rules = [
            f"{rule}_text: {rule}_spelled{as_token}",
            rf"{rule}_spelled[lazy]: /(.|\n)*/ {quoted(end)}",
            f"{rule}_end: {marked(tags.margin + end, special)}",
        ]
        parts = []
        for index, (name, schema, is_required) in enumerate(parameters_of(tool)):
            if any(sign in name for sign in (">", "</", "\n")):
                raise not_kept(tool, f"{name!r:.60} cannot stand in a tag")
            parts.append(f"{rule}_{index}" + ("" if is_required else "?"))
            key = f"{tags.parameter}{name}{tags.key_end}{gap if tags.key_end else ''}{tags.value}"
            value = " | ".join(_values(tool, name, schema, rule, end))
            key_mark, gap_mark = marked(key + tags.margin, special), marked(gap, special)
            rules.append(f"{rule}_{index}: {key_mark} ({value}) {gap_mark}")
        head = marked(f"{tool.name}{tags.name_end}{gap}", special)
        inner = " ".join([head, *parts, marked(tags.end_of_function, special)])
        return [f"{rule}: {inner}", *(rules if parts else [])]


XML = XmlSyntax(
    marks=(QWEN_TAGS.begin, QWEN_TAGS.end),
    begin=f"{QWEN_TAGS.begin}\n{QWEN_TAGS.function}",
    end=f"\n{QWEN_TAGS.end}",
    tags=QWEN_TAGS,
)
"""Of Qwen3-Coder."""
GLM = XmlSyntax(
    marks=(
        *(GLM_TAGS.begin, GLM_TAGS.end),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    begin=GLM_TAGS.begin,
    end=GLM_TAGS.end,
    tags=GLM_TAGS,
)
"""Of GLM-4.5 and 4.6."""
GLM_47 = replace(GLM, gap="", between="")
MINIMAX = XmlSyntax(
    marks=(MINIMAX_TAGS.begin, MINIMAX_TAGS.end),
    section=f"{MINIMAX_TAGS.begin}\n",
    begin=MINIMAX_TAGS.function,
    end="\n",
    between="",
    section_end=MINIMAX_TAGS.end,
    tags=MINIMAX_TAGS,
)
"""Of MiniMax-M2."""


def _values(tool: Tool, name: str, schema: Any, rule: str, end: str) -> Iterator[str]:
    """What may stand for a parameter, up to its end; for the rules see function_rules."""
    root = tool.parameters
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = resolve(schema["$ref"], root)
    types = schema_types(schema, root)
    if not isinstance(schema, Mapping) or not types or "string" not in types:
        yield f"{value_rule(schema, root)} {rule}_end"
        return
    if words := _words(schema, types):
        if any(end in word for word in words):
            raise not_kept(tool, f"a value of {name!r:.60} looks like the end of a parameter")
        yield f"({' | '.join(map(quoted, words))}) {rule}_end"
    elif types == {"string"} or types == {"string", "null"}:
        if restricted := sorted(_restrictions(schema, root)):
            raise not_kept(tool, f"{name!r:.60} is a text with {restricted[0]}")
        yield f"{rule}_text"
    else:
        raise not_kept(tool, f"{name!r:.60} may be a text or something else")


def _words(schema: Schema, types: frozenset[str]) -> list[str]:
    """The texts that alone are allowed, if that is so, and all of them are read as texts."""
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return []
    return words if all(from_text(word, types) == quoted(word) for word in words) else []


def _restrictions(schema: Schema, root: Schema) -> Iterator[str]:
    yield from _OF_TEXTS & schema.keys()
    yield from {"const", "enum"} & schema.keys()
    for key in ("anyOf", "oneOf"):
        for one in subschemas(schema, key):
            if isinstance(one, Mapping):
                yield from _restrictions(one, root)
                yield from {"$ref"} & one.keys()
