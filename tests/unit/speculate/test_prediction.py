"""Predictions: followed from their start, found again behind an edit, never beyond their end."""

import gc
import random
from collections.abc import Sequence

import pytest

from blockdraft.core.sequence import Row
from blockdraft.speculate.drafters.prediction import Follower, PredictionDrafter, num_as_predicted
from tests.samples import decoding_row, make_sample

TEXT = (*range(100, 160),)


def make_row(prediction: Sequence[int], output: Sequence[int], num: int = 16, key: int = 1) -> Row:
    sample = make_sample([1, 2], output, key=key, max_tokens=500)
    sample.prediction_ids = tuple(prediction)
    return decoding_row(sample, num)


def followed(output: Sequence[int], text: Sequence[int] = TEXT) -> Follower:
    follower = Follower(text)
    for token_id in output:
        follower.see(token_id)
    return follower


@pytest.mark.parametrize(
    ("output", "next_id"),
    [
        ([], 100),
        (TEXT[:5], 105),
        ([*TEXT[:5], 7], 106),  # one token stands for another
        ([*TEXT[:5], 7, 8, *TEXT[6:8]], 108),  # two for one
        ([*TEXT[:5], 7, 8, 9, 7, *TEXT[5:8]], 108),  # something is put in
        ([*TEXT[:5], *TEXT[12:14]], 114),  # something is left out
        ([7, 7, *TEXT[:3]], 103),  # another beginning
        ([*TEXT[20:24], *TEXT[2:6]], 106),  # parts in another order
        ([*TEXT[:5], TEXT[40]], 106),  # a single token far away is no reason to go there
    ],
)
def test_the_output_is_found_again(output: Sequence[int], next_id: int) -> None:
    assert list(followed(output).expected(1)) == [next_id]


def test_among_equal_runs_the_nearest_is_taken() -> None:
    text = [1, 2, 3, 9, 5, 6, 1, 2, 4, 9, 7, 8, 1, 2, 5, 9]
    assert list(followed([1, 2, 3, 9, 5, 6, 1, 2, 77, 9], text).expected(2)) == [7, 8]
    # A longer run is worth more than a near place.
    assert list(followed([1, 2, 3, 9, 5, 6, 1, 1, 2, 5], text).expected(1)) == [9]


def test_an_output_that_repeats_one_token_is_not_searched_for_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    run_at = Follower._run_at
    monkeypatch.setattr(Follower, "_run_at", lambda *given: calls.append(1) or run_at(*given))
    followed([5] * 500, [5] * 100)
    assert len(calls) <= 500


def test_a_prediction_that_is_over_proposes_nothing() -> None:
    follower = followed([*TEXT, 7, 8, 9])
    assert list(follower.expected(4)) == []
    assert follower.place == len(TEXT)
    (proposal,) = PredictionDrafter().propose([make_row(TEXT, TEXT)])
    assert not proposal
    (last,) = PredictionDrafter().propose([make_row(TEXT, TEXT[:-2])])
    assert last.tree.tokens == TEXT[-2:]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(30))
def test_no_output_leads_outside_the_prediction(seed: int) -> None:
    draw = random.Random(seed)
    text = [draw.randrange(4) for _ in range(draw.randint(1, 30))]
    follower = Follower(text)
    for _ in range(60):
        follower.see(draw.randrange(5))
        assert 0 <= follower.place <= len(text)
        assert 0 <= follower.run <= 16
        if follower.run:
            num = min(follower.run, follower.place)
            assert list(text[follower.place - num : follower.place]) == follower._written[-num:]


def test_a_prediction_is_believed_at_first_and_less_when_it_is_wrong() -> None:
    drafter = PredictionDrafter()
    row = make_row(TEXT, [100])
    (first,) = drafter.propose([row])
    assert first.tree.tokens == TEXT[1:17][: len(first)]
    assert len(first) == 16
    assert first.sources == ("prediction",) * 16
    for token_id in range(200, 230):
        row.sequence.append(token_id)
        (proposal,) = drafter.propose([row])
    assert len(proposal) <= 1


@pytest.mark.parametrize(
    ("output", "num"),
    [
        (TEXT, 60),
        (TEXT[:1], 1),
        (TEXT[:7], 7),
        ([*TEXT[:20], 7, *TEXT[21:]], 59),
        ([*TEXT[:20], 7, 8, 9, *TEXT[20:]], 60),
        (TEXT[30:], 30),
        ([7, 8, 9], 0),
        ([7, TEXT[3], 8, TEXT[5], 9], 0),  # single tokens may be there by chance
        ([*TEXT, *TEXT], 60),
    ],
)
def test_tokens_as_predicted_are_counted(output: Sequence[int], num: int) -> None:
    assert num_as_predicted(TEXT, output) == num


def test_each_sample_has_its_own_place() -> None:
    drafter = PredictionDrafter()
    one, other = make_row(TEXT, TEXT[:3], key=1), make_row(TEXT, TEXT[:9], key=2)
    assert [p.tree.tokens[0] for p in drafter.propose([one, other])] == [103, 109]
    del one, other
    gc.collect()
    assert not drafter._predictions


def test_nothing_is_learned_twice_from_a_sequence_that_was_preempted() -> None:
    drafter, row = PredictionDrafter(), make_row(TEXT, TEXT[:5])
    expected = drafter.propose([row])
    before = [drafter._rates[run] for run in range(17)]
    drafter.close(1)
    assert drafter.propose([row]) == expected
    assert [drafter._rates[run] for run in range(17)] == before


def test_only_those_with_a_prediction_are_served() -> None:
    drafter = PredictionDrafter()
    assert drafter.serves(make_row(TEXT, []).sequence)
    assert not drafter.serves(make_row([], []).sequence)
