"""Tool calls in the text of an answer, found while it is written."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from json import JSONDecoder

from blockdraft.text.tools import CallSyntax


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = JSONDecoder(parse_constant=_refuse)  # Python itself takes NaN


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that is complete; `arguments` is the text of a JSON object as the model wrote it."""

    name: str
    arguments: str


Piece = str | ToolCall

_HALF_BARE_CALL = re.compile(r'\s*\{\s*("name"|$)')


class ToolCallParser:
    """Splits the text of one answer into text and calls.

    A call comes when it is complete, and only if it is JSON with a known name and an object of
    arguments; anything else stays text, word for word. White space between calls is dropped.
    Without a begin, a call is the whole answer: then everything from a first brace on is held back.
    An answer that was cut in the middle of a call, or of its begin, ends before it.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str]) -> None:
        self._begin, self._end = syntax.begin.strip(), syntax.end.strip()
        self._key = syntax.arguments_key
        self._names = frozenset(names)
        self._text = ""
        self._is_inside = False
        self._is_behind_call = False
        self._is_whole = not self._begin  # the answer may still turn out to be a call as a whole

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what is certain; its pieces in order."""
        self._text += text
        if not self._begin:
            return self._push_bare()
        return [piece for piece in self._split() if piece]

    def close(self, *, is_cut: bool = False) -> list[Piece]:
        """No text follows: what was held back becomes certain.

        is_cut: the model had not come to an end.
        """
        if self._is_whole and (call := self._parse(self._text)) is not None:
            return [call]
        text = self._without_half_call() if is_cut else self._text
        self._text = ""
        if self._is_behind_call and not text.strip():
            return []
        return [text] if text else []

    def _without_half_call(self) -> str:
        if not self._begin:
            is_half = self._is_whole and _HALF_BARE_CALL.match(self._text) is not None
        elif self._is_inside:
            is_half = self._end not in self._text
        else:
            num_held = self._num_held_back()
            # A single letter is too little to tell.
            return self._text[:-num_held] if num_held > 1 else self._text
        return "" if is_half else self._text

    def _push_bare(self) -> list[Piece]:
        if self._is_whole and self._text.strip() and not self._text.lstrip().startswith("{"):
            self._is_whole = False
        if self._is_whole or not self._text:
            return []
        text, self._text = self._text, ""
        return [text]

    def _split(self) -> Iterator[Piece]:
        while True:
            if not self._is_inside:
                yield self._take_text()
            if not self._is_inside:
                return
            if (call := self._take_call()) is None:
                return
            self._is_inside, self._is_behind_call = False, True
            yield call

    def _take_text(self) -> str:
        """Text before the next begin, or as much of it as cannot become one."""
        start = self._text.find(self._begin)
        self._is_inside = start >= 0
        end = start if self._is_inside else len(self._text) - self._num_held_back()
        text = self._text[:end]
        if self._is_behind_call:
            if not text.strip():
                if self._is_inside:
                    self._text = self._text[end:]
                return ""  # not yet certain: a call may follow, or the end
            self._is_behind_call = False
        self._text = self._text[end:]
        return text

    def _num_held_back(self) -> int:
        lengths = range(min(len(self._begin) - 1, len(self._text)), 0, -1)
        return next((n for n in lengths if self._text.endswith(self._begin[:n])), 0)

    def _take_call(self) -> ToolCall | None:
        """The call at the start of the text, if it is complete; its arguments may hold an end."""
        start = len(self._begin)
        end = self._text.find(self._end, start)
        while end >= 0:
            if (call := self._parse(self._text[start:end])) is not None:
                self._text = self._text[end + len(self._end) :]
                return call
            end = self._text.find(self._end, end + 1)
        return None

    def _parse(self, text: str) -> ToolCall | None:
        try:
            members = _members(text.strip())
            name = _DECODER.decode(members["name"])
            arguments = members[self._key]
        except (ValueError, KeyError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._names or not arguments.startswith("{"):
            return None
        return ToolCall(name, arguments)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, their values as they are written.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(_DECODER.decode(text), dict):
        raise ValueError("no object")
    members: dict[str, str] = {}
    position = _skip_space(text, 1)
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        start = _skip_space(text, _skip_space(text, position) + 1)  # behind the colon
        _, position = _DECODER.raw_decode(text, start)
        members[key] = text[start:position]
        position = _skip_space(text, position)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return members


def _skip_space(text: str, position: int) -> int:
    while text[position] in " \t\n\r":
        position += 1
    return position
