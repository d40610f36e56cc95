"""The kernels' search of n-grams against the plain one."""

import ctypes
import gc
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blockdraft.core.plan import Tree
from blockdraft.kernels.backends import native_ngrams
from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.ngrams import NativeNGrams
from blockdraft.kernels.cpu.structs import Search
from blockdraft.kernels.ngram_interface import (
    NGramPaths,
    NGramQuery,
    NGramRules,
    NGramSearch,
    TokenNoise,
)
from blockdraft.speculate.drafters import ngram_search as module
from blockdraft.speculate.drafters.guesses import DEPTH
from blockdraft.speculate.drafters.ngram_search import PlainSearch, ngram_search, rules_for
from blockdraft.speculate.drafters.ngram_table import LONGEST, NGramTable
from blockdraft.speculate.sampler.noise import noise_at
from blockdraft.speculate.sampler.philox import Stream

EMPTY = rules_for(NGramTable([]))

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels on this machine")


def text_of(draw: random.Random, length: int, num_kinds: int, spread: int = 1) -> list[int]:
    """Each token often follows from the two before it; they lie `spread` apart."""
    text = [draw.randrange(num_kinds) for _ in range(2)]
    while len(text) < length:
        usual = (3 * text[-1] + text[-2]) % num_kinds
        text.append(usual if draw.random() < 0.6 else draw.randrange(num_kinds))
    return [spread * token for token in text]


def kernels() -> Library:
    found = library()
    assert found is not None
    return found


def rules_of(table: NGramTable, **changed: Any) -> NGramRules:
    return replace(rules_for(table), **changed)


def noise_with_large(
    draw: random.Random, known: list[int], position: int, temperature: float
) -> TokenNoise:
    """Half of the tokens that the text knows, and two others, count as those of large noise."""
    stream = Stream(2**63 + position, 1, position)
    ids = np.array(sorted({token for token in known if draw.random() < 0.5} | {1, 77_777}))
    noise = noise_at([stream], [len(ids)], ids)
    return TokenNoise(stream.seed, 1, position, temperature, (ids, noise))


def native(table: NGramTable, **changed: Any) -> NGramSearch:
    search = native_ngrams(rules_of(table, **changed))
    assert search is not None
    return search


def paths(search: NGramSearch, *query: Any) -> NGramPaths:
    """Of one query."""
    (found,) = search.paths([NGramQuery(*query, guess_depth=DEPTH)])
    return found


def assert_same(found: NGramPaths, expected: NGramPaths) -> None:
    assert found.tokens == expected.tokens
    assert found.parents == expected.parents
    assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-9)


@pytest.mark.one_in(2)
@needs_kernels
@pytest.mark.parametrize("temperature", [None, 0.3, 1.0, 50.0, 1e300])
@pytest.mark.parametrize(("num_kinds", "spread"), [(2, 1), (6, 1), (6, 20_011)])
@pytest.mark.parametrize("has_table", [True, False])
def test_kernels_find_the_same_paths(
    temperature: float | None, num_kinds: int, spread: int, has_table: bool
) -> None:
    draw = random.Random(num_kinds)
    texts = [(text_of(draw, 60, num_kinds, spread), 3) for _ in range(40 * has_table)]
    table = NGramTable.count(texts) if has_table else NGramTable([])
    own, plain = native(table), PlainSearch(table)
    known = [spread * token for token in range(num_kinds)]
    num_found = num_deep = 0
    for key in range(6):
        # Some are shorter than a context, and one is longer than what is remembered of a context.
        text = text_of(draw, (2, 3, 4, 30, 200, 900)[key], num_kinds, spread)[key == 0 :]
        for _ in range(12):
            noise = None
            if temperature is not None:
                noise = noise_with_large(draw, known, len(text), temperature)
            for num_nodes, depth in ((1, 8), (8, 8), (5, 2)):
                found = paths(own, key, text, noise, num_nodes, depth)
                assert_same(found, paths(plain, key, text, noise, num_nodes, depth))
                assert len(found.tokens) <= num_nodes
                num_found += len(found.tokens)
                num_deep += sum(parent >= 0 for parent in found.parents)
            text += text_of(draw, draw.randint(1, 5), num_kinds, spread)
    assert num_found > 200
    assert num_deep > 50


@needs_kernels
def test_texts_are_searched_together_as_alone() -> None:
    draw = random.Random(3)
    table = NGramTable.count([(text_of(draw, 60, 6), 3) for _ in range(40)])
    alone, together = native(table), native(table)
    texts = [text_of(draw, 10 + 7 * key, 6) for key in range(9)]
    assert together.paths([]) == []
    for num_nodes in (1, 8, 5):
        noises = [None, *(noise_with_large(draw, text, len(text), 0.8) for text in texts[1:])]
        queries = [
            NGramQuery(key, text, noise, num_nodes, 4)
            for key, (text, noise) in enumerate(zip(texts, noises, strict=True))
        ]
        assert together.paths(queries) == [alone.paths([query])[0] for query in queries]
        for text in texts:
            text += text_of(draw, draw.randint(1, 5), 6)


