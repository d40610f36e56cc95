"""Tool calls in the text of an answer, parted from it while it is written."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from json import JSONDecoder
from typing import Any

from blockdraft.text.call_syntax import JsonSyntax
from blockdraft.text.marks import begun_pattern, num_begun


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


_DECODER = JSONDecoder(parse_constant=_refuse)  # Python itself takes NaN


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none; RecursionError: it is nested too deeply.
    """
    return _DECODER.decode(text)


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of this function begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More text of the last call's arguments, as the model wrote them."""

    text: str


Piece = str | CallStart | Arguments


class CallParser(ABC):
    """Splits the text of one answer into text and calls; how it is cut is no matter.

    `are_whole`: the arguments of all calls are JSON objects. A subclass has a step for each state,
    which takes from what is held.
    """

    _state: str
    _steps: Mapping[str, Callable[[], Iterable[Piece]]]

    def __init__(self) -> None:
        self._held = ""
        self._is_behind_call = False
        self.are_whole = True

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what is certain; its pieces in order."""
        self._held += text
        return [piece for piece in self._split() if piece]

    def _split(self) -> Iterator[Piece]:
        """Each step takes all that is certain, and goes on if another state takes over."""
        before = None
        while self._state != before:
            before = self._state
            yield from self._steps[before]()

    @abstractmethod
    def close(self, *, is_cut: bool = False) -> list[Piece]:
        """No text follows: what was held back becomes certain.

        is_cut: the model had not come to an end; what leads up to a call is no text then.
        """


class OpenerCallParser(CallParser):
    """Splits text where a mark may begin a call, and what follows it tells whether it does.

    A subclass has steps for the states `head`, which holds what begins with such an opener,
    `arguments`, and `tail`, where the marks of a call are left out. Without openers a call is at
    the start of the answer. White space between calls is dropped.
    """

    def __init__(self, openers: Sequence[str]) -> None:
        super().__init__()
        self._openers = openers
        self._state: str = "text" if openers else "head"
        self._opener = ""
        """What a call begins with at the start of what is held."""
        self._gap = ""
        """White space between the last call and a begin, which is text if that begins none."""

    def close(self, *, is_cut: bool = False) -> list[Piece]:
        """See CallParser.close."""
        if self._state == "arguments":
            self.are_whole = False
        if self._state in ("arguments", "members", "tail"):
            return []
        text = self._without_half_call() if is_cut else self._gap + self._held
        if self._is_behind_call and not text.strip():
            return []
        return [text] if text else []

    def _without_half_call(self) -> str:
        if self._state == "text":
            num_held = num_begun(self._held, *self._openers)
            # A single letter is too little to tell.
            return self._held[:-num_held] if num_held > 1 else self._held
        return "" if self._openers or self._is_half_bare_call() else self._held

    @abstractmethod
    def _is_half_bare_call(self) -> bool:
        """True if what is held, at the start of an answer, leads up to a call without a mark."""

    def _take_text(self) -> list[Piece]:
        """Text before the next begin, or as much of it as cannot become one."""
        found = {self._held.find(opener): opener for opener in self._openers}
        start = min((start for start in found if start >= 0), default=-1)
        end = start if start >= 0 else len(self._held) - num_begun(self._held, *self._openers)
        text = self._held[:end]
        if self._is_behind_call and not text.strip() and start < 0:
            return []  # not yet certain: a call may follow, or the end
        self._held = self._held[end:]
        if start >= 0:
            self._begin_head(found[start])
        if self._is_behind_call and not text.strip():
            self._gap = text
            return []
        self._is_behind_call = False
        return [text]

    def _begin_head(self, opener: str) -> None:
        self._opener, self._state = opener, "head"

    def _take_as_text(self, length: int) -> list[Piece]:
        """Go on behind a begin that began no call; calls may follow."""
        text, self._held = self._gap + self._held[:length], self._held[length:]
        self._state, self._is_behind_call, self._gap = "text", False, ""
        return [text]

    def _take_closers(self, rest: str, closers: Sequence[str]) -> list[Piece]:
        """Leave out what closes a call at the start of the rest of what is held; text follows."""
        if not rest:
            return []  # not yet certain
        for closer in closers:
            behind = rest.lstrip(f"{SPACE},")
            if behind != closer and closer.startswith(behind):
                return []  # not yet certain
            rest = behind.removeprefix(closer) if behind.startswith(closer) else rest
        self._held = rest
        self._state, self._is_behind_call = "text", True
        return []


GAP = r"[ \t\n\r]*+"
SPACE = " \t\n\r"
_HALF_BARE_CALL = re.compile(r'\s*\{\s*("name"|$)')
_MORE_MEMBERS = re.compile(rf'{GAP}(?:$|,{GAP}(?:"|$))')
_OUTSIDE_STRINGS = frozenset("[]:,+-.0123456789Etruefalsn" + SPACE)
"""Letters of JSON that stand outside its strings, beside braces and quotes."""


class ToolCallParser(OpenerCallParser):
    """Splits the text of one answer into text and calls, whose arguments are JSON.

    A call is one from where its arguments begin, if it names a known function; what was handed out
    of it by then cannot be taken back. So the arguments of a call may be no JSON, or lack their
    end. A call that is an object with its members in another order than the model was told comes
    when it is complete. Anything else stays text, word for word, and is handed out as soon as it
    cannot become a call. White space between calls is dropped. Without a begin, a call is at the
    start of the answer: then what begins with a brace is held back until it cannot be one. An
    answer that was cut in the middle of what leads up to a call's arguments ends before it.
    """

    def __init__(self, syntax: JsonSyntax, names: Collection[str]) -> None:
        super().__init__(syntax.openers)
        self._end = syntax.end.strip()
        self._is_object = syntax.is_object
        self._is_list = syntax.is_object and bool(syntax.section)
        closers = ("" if syntax.is_object else syntax.close, syntax.end, syntax.section_end)
        self._closers = [closer.strip() for closer in closers if closer]
        self._key = syntax.arguments_key if syntax.is_object else ""
        self._head, self._half_head = _head_patterns(syntax)
        self._names = frozenset(names)
        self._steps = {
            "text": self._take_text,
            "head": self._take_head,
            "between": self._take_between,
            "arguments": self._take_arguments,
            "members": self._take_members,
            "tail": self._take_tail,
        }
        self._object = _JsonObject()
        """What stands behind a begin, or the arguments of the call, or its members behind these."""
        self._num_read = 0
        """Characters that it has taken of what is held, behind the begin if there is one."""

    def close(self, *, is_cut: bool = False) -> list[Piece]:
        """See CallParser.close."""
        if not self._openers and self._state == "head" and (call := self._parse(self._held)):
            return call
        return super().close(is_cut=is_cut)

    def _is_half_bare_call(self) -> bool:
        return _HALF_BARE_CALL.match(self._held) is not None

    def _begin_head(self, opener: str) -> None:
        super()._begin_head(opener)
        self._object, self._num_read = _JsonObject(), 0

    def _take_head(self) -> list[Piece]:
        """What leads up to the arguments, or a whole call if it is spelled in another way."""
        if self._is_list and self._opener in self._openers:
            rest = self._held[len(self._opener) :].lstrip(SPACE)
            if not rest:
                return []
            if rest.startswith("["):
                self._opener = self._held[: len(self._held) - len(rest) + 1]
        found = self._head.match(self._held, len(self._opener))
        name = found[found.lastindex or 0] if found else ""
        if found and name in self._names:
            self._held = self._held[found.end() :]
            self._state, self._object, self._gap = "arguments", _JsonObject(), ""
            return [CallStart(name)]
        if not self._is_object:
            is_open = not found and self._may_become_head()
            return [] if is_open else self._take_as_text(len(self._opener))
        if self._openers:
            return self._take_whole_call()
        start = self._held.lstrip()
        if start and not start.startswith("{"):
            self._state = "text"
        return []

    def _may_become_head(self) -> bool:
        """True if what is held is the begin of what leads up to a known function's arguments."""
        half = self._half_head.fullmatch(self._held, len(self._opener))
        begun = half[half.lastindex] if half and half.lastindex else ""
        return half is not None and any(name.startswith(begun) for name in self._names)

    def _take_whole_call(self) -> list[Piece]:
        """A call that is complete; what cannot become one is text."""
        start = len(self._opener)
        self._num_read += self._object.take(self._held[start + self._num_read :])
        if self._object.is_broken:
            return self._take_as_text(start)
        if not self._object.is_complete:
            return []
        rest = self._held[start + self._num_read :].lstrip(SPACE)
        if rest != self._end and self._end.startswith(rest):
            return []  # not yet certain
        length = len(self._held) - len(rest.removeprefix(self._end))
        call = self._parse(self._held[start : start + self._num_read])
        if not call or not rest.startswith(self._end):
            text = self._take_as_text(length)
            self._state = "between" if self._is_list else "text"
            return text
        self._held, self._gap = self._held[start + self._num_read - 1 :], ""
        self._state = "tail"
        return call

    def _take_between(self) -> list[Piece]:
        """What follows an object of a list that is no call: the next one, or text."""
        rest = self._held.lstrip(SPACE)
        space, self._held = self._held[: len(self._held) - len(rest)], rest
        if rest.startswith(","):
            self._begin_head(",")
        elif rest:
            self._state = "text"
        return [space]

    def _take_arguments(self) -> list[Piece]:
        length = self._object.take(self._held)
        text, self._held = self._held[:length], self._held[length:]
        if self._object.is_complete:
            self.are_whole = self.are_whole and self._object.is_json
            self._state = "members" if self._is_object and self._openers else "tail"
            self._object, self._num_read = _JsonObject(), 0
            self._object.take("{")
        return [Arguments(text)] if text else []

    def _take_members(self) -> list[Piece]:
        """More members of the object that is the call, which are left out."""
        is_end = not _MORE_MEMBERS.match(self._held)
        if not is_end:
            self._num_read += self._object.take(self._held[self._num_read :])
        if self._object.is_complete:
            self._held = self._held[self._num_read :]
        if is_end or self._object.is_broken or self._object.is_complete:
            self._state = "tail"
        return []

    def _take_tail(self) -> list[Piece]:
        """What closes a call, or where text goes on without that."""
        rest = self._held.lstrip(f"{SPACE}}}") if self._is_object else self._held
        if self._is_list and rest.startswith(","):
            self._held = rest
            self._begin_head(",")
            return []
        return self._take_closers(rest, self._closers)

    def _parse(self, text: str) -> list[Piece]:
        """A complete call; empty if it is none."""
        try:
            members = _members(text.strip())
            name = read_json(members["name"])
            arguments = self._object_in(members.get(self._key))
        except (ValueError, KeyError, RecursionError):
            return []
        if not isinstance(name, str) or name not in self._names or not arguments.startswith("{"):
            return []
        return [CallStart(name), Arguments(arguments)]

    def _object_in(self, written: str | None) -> str:
        """Arguments as they are meant: some models write them as a string, or none at all.

        Raises:
            ValueError: a string holds no JSON.
        """
        if written is None or written == "null":
            return "{}" if self._openers else ""
        if not written.startswith('"'):
            return written
        inside: str = read_json(written)
        return inside.strip() if isinstance(read_json(inside), dict) else ""


