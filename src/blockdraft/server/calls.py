"""The tool calls of one choice, as clients get them. No torch."""

import secrets
from collections.abc import Set
from dataclasses import dataclass

from blockdraft.server.shape import Toolbox
from blockdraft.text.call_parsers import call_parser
from blockdraft.text.tool_calls import Arguments, CallStart
from blockdraft.text.tool_calls import Piece as Found


@dataclass(frozen=True, slots=True)
class Call:
    """A call with its place among those of its choice, or what a piece of the answer adds to it.

    The first piece of a call has its name, and an id for its result to refer to; what follows has
    neither.
    """

    index: int
    id: str
    name: str
    arguments: str


class CallNumbers:
    """Gives the calls of a choice their places and ids."""

    def __init__(self) -> None:
        self.num_calls = 0

    def call(self, piece: CallStart | Arguments) -> Call:
        """What a piece adds to the calls."""
        if isinstance(piece, Arguments):
            return Call(self.num_calls - 1, "", "", piece.text)
        self.num_calls += 1
        return Call(self.num_calls - 1, f"call_{secrets.token_hex(12)}", piece.name, "")


class CallFinder:
    """Parts content into text and calls while it streams. No part of a call is ever text.

    Args:
        toolbox: the tools, and which of them may be called.
        eos_ids: tokens with which an answer ends by itself.
    """

    def __init__(self, toolbox: Toolbox, eos_ids: Set[int]) -> None:
        self.begins = toolbox.begins
        self._parser = call_parser(toolbox.syntax, toolbox.callable_tools)
        # Where nothing but calls is allowed, text is what is left of one that was cut short.
        self._has_text = toolbox.choice.mode != "required"
        self._eos_ids = eos_ids
        self._numbers = CallNumbers()

    def feed(self, text: str) -> list[str | Call]:
        """Take more content; returns the text and the pieces of calls that are certain by now."""
        return self._sort(self._parser.push(text))

    def close(self, last_token: int) -> list[str | Call]:
        """No content follows `last_token`: returns what was held back, but no half of a call."""
        return self._sort(self._parser.close(is_cut=self.is_cut(last_token)))

    def is_cut(self, last_token: int) -> bool:
        """True if the model had not come to an end with this token."""
        return last_token not in self._eos_ids

    @property
    def can_be_run(self) -> bool:
        """True if there are calls, and the arguments of each are an object of JSON."""
        return self._numbers.num_calls > 0 and self._parser.are_whole

    def _sort(self, found: list[Found]) -> list[str | Call]:
        parts: list[str | Call] = []
        for piece in found:
            if isinstance(piece, str):
                parts += [piece] if self._has_text else []
            else:
                parts.append(self._numbers.call(piece))
        return parts
