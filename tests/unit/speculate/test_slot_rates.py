"""How far a model's first chain is kept bounds what its proposals are believed to be worth."""

import pytest

from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row, Sequence
from blockdraft.speculate.slot_rates import SlotRates
from tests.samples import decoding_row, make_sample


def begin(key: int = 0) -> Sequence:
    return make_sample([0], [0], key=key, max_tokens=10_000)


def row_of(sample: Sequence) -> Row:
    return decoding_row(sample, 8)


def guess_and_choose(
    rates: SlotRates, sample: Sequence, guessed: list[int], chosen: list[int]
) -> None:
    """The model proposes a chain, and the target chooses tokens."""
    rates.note(row_of(sample), Proposal.chain(guessed, "model"))
    for token_id in chosen:
        sample.append(token_id)
    rates.learn(row_of(sample))


def believed(rates: SlotRates, sample: Sequence, *probabilities: float) -> list[float]:
    """Of a chain that the model believes in so much."""
    chain = Proposal.chain([1, 2, 3][: len(probabilities)], "model", probabilities)
    return list(rates.rated(row_of(sample), chain).probabilities)


def test_a_model_that_is_certain_is_believed_as_far_as_it_was_right():
    rates, sample = SlotRates(), begin()
    assert believed(rates, sample, 1, 1, 1) == pytest.approx([0.6, 0.36, 0.216])
    for _ in range(200):
        guess_and_choose(rates, sample, [1, 2, 3], [1, 2, 9])
    first, second, third = believed(rates, sample, 1, 1, 1)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.05
    # Others profit from it; a model that believes in less is taken at its word.
    assert believed(rates, begin(key=1), 1, 1)[1] > 0.9
    assert believed(rates, sample, 0.5, 0.25) == [0.5, 0.25]


def test_what_stands_behind_a_wrong_guess_is_not_judged():
    rates, sample = SlotRates(), begin()
    for _ in range(50):
        guess_and_choose(rates, sample, [1, 2], [9, 2])
    first, second = believed(rates, sample, 1, 1)
    assert second / first == pytest.approx(0.6)


def test_a_chain_is_judged_once():
    once, twice, sample = SlotRates(), SlotRates(), begin()
    guess_and_choose(once, sample, [1], [1])
    guess_and_choose(twice, sample, [1], [1])
    twice.learn(row_of(sample))  # as in a step that is made again
    assert believed(twice, sample, 1) == believed(once, sample, 1)


def test_nothing_is_kept_of_a_sequence_that_has_gone():
    rates, sample = SlotRates(), begin()
    guess_and_choose(rates, sample, [1], [1])
    rates.note(row_of(sample), Proposal.chain([1], "model"))
    rates.close(sample.key)
    rates.close(99)
    assert not rates._rates
    assert not rates._guessed