@cache
def _head_patterns(syntax: JsonSyntax) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What leads from an opener to the arguments, and what may become that where marks do."""
    if syntax.is_object:
        key = syntax.arguments_key
        parts = (r"\{", '"name"', ":", r'"([^"\\]*)"', ",", f'"{key}"', ":", r"(?=\{)")
        return re.compile(GAP + GAP.join(parts)), re.compile("")
    begins = ([], _atoms(syntax.begin)) if syntax.section else ([],)
    asides = ([], [*_atoms(syntax.aside[0]), "[A-Za-z0-9]*+"]) if syntax.aside else ([],)
    before = [*_atoms(syntax.before), "([A-Za-z0-9_-]++)"]
    behind = [GAP, *_atoms(syntax.behind), GAP]
    heads = [[GAP, *begin, GAP, *before, *aside, *behind] for begin in begins for aside in asides]
    wholes = ["".join([*head, r"(?=\{)"]) for head in heads]
    return re.compile("|".join(wholes)), re.compile("|".join(map(begun_pattern, heads)))


def _atoms(text: str) -> list[str]:
    """A pattern for each letter of marks, between which white space is no matter."""
    return [GAP if letter.isspace() else re.escape(letter) for letter in text]


class _JsonObject:
    """The text of an object while it is written: where it ends, and whether it is JSON."""

    def __init__(self) -> None:
        self._text = ""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False
        self.is_broken = False
        """It holds a letter that JSON never has there, so it is none, whatever follows."""

    def take(self, text: str) -> int:
        """Characters of the text, from its start, that belong to the object."""
        if self.is_complete:
            return 0
        length = next((i for i, letter in enumerate(text, 1) if self._closes(letter)), len(text))
        self._text += text[:length]
        return length

    @property
    def is_json(self) -> bool:
        """True if it is complete, and JSON."""
        try:
            read_json(self._text)
        except (ValueError, RecursionError):
            return False
        return True

    def _closes(self, letter: str) -> bool:
        """Take a letter; True if it is the last one."""
        if self._is_in_string:
            self.is_broken = self.is_broken or letter < " "
            self._is_in_string = self._is_escaped or letter != '"'
            self._is_escaped = letter == "\\" and not self._is_escaped
        elif self._depth == 0 and letter != "{":
            self.is_broken = self.is_broken or letter not in SPACE
        elif letter in "{}":
            self._depth += 1 if letter == "{" else -1
            self.is_complete = self._depth == 0
        elif letter == '"':
            self._is_in_string = True
        else:
            self.is_broken = self.is_broken or letter not in _OUTSIDE_STRINGS
        return self.is_complete


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, their values as they are written.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(read_json(text), dict):
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
    while text[position] in SPACE:
        position += 1
    return position
