"""Tables of n-grams: counted against a plain count, kept in a file, and drafted from."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from blockdraft.core.errors import ModelError
from blockdraft.core.plan import ROOT, Proposal
from blockdraft.core.sequence import Row, Sequence
from blockdraft.speculate.drafters.ngram import NGramDrafter
from blockdraft.speculate.drafters.ngram_search import LEAST_PROBABILITY
from blockdraft.speculate.drafters.ngram_table import HEAD, LONGEST, NGRAMS_NAME, NGramTable
from blockdraft.speculate.drafters.slots import noise_of
from tests.samples import make_sample

VOCAB_SIZE = 80_000

Texts = list[tuple[list[int], int]]


def texts_of(seed: int, num_kinds: int, num_texts: int = 30) -> Texts:
    """Each token usually follows from the two before it."""
    draw, texts = random.Random(seed), []
    for _ in range(num_texts):
        text = [draw.randrange(num_kinds) for _ in range(5)]
        while len(text) < 60:
            usual = (3 * text[-1] + text[-2]) % num_kinds
            text.append(usual if draw.random() < 0.6 else draw.randrange(num_kinds))
        texts.append((text, draw.randint(0, 8)))
    return texts


Counts = dict[tuple[int, ...], Counter[int]]


def counted(texts: Texts) -> Counts:
    """What followed each context, in its plainest form; behind the empty one every token."""
    counts: Counts = {(): Counter()}
    for text, num_prompt in texts:
        for place in range(num_prompt, len(text)):
            counts[()][text[place]] += 1
            for length in range(1, min(LONGEST, place) + 1):
                # Of a prompt its last tokens are contexts.
                if place - length >= max(0, num_prompt - LONGEST):
                    context = tuple(text[place - length : place])
                    counts.setdefault(context, Counter())[text[place]] += 1
    return counts


def expected_after(counts: Counts, ending: tuple[int, ...]) -> dict[int, float]:
    """All successors, those of longer contexts first."""
    found: dict[int, float] = {}
    mass = 1.0
    for begin in range(len(ending)):
        own = counts.get(ending[begin:], Counter())
        total = own.total() + len(own)
        kept = {
            token: num / total for token, num in own.items() if num > 1 or begin == len(ending) - 1
        }
        for token, share in kept.items():
            found[token] = found.get(token, 0.0) + mass * share
        mass *= 1 - sum(kept.values())
    total = counts[()].total()
    for token, num in counts[()].items():
        found[token] = found.get(token, 0.0) + mass * num / total
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_table_is_what_a_plain_count_gives(seed: int) -> None:
    texts = texts_of(seed, (3, 7, 20, 70_000)[seed])
    table, counts = NGramTable.count(texts), counted(texts)
    assert 0 < table.num_contexts <= len(counts)
    others = list(counts[()])[:40]
    for text, _ in texts[:6]:
        for end in range(1, len(text)):
            ending = tuple(text[max(0, end - LONGEST) : end])
            found, expected = table.after(text[:end], others), expected_after(counts, ending)
            # A level of a byte may be half a level wrong, and there are four of them.
            close = {token: pytest.approx(expected[token], rel=0.09, abs=1e-4) for token in found}
            assert found == close
            assert found.keys() >= set(others)
            best = sorted(expected, key=lambda token: -expected[token])[:HEAD]
            assert sum(found.get(token, 0.0) for token in best) >= 0.9 * sum(
                expected[token] for token in best if expected[token] > 0.01
            )


def test_texts_do_not_run_into_each_other_and_prompts_are_not_learned() -> None:
    table = NGramTable.count([([1, 2, 3, 4], 2), ([5, 6], 1)] * 3)
    assert list(table.after([2])) == [3]
    assert list(table.after([9, 9, 5])) == [6]
    assert table.after([1]) == {}
    assert table.after([4]) == {}
    assert table.after([]) == {}
    assert list(table.after([4], [6, 1, 99])) == [6, 1]  # whatever stands before
    empty = NGramTable.count([])
    assert empty.num_contexts == 0
    assert empty.after([1, 2, 3], [1]) == {}


@pytest.mark.parametrize("num_kinds", [9, 70_000])
def test_a_table_is_read_as_it_was_written(tmp_path: Path, num_kinds: int) -> None:
    texts = texts_of(1, num_kinds)
    table = NGramTable.count(texts)
    assert NGramTable.load(tmp_path) is None
    table.save(tmp_path)
    again = NGramTable.load(tmp_path)
    assert again is not None
    for text, _ in texts:
        for place in range(len(text)):
            assert again.after(text[:place], text) == table.after(text[:place], text)


def test_a_damaged_table_is_refused_with_the_remedy(tmp_path: Path) -> None:
    NGramTable.count(texts_of(1, 9)).save(tmp_path)
    path = tmp_path / NGRAMS_NAME
    arrays = load_file(path)
    for damaged in (
        {name: value for name, value in arrays.items() if name != "2.keys"},
        arrays | {"2.keys": arrays["2.keys"][:-1]},
        arrays | {"3.levels": arrays["3.levels"][:-1]},
        {name: value for name, value in arrays.items() if name != "frequencies"},
        arrays | {"frequencies": arrays["frequencies"][:-1]},
        arrays | {"1.tokens": -arrays["1.tokens"].astype(np.int64)},
        arrays | {"1.counts": opposed(arrays["1.counts"])},
        arrays | {"1.keys": arrays["1.keys"][:, None]},
    ):
        save_file({name: np.ascontiguousarray(value) for name, value in damaged.items()}, path)
        with pytest.raises(ModelError, match=r"is not a table of n-grams .* or delete it"):
            NGramTable.load(tmp_path)
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match="is not a table of n-grams"):
        NGramTable.load(tmp_path)


def opposed(counts: NDArray[np.uint16]) -> NDArray[np.int64]:
    """With the same sum, but far beyond the end in between."""
    found = counts.astype(np.int64)
    found[0] += 10**12
    found[1] -= 10**12
    return found


def test_a_table_of_a_target_with_more_tokens_is_refused(tmp_path: Path) -> None:
    table = NGramTable.count(texts_of(1, 9))
    table.save(tmp_path)
    num_tokens = len(table.frequencies)
    assert NGramTable.load(tmp_path, num_tokens) is not None
    with pytest.raises(ModelError, match=rf"of {num_tokens} tokens; the target has 3\).*delete it"):
        NGramTable.load(tmp_path, 3)


def sample_of(token_ids: list[int], seed: int = 11, **params: Any) -> Sequence:
    return make_sample(token_ids, seed=seed, **params)


def propose(table: NGramTable, token_ids: list[int], num: int, depth: int, **params: Any) -> Any:
    row = Row(sample_of(token_ids, **params), token_ids[-1:], num, max_depth=depth)
    (proposal,) = NGramDrafter(table, VOCAB_SIZE).propose([row])
    return proposal


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    tree = proposal.tree
    return {tuple(tree.tokens[one] for one in tree.path(node)) for node in range(len(proposal))}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_most_probable_paths_are_proposed(temperature: float) -> None:
    texts = texts_of(2, 6)
    table = NGramTable.count(texts)
    for text, _ in texts[:8]:
        for num, depth in ((1, 8), (5, 8), (8, 2), (8, 1)):
            proposal = propose(table, text, num, depth, temperature=temperature)
            assert 0 < len(proposal) <= num
            assert max(proposal.tree.depths) <= depth
            assert list(proposal.probabilities) == sorted(proposal.probabilities, reverse=True)
            assert min(proposal.probabilities) >= LEAST_PROBABILITY
            assert set(proposal.sources) == {"ngram"}
    # All others are less probable.
    few = propose(table, text, 3, 8)
    more = propose(table, text, 6, 8)
    assert paths(few) < paths(more)
    assert few.probabilities == more.probabilities[:3]


def test_a_sampled_request_is_drafted_with_its_noise() -> None:
    """Where the table is right, the noise says which token the target chooses."""
    shares = {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}
    texts = [([7, token], 1) for token, share in shares.items() for _ in range(int(1000 * share))]
    table = NGramTable.count(texts)
    num_right = 0
    for seed in range(200):
        sequence = sample_of([7], seed, temperature=1.0)
        (proposal,) = NGramDrafter(table, VOCAB_SIZE).propose([Row(sequence, [7], 1)])
        ids = np.array([list(shares)])
        scores = np.log(list(shares.values())) + noise_of(ids, sequence)[0]
        num_right += proposal.tree.tokens[0] == int(ids[0, scores.argmax()])
        assert proposal.tree.parents == (ROOT,)
    assert num_right > 195  # levels of a byte may turn near ties
    assert not propose(table, [8], 4, 4)


@pytest.mark.parametrize("temperature", [30.0, 1e4, 1e308])
def test_noise_beyond_all_numbers_leaves_probabilities(temperature: float) -> None:
    table = NGramTable.count([([7, token], 1) for token in (1, 2, 3, 4) for _ in range(10)])
    for seed in range(50):
        row = Row(sample_of([7], seed, temperature=temperature), [7], 4)
        (proposal,) = NGramDrafter(table, VOCAB_SIZE).propose([row])
        assert all(0.0 <= probability <= 1.0 for probability in proposal.probabilities)


def test_of_unlikely_tokens_the_one_with_much_noise_is_proposed() -> None:
    """A token that the table knows by its frequency alone, among hundreds, and filters rule out."""
    rare = range(100, 400)
    texts = [([7, 1], 1)] * 300 + [([9, token], 1) for token in rare for _ in range(3)]
    table = NGramTable.count(texts)
    found: dict[float, int] = {}
    for top_p in (1.0, 0.9):
        drafter, found[top_p] = NGramDrafter(table, 400), 0
        for seed in range(60):
            sequence = sample_of([9], seed, temperature=1.0, top_p=top_p)
            (proposal,) = drafter.propose([Row(sequence, [9], 8, max_depth=1)])
            drafter.close(0)
            noise = noise_of(np.array([list(rare)]), sequence)[0]
            found[top_p] += rare[int(noise.argmax())] in proposal.tree.tokens
    assert found[1.0] > 50
    assert found[0.9] < 10
