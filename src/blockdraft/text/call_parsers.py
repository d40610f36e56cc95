"""Which parser finds the calls of which syntax."""

from collections.abc import Sequence
from typing import Protocol

from blockdraft.text.tool_calls import Piece, ToolCallParser
from blockdraft.text.tools import CallSyntax, JsonSyntax, Tool
from blockdraft.text.xml_calls import XmlCallParser


class CallParser(Protocol):
    """Splits the text of one answer into text and calls; how it is cut is no matter.

    `are_whole`: the arguments of all calls are JSON objects.
    """

    are_whole: bool

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what is certain; its pieces in order."""
        ...

    def close(self, *, is_cut: bool = False) -> list[Piece]:
        """No text follows: what was held back becomes certain.

        is_cut: the model had not come to an end.
        """
        ...


def call_parser(syntax: CallSyntax, tools: Sequence[Tool]) -> CallParser:
    """A parser of calls in this syntax."""
    if isinstance(syntax, JsonSyntax):
        return ToolCallParser(syntax, [tool.name for tool in tools])
    return XmlCallParser(tools)
