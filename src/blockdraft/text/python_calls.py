"""Tool calls as Python has them, as LFM2, OLMo 3 and some Llama models write them.

    [look(name="abc", age=3), wait()]

They stand between marks, or at the start of the answer.
"""

import re
from collections.abc import Iterator, Sequence

from blockdraft.text.argument_values import argument_types, from_python
from blockdraft.text.call_syntax import CallSyntax, quoted
from blockdraft.text.json_types import Schema
from blockdraft.text.marks import begun_pattern
from blockdraft.text.tool_calls import (
    GAP,
    SPACE,
    Arguments,
    CallStart,
    OpenerCallParser,
    Piece,
)
from blockdraft.text.tools import Tool

_NAME, _KEY = "([A-Za-z0-9_-]{1,64}+)", r"[^\W\d]\w{0,255}+"
_FIRST = re.compile(rf"{GAP}(?:\)|{_KEY}{GAP}=)")
_ARGUMENT = re.compile(rf"{GAP}({_KEY}){GAP}=(.*)", re.S)
_ENDS = ",)]}:"
"""What may follow a text in Python, behind white space."""


class PythonCallParser(OpenerCallParser):
    """Splits the text of one answer into text and calls, as ToolCallParser does.

    A call is one from its first argument on, if it names a known function. Its arguments become a
    JSON object, one by one as they are complete. What is no argument by name goes into it as it is,
    which is no JSON then. Calls may follow that of an unknown function, which is text.
    """

    def __init__(self, tools: Sequence[Tool], syntax: CallSyntax) -> None:
        super().__init__(syntax.openers)
        self._tools = {tool.name: tool for tool in tools}
        self._steps = {
            "text": self._take_text,
            "head": self._take_head,
            "unknown": self._take_unknown,
            "arguments": self._take_arguments,
            "tail": self._take_tail,
        }
        is_list = syntax.section.endswith("[")
        bracket = [r"\[?+" if self._openers else r"\[", GAP] if is_list else []
        self._head = self._first_head = _Head(GAP, *bracket)
        self._next_head = _Head(rf"[{SPACE},]*+")
        closing = syntax.section_end.removeprefix("]")
        self._closers = [one for one in ("]" if is_list else "", closing) if one]
        self._parameters: Schema = {}
        self._num_arguments = 0
        self._argument, self._extent = "", _Extent()
        """The text of the argument that goes on."""

    def _is_half_bare_call(self) -> bool:
        return bool(self._held.strip(SPACE))

    def _begin_head(self, opener: str) -> None:
        super()._begin_head(opener)
        self._head = self._first_head

    def _begin_next_head(self) -> None:
        super()._begin_head("")
        self._head = self._next_head

    def _take_head(self) -> Iterator[Piece]:
        """What leads up to the arguments of a call; a function's name may come and be unknown."""
        start = len(self._opener)
        found = self._head.whole.match(self._held, start)
        is_known = found is not None and found[1] in self._tools
        if found and is_known and _FIRST.match(self._held, found.end()):
            self._parameters, self._num_arguments = self._tools[found[1]].parameters, 0
            self._held, self._state, self._gap = self._held[found.end() :], "arguments", ""
            yield CallStart(found[1])
            yield Arguments("{")
        elif (found is None or is_known) and self._head.half.fullmatch(self._held, start):
            return  # not yet certain
        else:
            yield from self._take_as_text(found.end() if found else start)
            self._state = "unknown" if found else "text"

    def _take_unknown(self) -> Iterator[Piece]:
        """The arguments of an unknown function; known ones may follow."""
        while (end := self._extent.take(self._held)) is not None:
            text, self._held = self._held[: end + 1], self._held[end + 1 :]
            yield text
            if text.endswith(")"):
                self._begin_next_head()
                return
        yield self._held
        self._held = ""

    def _take_arguments(self) -> Iterator[Piece]:
        while (end := self._extent.take(self._held)) is not None:
            argument, mark = self._argument + self._held[:end], self._held[end]
            self._argument, self._held = "", self._held[end + 1 :]
            if argument.strip():
                yield self._written(argument)
            if mark == ")":
                self._state = "tail"
                yield Arguments("}")
                return
        self._argument, self._held = self._argument + self._held, ""

    def _written(self, argument: str) -> Arguments:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        named = _ARGUMENT.fullmatch(argument)
        if named is None:
            self.are_whole = False
            return Arguments(comma + argument.strip())
        types = argument_types(self._parameters, named[1])
        return Arguments(f"{comma}{quoted(named[1])}: {from_python(named[2], types)}")

    def _take_tail(self) -> list[Piece]:
        """The next call, or what closes all of them, or where text goes on without that."""
        head, behind = self._next_head, self._held.lstrip(f"{SPACE},")
        if behind and (head.whole.match(self._held) or head.half.fullmatch(self._held)):
            self._is_behind_call = True
            self._begin_next_head()
            return []
        return self._take_closers(self._held, self._closers)


class _Head:
    """What leads from `lead` to the arguments of a call, and what may become that."""

    def __init__(self, *lead: str) -> None:
        whole = [*lead, _NAME, GAP, r"\("]
        atoms = [*whole, GAP, _KEY, GAP]
        self.whole = re.compile("".join(whole))
        self.half = re.compile(begun_pattern(atoms))


class _Extent:
    """Finds where an argument ends, in text that comes in pieces.

    A quote ends a text only if what may follow one does: many templates write texts as they are.
    Three quotes end a text that three begin.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        """What ends the text that goes on."""
        self._num_letters = self._num_quotes = 0
        """Of that text, its begin included; quotes in a row up to here."""
        self._is_escaped = False
        self._may_have_ended = False
        """A quote has come, and white space at most behind it."""

    def take(self, text: str) -> int | None:
        """Where in the text the comma or bracket behind the argument is; None if it goes on."""
        return next((i for i, letter in enumerate(text) if self._ends_at(letter)), None)

    def _ends_at(self, letter: str) -> bool:
        """Take a letter. The next one belongs to another argument if it ends this one."""
        if self._may_have_ended and not letter.isspace():
            self._may_have_ended = False
            self._quote = "" if letter in _ENDS else self._quote
        if self._quote:
            self._take_in_text(letter)
        elif letter in "\"'":
            self._quote, self._num_letters, self._num_quotes = letter, 1, 1
        elif letter in "([{":
            self._depth += 1
        elif letter in ")]}" and self._depth:
            self._depth -= 1
        else:
            return letter in ",)" and not self._depth
        return False

    def _take_in_text(self, letter: str) -> None:
        is_quote = letter == self._quote[0] and not self._is_escaped
        self._is_escaped = letter == "\\" and not self._is_escaped
        self._num_letters += 1
        self._num_quotes = self._num_quotes + 1 if is_quote else 0
        if len(self._quote) == 3:
            self._quote = "" if self._num_quotes == 3 else self._quote
        elif self._num_quotes == self._num_letters == 3:
            self._quote, self._num_quotes = letter * 3, 0
        else:
            self._may_have_ended = is_quote or self._may_have_ended