@needs_kernels
def test_where_a_query_is_refused_the_others_are_counted_once() -> None:
    draw = random.Random(5)
    refusing, sound = NativeNGrams(kernels(), EMPTY), NativeNGrams(kernels(), EMPTY)
    text = text_of(draw, 40, 4)
    odd = TokenNoise(0, 0, 40, 1.0, (np.zeros(2, np.int32), np.zeros(2)))
    with pytest.raises(ValueError, match="2 int32 tokens"):
        refusing.paths([NGramQuery(0, text, None, 8, 4), NGramQuery(1, text, odd, 8, 4)])
    found = paths(refusing, 0, text, None, 8, 4)
    assert found.tokens
    assert found == paths(sound, 0, text, None, 8, 4)


def test_a_text_that_goes_round_in_circles_is_followed() -> None:
    """What is as good as certain counts as no more, though sums of shares round."""
    period = [3, 0, 2, 4]
    table = NGramTable.count([(period * 20, 3)] * 3)
    for search in (ngram_search(table), PlainSearch(table)):
        for num in (20, 200, 400):
            found = paths(search, num, (period * 100)[:num], None, 8, 8)
            assert Tree(found.tokens, found.parents).depths == tuple(range(1, 9))
            assert found.tokens == tuple(period * 2)
            assert found.probabilities[0] <= 1.0


@needs_kernels
def test_where_memory_ends_for_one_text_the_others_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks does so again, row by row."""
    draw = random.Random(4)
    failing, sound = NativeNGrams(kernels(), EMPTY), NativeNGrams(kernels(), EMPTY)
    texts = [text_of(draw, 30 + key, 4) for key in range(3)]
    queries = [NGramQuery(key, text, None, 8, 4) for key, text in enumerate(texts)]
    search = failing._kernels.ngrams

    def fails_once(rules: int, searches: int, *more: int) -> None:
        search(rules, searches, *more)
        second = ctypes.c_void_p.from_address(searches + 8).value
        assert second is not None
        Search.from_address(second).num_found = -1
        monkeypatch.undo()

    monkeypatch.setattr(failing._kernels, "ngrams", fails_once)
    with pytest.raises(MemoryError, match="no memory is left"):
        failing.paths(queries)
    expected = sound.paths(queries)
    assert [failing.paths([query])[0] for query in queries] == expected


@needs_kernels
def test_of_a_long_text_the_end_is_counted_and_texts_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = NGramTable([])
    monkeypatch.setattr("blockdraft.speculate.drafters.own_text.MAX_READ", 40)
    own, plain = native(table, max_read=40), PlainSearch(table)
    text = [1, 2, *text_of(random.Random(1), 60, 4), 9, 9, 1]
    for _ in range(2):
        assert_same(paths(own, 0, text, None, 8, 8), paths(plain, 0, text, None, 8, 8))
        text += [1, 2, 9]
    before = paths(own, 0, [1, 2, 3, 1], None, 8, 8)
    own.close(0)
    own.close(7)
    after = paths(own, 0, [1, 2, 3, 1], None, 8, 8)
    assert after.tokens == (2, 3, 1)[: len(after.tokens)] != before.tokens
    del own
    gc.collect()  # what was counted is given back, once


@needs_kernels
def test_what_does_not_fit_the_kernels_is_refused() -> None:
    table = NGramTable.count([(text_of(random.Random(0), 60, 6), 3)])
    with pytest.raises(ValueError, match="2 lengths of contexts, 3 are known"):
        native(NGramTable(table.parts[:2]))
    with pytest.raises(ValueError, match="probabilities of 3 levels, not 256"):
        native(table, probabilities=np.ones(3))
    last = table.parts[2]
    for changed in (
        {"tokens": last.tokens[:-1]},
        {"levels": last.levels[:-1]},
        {"rests": last.rests[:-1]},
        {"starts": last.starts[:-1]},
        {"starts": last.starts[::-1]},
        {"starts": last.starts + 1},
    ):
        with pytest.raises(ValueError, match="contexts do not fit"):
            native(NGramTable([*table.parts[:2], replace(last, **changed)]))
    search = native(table)
    odd = TokenNoise(1, 0, 3, 1.0, (np.arange(3), np.zeros(2)))
    with pytest.raises(ValueError, match="3 int64 tokens, 2 float64"):
        paths(search, 0, [1, 2, 3], odd, 4, 4)


def test_without_kernels_the_plain_search_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native_ngrams", lambda rules, layers: None)
    assert isinstance(ngram_search(NGramTable([])), PlainSearch)
    assert len(module.BESIDE_TABLE.priors) == LONGEST
