"""Tool calls with each argument between tags, as Qwen3-Coder, GLM-4.5 and MiniMax-M2 write them.

    <tool_call>                     <tool_call>look
    <function=look>                 <arg_key>name</arg_key>
    <parameter=name>                <arg_value>abc</arg_value>
    abc                             </tool_call>
    </parameter>
    </function>                     <minimax:tool_call>
    </tool_call>                    <invoke name="look">
                                    <parameter name="name">abc</parameter>
                                    </invoke>
                                    </minimax:tool_call>

A text stands there as it is, everything else as JSON; which of the two, the function's schema says.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from blockdraft.text.argument_values import argument_types, from_text
from blockdraft.text.call_syntax import quoted
from blockdraft.text.marks import num_begun
from blockdraft.text.tool_calls import Arguments, CallParser, CallStart, Piece
from blockdraft.text.tools import Tool

_LONGEST_TAG = 512
"""Letters in which the marks around a parameter's name must stand."""
_NAME = re.compile(r"[A-Za-z0-9_-]*")
_JSON_WITH_STRINGS = re.compile(r'\s*+["\[{]')
_REST_OF_JSON_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\.)*+')


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands in a call.

    function, name_end: around the name; `end_of_function` is what closes it. Empty where the tag
    around a call is enough. parameter, key_end, value: around the key of an argument.
    end_of_parameter: what closes its value. margin: what stands on both sides of a value.
    begin, end: around a call, or around several.
    """

    function: str
    name_end: str
    end_of_function: str
    parameter: str
    key_end: str
    value: str
    end_of_parameter: str
    margin: str
    begin: str = "<tool_call>"
    end: str = "</tool_call>"


QWEN_TAGS = Tags("<function=", ">", "</function>", "<parameter=", "", ">", "</parameter>", "\n")
GLM_TAGS = Tags("", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "")
MINIMAX_TAGS = Tags(
    *('<invoke name="', '">', "</invoke>", '<parameter name="', "", '">', "</parameter>", ""),
    *("<minimax:tool_call>", "</minimax:tool_call>"),
)

_STRING = frozenset({"string"})


class XmlCallParser(CallParser):
    """Splits the text of one answer into text and calls, as ToolCallParser does.

    A call is one from the tag with the name of a known function on, and the tag around it may be
    left out, as some models do. If the name has no tag of its own, a parameter or the call's end
    must follow it. Arguments become a JSON object while they are written. In a call, what is no
    parameter is left out. `are_whole` is false where the answer ends in one.
    """

    def __init__(self, tools: Sequence[Tool], tags: Tags = QWEN_TAGS) -> None:
        super().__init__()
        self._tags = tags
        self._tools = {tool.name: tool for tool in tools}
        self._state: Literal["text", "function", "parameter", "tail"] = "text"
        self._steps = {
            "text": self._take_text,
            "function": self._take_function,
            "parameter": self._take_parameter,
            "tail": self._take_tail,
        }
        self._tool: Tool | None = None
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._is_begun = False
        """The first letter of the parameter was seen: a newline before it is no part of it."""
        self._num_scanned = 0
        """Letters of a value's start in which what looks like its end is none."""
        self._in_string = False
        """The scanned letters end within a text of JSON."""

    def close(self, *, is_cut: bool = False) -> list[Piece]:
        """See CallParser.close."""
        if self._state in ("function", "parameter"):
            self.are_whole = False
        if self._state != "text":
            return []
        text = self._held
        if is_cut:
            start = self._find_head()[0]
            # A single letter is too little to tell.
            text = text[:start] if len(text) - start > 1 else text
        if self._is_behind_call and not text.strip():
            return []
        return [text] if text else []

    def _take_text(self) -> Iterator[Piece]:
        """Text before the next call, or as much of it as cannot lead up to one."""
        start, end, name = self._find_head()
        text = self._held[:start]
        if self._is_behind_call and not text.strip():
            if name is None:
                return  # not yet certain: a call may follow, or the end
        elif text:
            self._is_behind_call = False
            yield text
        if name is None:
            self._held = self._held[start:]
            return
        self._held = self._held[end:]
        self._tool, self._num_parameters = self._tools[name], 0
        self._state = "function"
        yield CallStart(name)
        yield Arguments("{")

    def _find_head(self) -> tuple[int, int, str | None]:
        """Where the first call begins, where its tag ends, and its name.

        Without a name, what is held may become a call from there on.
        """
        start = self._held.find("<")
        while start >= 0:
            found = self._head_at(start)
            if found is not None:
                return (start, *found)
            start = self._held.find("<", start + 1)
        return len(self._held), len(self._held), None

    def _head_at(self, start: int) -> tuple[int, str | None] | None:
        """The end and the name of a head; no name if it may become one; None if it cannot."""
        held, open_end, function = self._held, len(self._held), self._tags.function
        if held.startswith(self._tags.begin, start):
            start = open_end - len(held[start + len(self._tags.begin) :].lstrip())
        elif self._tags.begin.startswith(held[start:]):
            return open_end, None
        elif not function:
            return None
        if function.startswith(held[start:]):
            return open_end, None
        found = _NAME.match(held, start + len(function))
        if found is None or not held.startswith(function, start):
            return None
        name, end = found[0], found.end()
        if end == open_end:
            return (open_end, None) if any(n.startswith(name) for n in self._tools) else None
        if name not in self._tools:
            return None
        if name_end := self._tags.name_end:
            if held.startswith(name_end, end):
                return end, name
            return (open_end, None) if name_end.startswith(held[end:]) else None
        behind, follow = held[end:].lstrip(), (self._tags.parameter, self._tags.end)
        if behind.startswith(follow):
            return end, name
        return (open_end, None) if any(mark.startswith(behind) for mark in follow) else None

    def _take_function(self) -> Iterator[Piece]:
        """What stands between parameters: the tag of the next one, or the end."""
        parameter, end_of_function = self._tags.parameter, self._tags.end_of_function
        while (start := self._held.find("<")) >= 0:
            self._held = self._held[start:]
            for mark in (end_of_function, self._tags.end):
                if mark and self._held.startswith(mark):
                    self._held = self._held[len(mark) :] if mark != self._tags.end else self._held
                    self._state = "tail"
                    yield Arguments("}")
                    return
            if self._held.startswith(parameter):
                end = self._held.find(self._tags.value, 0, _LONGEST_TAG)
                if end >= 0:
                    key = self._held[len(parameter) : end].partition("</")[0]
                    yield self._begin_parameter(key)
                    self._held = self._held[end + len(self._tags.value) :]
                    return
                if len(self._held) < _LONGEST_TAG:
                    return
            elif any(
                mark.startswith(self._held) for mark in (parameter, end_of_function, self._tags.end)
            ):
                return
            self._held = self._held[1:]
        self._held = ""

    def _begin_parameter(self, name: str) -> Arguments:
        assert self._tool is not None
        self._types = argument_types(self._tool.parameters, name)
        self._state, self._is_begun = "parameter", False
        self._num_scanned, self._in_string = 0, False
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        quote = '"' if self._types == _STRING else ""
        return Arguments(f"{comma}{quoted(name)}: {quote}")

    def _take_parameter(self) -> Iterator[Piece]:
        """A value up to its end; a text is handed out while it is written."""
        if not self._is_begun:
            if not self._held:
                return
            self._held = self._held.removeprefix(self._tags.margin)
            self._is_begun = True
        margin, end_mark = self._tags.margin, self._tags.end_of_parameter
        end = self._find_end_of_value()
        is_text = self._types == _STRING
        if end >= 0:
            value = self._held[:end].removesuffix(margin)
            self._held = self._held[end + len(end_mark) :]
            self._state = "function"
            yield Arguments(f'{quoted(value)[1:-1]}"' if is_text else from_text(value, self._types))
        elif is_text:
            # The newline before the end is no part of the value.
            length = len(self._held) - num_begun(self._held, f"{margin}{end_mark}", end_mark)
            value, self._held = self._held[:length], self._held[length:]
            if value:
                yield Arguments(quoted(value)[1:-1])

    def _find_end_of_value(self) -> int:
        """Where what closes a value begins, or -1; within a text of JSON it closes nothing."""
        mark = self._tags.end_of_parameter
        end = self._held.find(mark, self._num_scanned)
        if "string" in self._types or not _JSON_WITH_STRINGS.match(self._held):
            return end
        while end >= 0 and self._is_in_string(end):
            end = self._held.find(mark, end + 1)
        return end

    def _is_in_string(self, end: int) -> bool:
        """Whether a text of JSON goes on at `end`; each letter is scanned once.

        A control character ends a text for good: then the value is no JSON.
        """
        held = self._held
        while self._num_scanned < end:
            if self._in_string:
                found = _REST_OF_JSON_STRING.match(held, self._num_scanned, end)
                quote = found.end() if found else end
                if quote < end and held[quote] != '"':
                    return False
                self._in_string = quote == end
            else:
                quote = held.find('"', self._num_scanned, end)
                self._in_string = quote >= 0
            self._num_scanned = end if quote < 0 else min(quote + 1, end)
        return self._in_string

    def _take_tail(self) -> Iterator[Piece]:
        """What closes a call, or where text goes on without that."""
        rest = self._held.lstrip()
        if rest != self._tags.end and self._tags.end.startswith(rest):
            return  # not yet certain
        if rest.startswith(self._tags.end):
            self._held = rest[len(self._tags.end) :]
        self._state, self._is_behind_call = "text", True
        yield from ()
