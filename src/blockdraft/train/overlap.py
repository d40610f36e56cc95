"""Prompts that overlap a benchmark, so that no drafter is trained on what it is measured with."""

import re
from collections.abc import Iterable

NGRAM_WORDS = 13
"""Words in a row that two texts share only if one was taken from the other; the length that
GPT-3 used (arXiv 2005.14165, appendix C)."""

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """The words without case and punctuation."""
    return _WORD.findall(text.casefold())


class Overlap:
    """Finds texts that share `NGRAM_WORDS` words in a row with one of `benchmarks`.

    A benchmark prompt of fewer words overlaps a text of exactly these words.
    """

    def __init__(self, benchmarks: Iterable[str]) -> None:
        self._ngrams: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()
        for text in benchmarks:
            words = words_of(text)
            if len(words) < NGRAM_WORDS:
                self._short.add(tuple(words))
            self._ngrams.update(_ngrams(words))

    def __contains__(self, text: str) -> bool:
        words = words_of(text)
        return tuple(words) in self._short or any(n in self._ngrams for n in _ngrams(words))


def _ngrams(words: list[str]) -> Iterable[tuple[str, ...]]:
    for start in range(len(words) - NGRAM_WORDS + 1):
        yield tuple(words[start : start + NGRAM_WORDS])
