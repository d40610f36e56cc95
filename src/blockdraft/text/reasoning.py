"""The thinking section of an answer, parted from the answer while both stream. No torch."""

from collections.abc import Sequence
from typing import Literal

from blockdraft.core.thinking import THINK, Tags
from blockdraft.text.marks import num_begun

Kind = Literal["reasoning", "content"]
Part = tuple[Kind, str]


class ReasoningSplitter:
    """Parts text into reasoning and content; the parts do not depend on how the text is cut.

    A section begins with its mark at the very start of the answer, or has begun in the prompt;
    some models write the mark then too. White space around its marks belongs to neither part.

    Args:
        begun: the prompt ends inside the section.
        calls: marks, each with what follows it behind white space, where a model begins a call.
            Some (Qwen3.5) call without an end of their thinking: it ends there if no end mark
            follows, so what stands behind is held back.
        tags: the marks around the section.
    """

    def __init__(
        self, *, begun: bool, calls: Sequence[tuple[str, str]] = (), tags: Tags = THINK
    ) -> None:
        self._begun, self._calls = begun, calls
        self._start, self._end = tags
        self._marks = (self._end, *(mark for mark, _ in calls))
        self._state: Literal["start", "section", "content"] = "start"
        self._held = ""
        self._is_trimming = True
        """What comes next follows a mark, so white space at its start is left out."""

    def feed(self, text: str) -> list[Part]:
        """Take more text; returns what is certain by now."""
        self._held += text
        if self._state == "start" and not self._begin():
            return []
        parts = self._split_section() if self._state == "section" else []
        if self._state == "content":
            parts += self._take("content", len(self._held))
        return parts

    def close(self, *, is_cut: bool = False) -> list[Part]:
        """No text follows: returns what was held back. is_cut: the model had not come to an end."""
        if self._state == "start":
            self._go_on_unmarked()
        parts: list[Part] = []
        if self._state == "section" and not is_cut and (call := self._find_call()) is not None:
            parts = self._take("reasoning", len(self._held[:call].rstrip()))
            self._state, self._is_trimming = "content", True
        kind: Kind = "reasoning" if self._state == "section" else "content"
        return parts + self._take(kind, len(self._held))

    def _begin(self) -> bool:
        """Find out whether there is a section; False if that is open yet."""
        text = self._held.lstrip()
        if len(text) < len(self._start) and self._start.startswith(text):
            return False
        if text.startswith(self._start):
            self._state, self._held = "section", text[len(self._start) :]
        else:
            self._go_on_unmarked()
        return True

    def _go_on_unmarked(self) -> None:
        if self._begun:
            self._state = "section"
        else:
            self._state, self._is_trimming = "content", False

    def _split_section(self) -> list[Part]:
        end = self._held.find(self._end)
        if end < 0:
            call = self._find_call(or_begun=True)
            held = self._held if call is None else self._held[:call]
            return self._take("reasoning", len(held) - self._num_uncertain(held))
        parts = self._take("reasoning", len(self._held[:end].rstrip()))
        self._held = self._held.lstrip()[len(self._end) :]
        self._state, self._is_trimming = "content", True
        return parts

    def _take(self, kind: Kind, length: int) -> list[Part]:
        text, self._held = self._held[:length], self._held[length:]
        if self._is_trimming:
            text = text.lstrip()
        if not text:
            return []
        self._is_trimming = False
        return [(kind, text)]

    def _find_call(self, *, or_begun: bool = False) -> int | None:
        """Where in what is held a call begins, or may begin where the text ends."""
        found = (self._find(*call, or_begun=or_begun) for call in self._calls)
        return min((start for start in found if start is not None), default=None)

    def _find(self, mark: str, opener: str, *, or_begun: bool) -> int | None:
        start = self._held.find(mark)
        while start >= 0:
            behind = self._held[start + len(mark) :].lstrip()
            if behind.startswith(opener) or (or_begun and opener.startswith(behind)):
                return start
            start = self._held.find(mark, start + 1)
        return None

    def _num_uncertain(self, text: str) -> int:
        """Length of the end that may belong to a mark, with the white space before it."""
        mark = num_begun(text, *self._marks)
        before = text[: len(text) - mark]
        return mark + len(before) - len(before.rstrip())
