"""Prompts that overlap a benchmark, so that no drafter is trained on what it is measured with."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, compress
from pathlib import Path

from blockdraft.data.boxed import BOXED_LINE
from blockdraft.data.prompts import Prompt, read_prompts

NGRAM_WORDS = 13
"""Words in a row that two texts share only if one was taken from the other; the length that
GPT-3 used (arXiv 2005.14165, appendix C)."""

TEMPLATE_WORDS = 8
TEMPLATE_PROMPTS = 10
"""Words in a row that so many benchmark prompts share are an instruction around the question, such
as how to write the answer. Fewer may be copies of one question, with and without an instruction."""

_WORD = re.compile(r"\w+")

Words = tuple[str, ...]
Lines = tuple[Words, ...]
"""Apart, because the last words of a question and the first of an instruction are no template."""


def lines_of(text: str) -> Lines:
    """The words of each line, without case and punctuation."""
    return tuple(tuple(_WORD.findall(line)) for line in text.casefold().splitlines())


class Overlap:
    """Finds texts that share `NGRAM_WORDS` words in a row with one of `benchmarks`.

    Words of instructions are taken out of both texts first. A benchmark prompt of fewer words
    overlaps a text of exactly these words. A text that is a benchmark prompt word for word is
    found whatever is taken for an instruction.
    """

    def __init__(self, benchmarks: Iterable[str]) -> None:
        prompts = {lines_of(text) for text in benchmarks}
        self._templates = _shared(prompts)
        self._whole = {_joined(lines) for lines in prompts} - {()}
        questions = {self._question(lines) for lines in prompts} - {()}
        self._short = {words for words in questions if len(words) < NGRAM_WORDS}
        self._ngrams = {n for words in questions for n in _ngrams(words, NGRAM_WORDS)}

    def __contains__(self, text: str) -> bool:
        lines = lines_of(text)
        if _joined(lines) in self._whole:
            return True
        words = self._question(lines)
        return words in self._short or any(n in self._ngrams for n in _ngrams(words, NGRAM_WORDS))

    def _question(self, lines: Lines) -> Words:
        """What is left without the instructions."""
        return _joined(map(self._without_templates, lines))

    def _without_templates(self, words: Words) -> Words:
        is_kept = [True] * len(words)
        for start, ngram in enumerate(_ngrams(words, TEMPLATE_WORDS)):
            if ngram in self._templates:
                is_kept[start : start + TEMPLATE_WORDS] = [False] * TEMPLATE_WORDS
        return tuple(compress(words, is_kept))


def without_overlap(prompts: Iterable[Prompt], exclude: Iterable[Path]) -> list[Prompt]:
    """The prompts of which no turn overlaps a prompt of the files.

    Raises:
        ConfigError: a file is missing or broken.
    """
    excluded = [prompt for path in exclude for prompt in read_prompts(path)]
    benchmarks = Overlap(turn for prompt in excluded for turn in prompt.turns)
    return [prompt for prompt in prompts if not any(turn in benchmarks for turn in prompt.turns)]


def _shared(prompts: Iterable[Lines]) -> set[Words]:
    """Runs of words that occur in many prompts, and those of the line that we add ourselves."""
    counts: Counter[Words] = Counter()
    for lines in prompts:
        counts.update({ngram for words in lines for ngram in _ngrams(words, TEMPLATE_WORDS)})
    many = {ngram for ngram, number in counts.items() if number >= TEMPLATE_PROMPTS}
    return many.union(_ngrams(_joined(lines_of(BOXED_LINE)), TEMPLATE_WORDS))


def _joined(lines: Iterable[Words]) -> Words:
    return tuple(chain.from_iterable(lines))


def _ngrams(words: Words, length: int) -> Iterator[Words]:
    return (words[start : start + length] for start in range(len(words) - length + 1))
