"""The format of gpt-oss: an answer is a sequence of messages, each in a channel.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.look <|constrain|>json<|message|>{"name": "abc"}<|call|>

The marks are special tokens, which have no text elsewhere; here they are shown to the parser.
"""

import re
from collections.abc import Collection, Iterator
from typing import Literal

from blockdraft.text.marks import num_begun
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_calls import Arguments, CallStart, read_json

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL, RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = "to=functions."
_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL)
_BODY_ENDS = (START, CHANNEL, END, CALL, RETURN)
_BETWEEN = "\n\n"

_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")

Kind = Literal["reasoning", "content"]
HarmonyPiece = tuple[Kind, str] | CallStart | Arguments


def harmony_marks(tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens whose text the parser needs; none if the model writes another format."""
    template = tokenizer.chat_template
    if CHANNEL not in template or MESSAGE not in template:
        return frozenset()
    ids = [tokenizer.backend.token_to_id(mark) for mark in _MARKS]
    return frozenset(one for one in ids if one is not None) if None not in ids else frozenset()


class HarmonySplitter:
    """Splits the text of one answer into thinking, text and calls.

    What is analysis is thinking; what is for one of the functions is a call; all the rest is text.
    Text without any channel is text too. Messages of one kind are parted by an empty line.
    `are_whole` is false if the arguments of a call are no JSON object.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._state: Literal["header", "body"] = "header"
        self._is_first = True
        self._kind: Kind | Literal["call"] = "content"
        self._written: set[str] = set()
        self._between = ""
        self._arguments = ""
        self.are_whole = True

    def push(self, text: str) -> list[HarmonyPiece]:
        """Take more text and return what is certain; its pieces in order."""
        self._held += text
        return list(self._split())

    def close(self, *, is_cut: bool = False) -> list[HarmonyPiece]:
        """No text follows. is_cut: the model had not come to an end."""
        text, self._held = self._held, ""
        if self._state == "header":
            has_mark = any(mark in text for mark in _MARKS)
            is_text = self._is_first and not has_mark and not is_cut
            return [("content", text)] if is_text and text else []
        pieces = self._text(text)
        self._end_body(is_cut=is_cut)
        return pieces

    def _split(self) -> Iterator[HarmonyPiece]:
        """Each step takes all that is certain, and goes on if another state takes over."""
        before = None
        while (self._state, len(self._held)) != before:
            before = (self._state, len(self._held))
            yield from self._take_header() if self._state == "header" else self._take_body()

    def _take_header(self) -> list[HarmonyPiece]:
        """Up to the mark behind which the message stands."""
        if self._is_first and not _may_be_header(self._held):
            self._begin_body("content")
            return []
        end = self._held.find(MESSAGE)
        if end < 0:
            return []
        header, self._held = self._held[:end], self._held[end + len(MESSAGE) :]
        function = _FUNCTION.search(header)
        if function is not None and function[1] in self._names:
            self._begin_body("call")
            return [CallStart(function[1])]
        channel = _CHANNEL.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        self._begin_body("reasoning" if is_analysis else "content")
        return []

    def _begin_body(self, kind: Kind | Literal["call"]) -> None:
        self._state, self._is_first, self._kind = "body", False, kind
        self._between = _BETWEEN if kind in self._written else ""
        self._arguments = ""

    def _take_body(self) -> list[HarmonyPiece]:
        """Text up to the mark that ends the message, or as much as cannot belong to one."""
        starts = {start: mark for mark in _BODY_ENDS if (start := self._held.find(mark)) >= 0}
        if not starts:
            length = len(self._held) - num_begun(self._held, *_BODY_ENDS)
            text, self._held = self._held[:length], self._held[length:]
            return self._text(text)
        start = min(starts)
        text, self._held = self._held[:start], self._held[start:]
        if starts[start] not in (START, CHANNEL):
            self._held = self._held[len(starts[start]) :]
        pieces = self._text(text)
        self._end_body(is_cut=False)
        return pieces

    def _text(self, text: str) -> list[HarmonyPiece]:
        if not text:
            return []
        if self._kind == "call":
            self._arguments += text
            return [Arguments(text)]
        text, self._between = self._between + text, ""
        self._written.add(self._kind)
        return [(self._kind, text)]

    def _end_body(self, *, is_cut: bool) -> None:
        if self._kind == "call":
            self.are_whole = self.are_whole and not is_cut and _is_object(self._arguments)
        self._state = "header"


def _may_be_header(text: str) -> bool:
    begun = text.lstrip()
    marks = (CHANNEL, START, RECIPIENT)
    return any(mark.startswith(begun) or begun.startswith(mark) for mark in marks)


def _is_object(text: str) -> bool:
    try:
        return isinstance(read_json(text), dict)
    except (ValueError, RecursionError):
        return False
