import math
from dataclasses import replace
from typing import Any

import pytest

from blockdraft.core.errors import RequestError
from blockdraft.core.request import MAX_LOGPROBS, MAX_SAMPLES, MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("temperature", 10**400),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-60),
        ("repetition_penalty", 1e60),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", [1]),
        ("logit_bias", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (True,)),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("prompt_logprobs", "no"),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("stop", ("",)),
        ("stop", "end"),
        ("stop", 5),
        ("stop", (5,)),
        ("stop", ("\ud800",)),
        ("n", 0),
        ("n", MAX_SAMPLES + 1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("num_draft_tokens", -1),
        ("num_draft_tokens", 2.5),
        ("num_draft_tokens", False),
        ("draft_depth", 0),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name.split("[")[0]):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("top_p", math.nan, "nan; give a number above 0 and at most 1$"),
        ("top_p", None, "None; give a number above 0 and at most 1$"),
        ("temperature", math.inf, "inf; give a finite number of at least 0$"),
        ("temperature", -1, "-1; give a finite number of at least 0$"),
        ("logprobs", True, "True; give a whole number from 0 to 20$"),
        ("max_tokens", 1.5, "1.5; give a whole number of at least 1$"),
    ],
)
def test_the_whole_range_is_said(name: str, value: object, limit: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is {limit}"):
        SamplingParams(**{name: value})


def test_values_take_one_form() -> None:
    """A generator is read once, and what the caller changes later changes nothing here."""
    biases = {3: 1}
    params = SamplingParams(
        stop=(text for text in ("a", "b")), stop_token_ids=[1, 2], logit_bias=biases, temperature=1
    )
    biases[4] = 2
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {3: 1.0}
    assert isinstance(params.temperature, float)
    assert replace(params, n=2).stop == ("a", "b")


def test_top_k_of_other_engines_for_all_tokens_is_ours() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_the_borders_are_allowed() -> None:
    borders: list[dict[str, Any]] = [
        {"max_tokens": 5, "min_tokens": 5, "top_p": 1.0, "min_p": 1.0, "seed": MAX_SEED},
        {"max_tokens": 1, "min_tokens": 0, "min_p": 0.0, "seed": 0, "logprobs": MAX_LOGPROBS},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "logit_bias": {0: -100.0}},
        {"n": 1},
        {"n": MAX_SAMPLES},
    ]
    for values in borders:
        params = SamplingParams(**values)
        assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"seed": 3, "stop_token_ids": (1,), "top_k": 4}, True),
        ({"temperature": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": {1: 0.5}}, False),
        ({"min_tokens": 1}, False),
    ],
)
def test_only_a_choice_without_processing_is_a_plain_argmax(
    changes: dict[str, object], expected: bool
) -> None:
    assert SamplingParams(**changes).is_greedy_argmax is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, None), ({"num_draft_tokens": 0}, 0), ({"num_draft_tokens": 7}, 7), ({"drafters": ()}, 0)],
)
def test_a_request_bounds_the_candidates_of_a_step(
    changes: dict[str, object], expected: int | None
) -> None:
    assert SamplingParams(**changes).max_draft_tokens == expected
