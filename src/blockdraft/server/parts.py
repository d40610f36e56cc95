"""The parts of one choice in the order in which the model wrote them: thinking, text, calls."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from blockdraft.core.thinking import THINK, Tags
from blockdraft.server.calls import Call, CallFinder
from blockdraft.text.reasoning import Part, ReasoningSplitter

AnswerPart = Part | Call


class AnswerParser(Protocol):
    """Turns the text of one choice into parts while it streams; how the text is cut is no matter.

    `can_be_run`: there are calls, and the arguments of each are an object of JSON.
    """

    @property
    def can_be_run(self) -> bool:
        """See above."""
        ...

    def feed(self, text: str) -> list[AnswerPart]:
        """Take more text; returns what is certain by now."""
        ...

    def close(self, last_token: int) -> list[AnswerPart]:
        """No text follows `last_token`: returns what was held back."""
        ...


def join_parts(parts: list[AnswerPart], more: Iterable[AnswerPart]) -> None:
    """Append parts; neighbors of one kind, or of one call, become one."""
    for part in more:
        last = parts[-1] if parts else None
        if isinstance(part, Call):
            if isinstance(last, Call) and last.index == part.index:
                parts[-1] = replace(last, arguments=last.arguments + part.arguments)
                continue
        elif isinstance(last, tuple) and last[0] == part[0]:
            parts[-1] = (part[0], last[1] + part[1])
            continue
        parts.append(part)


class MarkedParser:
    """Thinking between marks, then text with calls in it.

    Args:
        thinks: the section has begun in the prompt; None if the model knows no thinking.
        finder: finds the calls, if there are tools.
        tags: the marks around thinking.
    """

    def __init__(
        self,
        thinks: bool | None = None,
        finder: CallFinder | None = None,
        tags: Tags = THINK,
    ) -> None:
        calls = () if finder is None else finder.begins
        self._splitter = (
            None if thinks is None else ReasoningSplitter(begun=thinks, calls=calls, tags=tags)
        )
        self._finder = finder

    @property
    def can_be_run(self) -> bool:
        """See AnswerParser."""
        return self._finder is not None and self._finder.can_be_run

    def feed(self, text: str) -> list[AnswerPart]:
        """See AnswerParser."""
        if self._splitter is None:
            return self._with_calls([("content", text)] if text else [])
        return self._with_calls(self._splitter.feed(text))

    def close(self, last_token: int) -> list[AnswerPart]:
        """See AnswerParser."""
        is_cut = self._finder is not None and self._finder.is_cut(last_token)
        rest = [] if self._splitter is None else self._splitter.close(is_cut=is_cut)
        parts = self._with_calls(rest)
        if self._finder is not None:
            parts += _as_content(self._finder.close(last_token))
        return parts

    def _with_calls(self, parts: Iterable[Part]) -> list[AnswerPart]:
        found: list[AnswerPart] = []
        for part in parts:
            if part[0] == "content" and self._finder is not None:
                found += _as_content(self._finder.feed(part[1]))
            else:
                found.append(part)
        return found


def _as_content(found: Iterable[str | Call]) -> list[AnswerPart]:
    return [("content", one) if isinstance(one, str) else one for one in found]
