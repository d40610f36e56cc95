"""Lookup: the automaton against a search, what is proposed, what is learned, what is read."""

import gc
import random

import pytest

from blockdraft.core.sequence import Row
from blockdraft.speculate.drafters.automaton import NO_MATCH, Automaton
from blockdraft.speculate.drafters.lookup import (
    LONG_MATCH,
    USUAL_TOKENS,
    LookupDrafter,
    SharedTexts,
)
from blockdraft.speculate.drafters.rates import LEAST_PROBABILITY, Rates
from tests.samples import decoding_row, make_sample


def longest_repeated(text: list[int]) -> int:
    """Length of the longest suffix that also ends earlier."""
    return next(
        (
            size
            for size in range(len(text) - 1, 0, -1)
            if any(text[i : i + size] == text[-size:] for i in range(len(text) - size))
        ),
        0,
    )


def longest_known(text: list[int], written: list[int]) -> int:
    """Length of the longest suffix of `written` that is in the text."""
    return next(
        (
            size
            for size in range(min(len(text), len(written)), 0, -1)
            if any(text[i : i + size] == written[-size:] for i in range(len(text) - size + 1))
        ),
        0,
    )


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 5])
def test_the_longest_repeated_suffix_is_found_behind_every_token(num_kinds: int) -> None:
    draw = random.Random(num_kinds)
    for _ in range(40):
        text: list[int] = []
        automaton = Automaton()
        for _ in range(draw.randint(1, 50)):
            text.append(draw.randrange(num_kinds))
            automaton.append(text[-1])
            match = automaton.repeated()
            assert match.length == longest_repeated(text)
            if match.length:
                # What stands behind it is read from an earlier place, with a token there.
                behind = automaton.behind(match, 3)
                places = [
                    end
                    for end in range(match.length, len(text))
                    if text[end - match.length : end] == text[-match.length :]
                ]
                assert behind in [text[end : end + 3] for end in places]


