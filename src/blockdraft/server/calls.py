"""The tool calls of one choice, as clients get them. No torch."""

import secrets
from collections.abc import Set
from dataclasses import dataclass

from blockdraft.server.shape import Toolbox
from blockdraft.text.tool_calls import Piece as Found
from blockdraft.text.tool_calls import ToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class Call:
    """A call with its place among those of its choice, and a name for its result to refer to."""

    index: int
    id: str
    name: str
    arguments: str


class CallFinder:
    """Parts content into text and calls while it streams. No part of a call is ever text.

    Args:
        toolbox: the tools that may be called.
        eos_ids: tokens with which an answer ends by itself.
    """

    def __init__(self, toolbox: Toolbox, eos_ids: Set[int]) -> None:
        self._parser = ToolCallParser(toolbox.syntax, [tool.name for tool in toolbox.tools])
        # Where nothing but calls is allowed, text is what is left of one that was cut short.
        self._has_text = toolbox.choice.mode != "required"
        self._eos_ids = eos_ids
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Take more content; returns the text and the calls that are certain by now."""
        return self._sort(self._parser.push(text))

    def close(self, last_token: int) -> tuple[str, list[Call]]:
        """No content follows `last_token`: returns what was held back, but no half of a call."""
        return self._sort(self._parser.close(is_cut=last_token not in self._eos_ids))

    def _sort(self, found: list[Found]) -> tuple[str, list[Call]]:
        text, calls = "", []
        for piece in found:
            if isinstance(piece, ToolCall):
                name = f"call_{secrets.token_hex(12)}"
                calls.append(Call(self.num_calls, name, piece.name, piece.arguments))
                self.num_calls += 1
            elif self._has_text:
                text += piece
        return text, calls
