"""Which parser finds the calls of a syntax."""

from collections.abc import Sequence

from blockdraft.text.call_syntax import JsonSyntax
from blockdraft.text.python_calls import PythonCallParser
from blockdraft.text.python_syntax import PythonSyntax
from blockdraft.text.tool_calls import CallParser, ToolCallParser
from blockdraft.text.tool_prompt import AnySyntax
from blockdraft.text.tools import Tool
from blockdraft.text.xml_calls import XmlCallParser


def call_parser(syntax: AnySyntax, tools: Sequence[Tool]) -> CallParser:
    """A parser of one answer, which finds calls of these tools."""
    if isinstance(syntax, JsonSyntax):
        return ToolCallParser(syntax, [tool.name for tool in tools])
    if isinstance(syntax, PythonSyntax):
        return PythonCallParser(tools, syntax)
    return XmlCallParser(tools, syntax.tags)
