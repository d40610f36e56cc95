"""The thinking section of an answer, parted from the answer while both stream. No torch."""

from typing import Literal

from blockdraft.core.thinking import END_OF_THINKING, START_OF_THINKING
from blockdraft.text.marks import num_begun

Kind = Literal["reasoning", "content"]
Part = tuple[Kind, str]


class ReasoningSplitter:
    """Parts text into reasoning and content; the parts do not depend on how the text is cut.

    A section begins with `<think>` at the very start of the answer, or has begun in the prompt;
    some models write the mark then too. White space around its marks belongs to neither part.

    Args:
        begun: the prompt ends inside the section.
    """

    def __init__(self, *, begun: bool) -> None:
        self._begun = begun
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

    def close(self) -> list[Part]:
        """No text follows: returns what was held back."""
        if self._state == "start":
            self._go_on_unmarked()
        return self._take("reasoning" if self._state == "section" else "content", len(self._held))

    def _begin(self) -> bool:
        """Find out whether there is a section; False if that is open yet."""
        text = self._held.lstrip()
        if len(text) < len(START_OF_THINKING) and START_OF_THINKING.startswith(text):
            return False
        if text.startswith(START_OF_THINKING):
            self._state, self._held = "section", text[len(START_OF_THINKING) :]
        else:
            self._go_on_unmarked()
        return True

    def _go_on_unmarked(self) -> None:
        if self._begun:
            self._state = "section"
        else:
            self._state, self._is_trimming = "content", False

    def _split_section(self) -> list[Part]:
        end = self._held.find(END_OF_THINKING)
        if end < 0:
            return self._take("reasoning", len(self._held) - _num_uncertain(self._held))
        parts = self._take("reasoning", len(self._held[:end].rstrip()))
        self._held = self._held.lstrip()[len(END_OF_THINKING) :]
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


def _num_uncertain(text: str) -> int:
    """Length of the end that may belong to the end mark, with the white space before it."""
    mark = num_begun(text, END_OF_THINKING)
    before = text[: len(text) - mark]
    return mark + len(before) - len(before.rstrip())
