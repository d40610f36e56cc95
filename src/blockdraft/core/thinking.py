"""A limit on the thinking section of an answer: a function of its tokens, and of nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

Tags = tuple[str, str]
"""The texts of the marks around a section of thinking."""
THINK: Tags = ("<think>", "</think>")
ALL_TAGS: tuple[Tags, ...] = (THINK, ("[THINK]", "[/THINK]"))
"""Of nearly all models, and of Mistral's (Magistral)."""
_MAX_BEFORE = 2
"""Tokens, such as white space, that may stand before the mark at the start of an answer."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """Token ids of the marks around a section of thinking."""

    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """After `budget` tokens of thinking the end mark follows.

    begun: the section has begun in the prompt. Otherwise it begins with the mark at the start of
    the answer, or there is none. Marks do not count.
    """

    marks: ThinkingMarks
    budget: int
    begun: bool

    def may_force(self, num_tokens: int) -> bool:
        """False where no token is forced behind so many, whatever they are: nearly everywhere."""
        most_before = _MAX_BEFORE + len(self.marks.start)
        return 0 <= num_tokens - self.budget < most_before + len(self.marks.end)

    def forced(self, tokens: Sequence[int]) -> int | None:
        """The token that must follow the answer so far; None if any may."""
        end, first = self.marks.end, self._first(tokens)
        if first is None or not 0 <= len(tokens) - first - self.budget < len(end):
            return None
        thought, behind = tokens[first:][: self.budget], tokens[first + self.budget :]
        if _find(thought, end) is not None:
            return None
        # The model may have begun the mark itself.
        begun = next(n for n in range(len(end) - 1, -1, -1) if _ends_with(thought, end[:n]))
        rest = end[begun:]
        is_under_way = len(behind) < len(rest) and tuple(behind) == rest[: len(behind)]
        return rest[len(behind)] if is_under_way else None

    def _first(self, tokens: Sequence[int]) -> int | None:
        """Where the thinking begins in the answer."""
        if self.begun:
            return 0
        start = self.marks.start
        found = _find(tokens[: len(start) + _MAX_BEFORE], start)
        return None if found is None else found + len(start)


def _find(tokens: Sequence[int], mark: tuple[int, ...]) -> int | None:
    places = range(len(tokens) - len(mark) + 1)
    return next((i for i in places if tuple(tokens[i : i + len(mark)]) == mark), None)


def _ends_with(tokens: Sequence[int], mark: tuple[int, ...]) -> bool:
    return not mark or tuple(tokens[-len(mark) :]) == mark
