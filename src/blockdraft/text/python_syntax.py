"""Calls as Python has them, and their grammar, see text/python_calls.py."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blockdraft.text.argument_schema import not_kept, parameters_of, value_rule
from blockdraft.text.call_syntax import CallSyntax, marked, quoted
from blockdraft.text.json_types import Schema, schema_types
from blockdraft.text.tools import Tool

_PARAMETER = re.compile(r"[^\W\d]\w*")
_OF_PLAIN_TYPES = frozenset({"type", "title", "description", "default", "examples"})
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSyntax(CallSyntax):
    """The name of the function, and its arguments by their names: look(name="abc", age=3)."""

    def function_rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """See CallSyntax. The arguments stand in the order of the schema; texts are JSON's."""
        parameters = list(parameters_of(tool))
        rules, first = [], []
        for index, (name, schema, is_required) in enumerate(parameters):
            if not _PARAMETER.fullmatch(name):
                raise not_kept(tool, f"{name!r:.60} is not a valid Python parameter name")
            values = [value_rule(schema, tool.parameters), *_words(schema, tool.parameters)]
            rules.append(f"{rule}_{index}: {quoted(f'{name}=')} ({' | '.join(values)})")
            more = f'", " {rule}_{index}'
            rest = f"{rule}_behind_{index + 1}"
            rules.append(f"{rule}_behind_{index}: {more if is_required else f'({more})?'} {rest}")
            if not any(one.is_required for one in parameters[:index]):
                first.append(f"{rule}_{index} {rest}")
        if parameters:
            rules.append(f'{rule}_behind_{len(parameters)}: ""')
        is_optional = "" if any(one.is_required for one in parameters) else "?"
        inner = f"({' | '.join(first)}){is_optional}" if first else ""
        return [f'{rule}: {marked(f"{tool.name}(", special)} {inner} ")"', *rules]

    def write(self, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls as the model writes them: names of functions, and their arguments."""
        written = (
            f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})"
            for name, arguments in calls
        )
        inside = self.between.join(f"{self.begin}{call}{self.end}" for call in written)
        return f"{self.section}{inside}{self.section_end}"


PYTHON = PythonSyntax(section="[", between=", ", section_end="]")
"""Of Llama 3.2 and 4 with a template that teaches it: the calls are at the start of the answer."""
LFM2 = PythonSyntax(
    marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    section="<|tool_call_start|>[",
    between=", ",
    section_end="]<|tool_call_end|>",
)
OLMO = PythonSyntax(
    marks=("<function_calls>", "</function_calls>"),
    section="<function_calls>",
    section_end="</function_calls>",
)
"""Of OLMo 3."""


def _words(schema: Any, root: Schema) -> list[str]:
    """Python's words that a schema allows beside JSON's, where its types say all about it."""
    if not isinstance(schema, Mapping) or schema.keys() - _OF_PLAIN_TYPES:
        return []
    types = sorted(schema_types(schema, root))
    return [quoted(word) for one in types for word in _WORDS.get(one, ())]


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
