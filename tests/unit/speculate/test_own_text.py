"""What a sequence's own text says of its next token, against a plain count."""

import random
from collections import Counter

import pytest

from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row, Sequence
from blockdraft.speculate.drafters.ngram import NGramDrafter
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.speculate.drafters.own_text import (
    BESIDE_GUESS,
    MAX_READ,
    MAX_REMEMBERED,
    OwnText,
)
from tests.samples import make_sample

VOCAB_SIZE = 1_000
PRIORS = {1: 8, 2: 4, 3: 2}


def text_of(seed: int, length: int = 60, num_kinds: int = 5) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(num_kinds) for _ in range(length)]


def plain(text: list[int], ending: list[int], known: dict[int, float]) -> dict[int, float]:
    """The same in its plainest form: every place of the text is looked at."""
    weights = {token: share * (3 if token in text else 1) for token, share in known.items()}
    rest = 1 - sum(known.values())
    found = {token: weight / (sum(weights.values()) + rest) for token, weight in weights.items()}
    for length in range(1, len(ending) + 1):
        context = ending[-length:]
        followed = [
            text[place]
            for place in range(length, len(text))
            if text[place - length : place] == context
        ][-MAX_REMEMBERED:]
        if followed:
            counts, prior = Counter(followed), PRIORS[length]
            found = {
                token: (counts[token] + prior * found.get(token, 0.0)) / (len(followed) + prior)
                for token in {*found, *counts}
            }
    return found


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_mixed_as_a_plain_count_gives(seed: int) -> None:
    text = text_of(seed, 400 if seed == 0 else 60)
    known = {2: 0.4, 9: 0.2, 3: 0.1}
    own = OwnText()
    for end in (7, 8, 30, len(text)):  # read piece by piece, as it grows
        own.read(text[:end])
        for ending in (text[end - 3 : end], [text[end - 1]], [9, 9, 9], [9, 9, text[0]]):
            found = own.mixed(tuple(ending), known)
            expected = plain(text[:end], ending, known)
            assert found == pytest.approx(expected)
            assert sum(found.values()) <= 1 + 1e-9


def test_of_a_long_prompt_the_end_is_read_once() -> None:
    own, text = OwnText(), [7, 8] + [1] * MAX_READ
    own.read(text)
    assert own.mixed((7,), {}) == {}
    assert own.mixed((1, 1, 1), {})[1] > 0.99
    own.read([*text, 5])
    own.read([*text, 5])
    assert own.mixed((1,), {})[5] == pytest.approx(1 / (MAX_REMEMBERED + PRIORS[1]))


def propose(drafter: NGramDrafter, sequence: Sequence, num: int = 4) -> Proposal:
    (proposal,) = drafter.propose([Row(sequence, sequence.token_ids[-1:], num)])
    return proposal


def test_a_sequence_drafts_from_its_own_text_alone() -> None:
    drafter = NGramDrafter(NGramTable([]), VOCAB_SIZE)
    own, other = make_sample([1, 2, 3, 4, 1, 2]), make_sample([1, 9, 3, 4, 1], key=1)
    assert propose(drafter, own).tree.tokens == (3, 4, 1)
    assert propose(drafter, other).tree.tokens == (9,)
    own.token_ids += [5, 1, 2]  # what was chosen instead counts from now on
    assert set(propose(drafter, own).tree.tokens) >= {3, 5}
    drafter.close(0)
    fresh = make_sample([8, 1, 2])
    assert not propose(drafter, fresh)  # nothing of the one before is left


def test_what_the_text_holds_comes_before_what_the_table_prefers() -> None:
    texts = [([7, 1], 1)] * 5 + [([7, 2], 1)] * 4
    drafter = NGramDrafter(NGramTable.count(texts), VOCAB_SIZE)
    assert propose(drafter, make_sample([5, 7])).tree.tokens[0] == 1
    assert propose(drafter, make_sample([2, 7], key=1)).tree.tokens[0] == 2


def test_beside_a_guess_a_text_is_believed_less() -> None:
    text = OwnText()
    text.read([1, 2, 1, 2, 1])
    known = {2: 0.1, 3: 0.8}
    alone, beside = text.mixed((1,), known), text.mixed((1,), known, BESIDE_GUESS)
    assert alone[2] > beside[2] > known[2]
    assert alone[3] < beside[3] < known[3]