def test_the_last_place_is_taken() -> None:
    automaton = Automaton([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    assert automaton.behind(automaton.repeated(), 2) == [4, 9]


def test_another_text_is_followed_while_the_automaton_grows() -> None:
    draw = random.Random(1)
    for _ in range(60):
        num_kinds = draw.randint(1, 4)
        text = [draw.randrange(num_kinds) for _ in range(draw.randint(0, 30))]
        automaton, match, written = Automaton(text), NO_MATCH, []
        has_grown = False
        for _ in range(40):
            written.append(draw.randrange(num_kinds + 1))
            match = automaton.advanced(match, written[-1])
            if has_grown:  # what has come since may match longer
                assert match.length <= longest_known(text, written)
            else:
                assert match.length == longest_known(text, written)
            if match.length and (behind := automaton.behind(match, 1)):
                known = [*written[-match.length :], *behind]
                assert longest_known(text, known) == len(known)
            if draw.random() < 0.2:
                has_grown = True
                text.append(draw.randrange(num_kinds))
                automaton.append(text[-1])


def make_row(prompt: list[int], output: list[int], num: int = 16, key: int = 1) -> Row:
    return decoding_row(make_sample(prompt, output, key=key, max_tokens=500), num)


def asked(drafter: LookupDrafter, row: Row) -> list[int]:
    (proposal,) = drafter.propose([row])
    assert proposal.tree.is_chain
    assert set(proposal.sources) <= {"lookup"}
    assert all(probability >= LEAST_PROBABILITY for probability in proposal.probabilities)
    return list(proposal.tree.tokens)


PROMPT = [*range(100, 140)]


def test_what_followed_in_the_prompt_is_proposed() -> None:
    # Two tokens are a short match: not much is expected behind them.
    found = asked(LookupDrafter(), make_row(PROMPT, [7, 110, 111]))
    assert found == PROMPT[12 : 12 + len(found)]
    assert 1 <= len(found) <= 4
    long = asked(LookupDrafter(), make_row(PROMPT, PROMPT[5:17]))
    assert long == PROMPT[17:33]
    middle = asked(LookupDrafter(), make_row(PROMPT, PROMPT[5 : 5 + LONG_MATCH - 1]))
    assert len(middle) == USUAL_TOKENS


def test_nothing_is_proposed_behind_one_token_or_at_the_end() -> None:
    assert asked(LookupDrafter(), make_row(PROMPT, [7, 110])) == []
    assert asked(LookupDrafter(), make_row(PROMPT, [1, 2, 3])) == []
    assert asked(LookupDrafter(), make_row(PROMPT, PROMPT[-3:])) == []


def test_a_prompt_that_ends_like_its_middle_is_continued_at_once() -> None:
    """The first token of the output goes on with what the prompt's own end matches."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    assert asked(LookupDrafter(), make_row(prompt, [4]))[:2] == [5, 6]


def test_a_text_in_a_circle_goes_on_in_it() -> None:
    assert asked(LookupDrafter(), make_row([9], [1, 2, 3] * 6)) == ([1, 2, 3] * 6)[:16]


def test_no_more_is_proposed_than_the_row_has_room_for() -> None:
    for num in (1, 3, 5):
        assert len(asked(LookupDrafter(), make_row(PROMPT, PROMPT[5:20], num))) == num


def test_probabilities_are_learned_by_the_length_of_the_match() -> None:
    """A prompt that the output never goes on like is believed less and less."""
    drafter = LookupDrafter()
    row = make_row(PROMPT, [110, 111])
    first = drafter.propose([row])[0].probabilities[0]
    for start in range(100, 130, 3):
        for token_id in (5, start, start + 1):  # and never start + 2
            row.sequence.append(token_id)
        (proposal,) = drafter.propose([row])
    assert not proposal or proposal.probabilities[0] < 0.5 * first
    # So has the engine learned, for the requests that follow.
    (other,) = drafter.propose([make_row(PROMPT, [110, 111], key=2)])
    assert not other or other.probabilities[0] < first


def test_probabilities_never_rise_along_a_path() -> None:
    (proposal,) = LookupDrafter().propose([make_row(PROMPT, PROMPT[5:15])])
    assert list(proposal.probabilities) == sorted(proposal.probabilities, reverse=True)


def test_rates_begin_with_the_prior_and_follow_what_happens() -> None:
    rates = Rates([0.5, 0.9])
    request = rates.of_request()
    assert request.path([0, 1]) == pytest.approx([0.5, 0.45])
    for _ in range(60):
        request.record(0, False)
    assert request[0] < 0.05
    assert 0.05 < rates.of_request()[0] < 0.1
    assert request[1] == rates[1] == pytest.approx(0.9)
    for _ in range(3000):
        request.record(0, True)
    assert request[0] > 0.95


@pytest.mark.parametrize("ends", ["well", "taken away"])
def test_a_sequence_that_is_over_is_forgotten(ends: str) -> None:
    drafter, row = LookupDrafter(), make_row(PROMPT, PROMPT[5:9])
    drafter.open(row, 0)
    asked(drafter, row)
    (searched,) = drafter._searched.values()
    prompt, output = (text.automaton.token_ids for text in searched.own)
    assert [*prompt, *output] == row.sequence.token_ids
    del searched
    if ends == "well":
        end(drafter, row)
    else:
        drafter.close(1)
        del row
        gc.collect()
    assert not drafter._searched
    assert not drafter._samples
    assert not drafter._prompts


def test_nothing_is_learned_twice_from_a_sequence_that_was_preempted() -> None:
    drafter, row = LookupDrafter(), make_row(PROMPT, PROMPT[5:12])
    drafter.open(row, 0)
    asked(drafter, row)

    def learned() -> list[float]:
        return [rates[bucket] for rates in drafter._rates.values() for bucket in range(17)]

    before = learned()
    expected = drafter.propose([row])
    drafter.close(1)
    drafter.open(row, 0)
    assert drafter.propose([row]) == expected, "what the request itself has learned is lost"
    assert learned() == before
    row.sequence.append(PROMPT[12])
    asked(drafter, row)
    assert learned() != before


def test_samples_of_one_prompt_share_what_is_known_of_it() -> None:
    drafter = LookupDrafter()
    rows = [make_row(PROMPT, [index], key=index) for index in range(3)]
    drafter.propose(rows)
    prompts = {id(searched.own[0].automaton) for searched in drafter._searched.values()}
    assert len(prompts) == 1


def end(drafter: LookupDrafter, row: Row, reason: str = "stop") -> None:
    drafter.open(row, 0)
    row.sequence.finish_reason = reason  # type: ignore[assignment]
    drafter.close(row.sequence.key)


def test_shared_texts_serve_the_requests_that_follow() -> None:
    written = [*range(200, 240)]
    for shared_tokens in (0, 1000):
        drafter = LookupDrafter(shared_tokens=shared_tokens)
        end(drafter, make_row(PROMPT, written))
        found = asked(drafter, make_row([1, 2, 3], written[4:10], key=2))
        assert found == ([] if not shared_tokens else written[10:18])


@pytest.mark.parametrize("reason", ["error", None])
def test_outputs_that_did_not_end_well_are_not_shared(reason: str) -> None:
    drafter = LookupDrafter(shared_tokens=1000)
    end(drafter, make_row(PROMPT, [*range(200, 240)]), reason)
    assert asked(drafter, make_row([1], [*range(204, 210)], key=2)) == []


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5])
def test_the_smallest_shared_texts_are_bounded_too(max_tokens: int) -> None:
    shared = SharedTexts(max_tokens)
    for _ in range(3):
        shared.add([*range(10)])
        assert sum(map(len, shared.halves)) <= max_tokens


def test_shared_texts_are_bounded_and_never_read_beyond_their_ends() -> None:
    shared = SharedTexts(60)
    for start in range(0, 400, 20):
        shared.add([*range(start, start + 20)])
        assert sum(map(len, shared.halves)) <= 60
    shared.add([*range(1000, 2000)])
    assert sum(map(len, shared.halves)) <= 60
    drafter = LookupDrafter(shared_tokens=500)
    for start in (200, 300):
        end(drafter, make_row(PROMPT, [*range(start, start + 20)], key=start))
    # Behind the end of the first output stands the second, of somebody else.
    assert asked(drafter, make_row([1], [*range(210, 220)], key=2)) == []
    assert asked(drafter, make_row([1], [*range(208, 216)], key=3)) == [216, 217, 218, 219]
