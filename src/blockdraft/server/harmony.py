"""Answers in the format of gpt-oss as parts. No torch."""

from collections.abc import Set

from blockdraft.server.calls import CallNumbers
from blockdraft.server.parts import AnswerPart
from blockdraft.server.shape import Toolbox
from blockdraft.text.harmony import HarmonyPiece, HarmonySplitter


class HarmonyParser:
    """An AnswerParser.

    Args:
        toolbox: the tools, and which of them may be called, if there are any.
        eos_ids: tokens with which an answer ends by itself.
    """

    def __init__(self, toolbox: Toolbox | None, eos_ids: Set[int]) -> None:
        tools = () if toolbox is None else toolbox.callable_tools
        self._splitter = HarmonySplitter([tool.name for tool in tools])
        self._numbers = CallNumbers()
        self._eos_ids = eos_ids

    @property
    def can_be_run(self) -> bool:
        """See AnswerParser."""
        return self._numbers.num_calls > 0 and self._splitter.are_whole

    def feed(self, text: str) -> list[AnswerPart]:
        """See AnswerParser."""
        return self._numbered(self._splitter.push(text))

    def close(self, last_token: int) -> list[AnswerPart]:
        """See AnswerParser."""
        return self._numbered(self._splitter.close(is_cut=last_token not in self._eos_ids))

    def _numbered(self, pieces: list[HarmonyPiece]) -> list[AnswerPart]:
        return [p if isinstance(p, tuple) else self._numbers.call(p) for p in pieces]
