"""The choice against a reference in plain Python, on small vocabularies with many ties.

Logits are multiples of 1/4, factors powers of two: every step of the arithmetic is exact, so ties
stay ties, and the order of processing is all that can differ.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from blockdraft.core.grammar import Grammar
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Constraint, Sequence
from blockdraft.speculate.sampler import choose as choose_module
from blockdraft.speculate.sampler.choose import Choice, argmax_ids, choices
from blockdraft.speculate.sampler.logprobs import token_logprobs
from blockdraft.speculate.sampler.noise import gumbel_noise
from blockdraft.speculate.sampler.philox import Stream
from blockdraft.speculate.sampler.reference import NO_CHOICE

NEVER = -math.inf


class Allows:
    """Allows the tokens that the last one divides, and those that are given; sometimes all."""

    def __init__(self, vocab_size: int, always: set[int]) -> None:
        self.vocab_size, self.always = vocab_size, always

    def ids(self, tokens: list[int]) -> set[int]:
        step = 1 + (tokens[-1] if tokens else 1)
        return self.always | set(range(0, self.vocab_size, step)[1:])

    def allowed(self, output_ids: list[int], ahead: list[int]) -> NDArray[np.bool_] | None:
        ids = self.ids(output_ids + ahead)
        return np.isin(np.arange(self.vocab_size), list(ids)) if ids else None


def make_sequence(
    params: SamplingParams,
    *,
    prompt: list[int],
    output: list[int],
    stop_ids: frozenset[int] = frozenset(),
    sample_index: int = 0,
    constraint: Constraint | None = None,
) -> Sequence:
    sequence = Sequence(
        key=0,
        params=params,
        seed=params.seed or 0,
        sample_index=sample_index,
        stop_ids=stop_ids,
        token_ids=list(prompt),
        num_prompt=len(prompt),
        num_cached=len(prompt) - 1,
        constraint=constraint,
    )
    for token_id in output:
        sequence.append(token_id)
        sequence.num_cached += 1
    return sequence


def processed(logits: list[float], sequence: Sequence, ahead: list[int]) -> list[float]:
    """Penalties, then logit bias, then the grammar and the minimum length."""
    params, scores = sequence.params, list(logits)
    output = sequence.output_ids + ahead
    prompt = sequence.token_ids[: sequence.num_prompt]
    for token_id, count in Counter(output).items():
        if token_id in prompt:
            continue
        scores[token_id] = repeated(scores[token_id], params) - penalty(count, params)
    for token_id in set(prompt):
        count = output.count(token_id)
        scores[token_id] = repeated(scores[token_id], params) - penalty(count, params)
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    ids = every = set(range(len(scores)))
    if isinstance(sequence.constraint, Allows):
        ids = sequence.constraint.ids(output) or every
    if len(output) < params.min_tokens:
        ids = (ids - sequence.stop_ids) or ids
    if not any(scores[token_id] > NEVER for token_id in ids):
        return [0.0 if token_id in ids else NEVER for token_id in every]
    return [score if token_id in ids else NEVER for token_id, score in enumerate(scores)]


def repeated(score: float, params: SamplingParams) -> float:
    factor = params.repetition_penalty
    return score / factor if score > 0 else score * factor


def penalty(count: int, params: SamplingParams) -> float:
    return params.frequency_penalty * count + params.presence_penalty * (count > 0)


def survivors(scores: list[float], params: SamplingParams) -> list[int]:
    """Temperature, then top-k, top-p and min-p; ties by value, then id."""
    scaled = [score / params.temperature for score in scores]
    ids = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    ids = [i for i in ids if scaled[i] > NEVER]
    if params.top_k:
        ids = ids[: params.top_k]
    weights = {i: math.exp(scaled[i] - scaled[ids[0]]) for i in ids}
    if params.top_p < 1.0:
        total, reached, kept = math.fsum(weights.values()), 0.0, []
        for i in ids:
            kept.append(i)
            reached += weights[i]
            if reached >= params.top_p * total:
                break
        ids = kept
    return [i for i in ids if weights[i] >= params.min_p]


def reference(logits: list[float], sequence: Sequence, ahead: list[int]) -> int:
    """What must be chosen."""
    params = sequence.params
    scores = processed(logits, sequence, ahead)
    if params.temperature == 0.0:
        return max(range(len(scores)), key=lambda i: (scores[i], -i))
    position = len(sequence.token_ids) + len(ahead)
    noise = gumbel_noise(Stream(sequence.seed, sequence.sample_index, position), len(scores))
    ids = sorted(survivors(scores, params))
    return max(ids, key=lambda i: scores[i] / params.temperature + float(noise[i]))


def random_params(draw: random.Random, vocab_size: int) -> SamplingParams:
    """Each feature is on half of the time."""
    options: dict[str, Any] = {
        "temperature": draw.choice([0.5, 1.0, 2.0]),
        "top_k": draw.randint(1, vocab_size),
        "top_p": draw.uniform(0.05, 0.98),
        "min_p": draw.uniform(0.01, 0.6),
        "repetition_penalty": draw.choice([0.5, 2.0, 4.0]),
        "presence_penalty": draw.choice([-1.0, 0.5, 1.5]),
        "frequency_penalty": draw.choice([-0.5, 0.25, 1.0]),
        "logit_bias": {draw.randrange(vocab_size): draw.choice([-2.0, 1.0, 4.0])},
        "min_tokens": draw.randint(1, 12),
    }
    chosen = {name: value for name, value in options.items() if draw.random() < 0.5}
    return SamplingParams(max_tokens=100, seed=draw.getrandbits(64), **chosen)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_follows_the_order_of_processing(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        vocab_size = draw.choice([2, 5, 8, 12])
        rows = draw.randint(1, 4)
        logits = [[0.25 * draw.randint(-8, 8) for _ in range(vocab_size)] for _ in range(rows)]
        tokens = [draw.randrange(vocab_size) for _ in range(draw.randint(1, 8))]
        num_prompt = draw.randint(1, len(tokens))
        ahead = [draw.randrange(vocab_size) for _ in range(rows - 1)]
        params, constraint = random_params(draw, vocab_size), None
        if draw.random() < 0.5:
            params = replace(params, grammar=Grammar.regex("any"))
            constraint = Allows(
                vocab_size, {0, draw.randrange(vocab_size)} if draw.random() < 0.7 else set()
            )
            for row in logits if draw.random() < 0.3 else ():
                row[1:] = [NEVER] * (vocab_size - 1)
        sequence = make_sequence(
            params,
            prompt=tokens[:num_prompt],
            output=tokens[num_prompt:],
            stop_ids=frozenset({0}),
            sample_index=draw.randrange(3),
            constraint=constraint,
        )
        expected = [reference(row, sequence, ahead[:i]) for i, row in enumerate(logits)]
        before = list(sequence.token_ids), sequence.output_counts.copy()
        assert list(choices(torch.tensor(logits), sequence, ahead)) == expected
        assert (sequence.token_ids, sequence.output_counts) == before


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 50)
    logits[1, 20:] = 1.0
    logits[2, 30] = 2.0
    for params in (SamplingParams(), SamplingParams(logit_bias={49: 0.0})):
        sequence = make_sequence(params, prompt=[1], output=[])
        assert list(choices(logits, sequence, [0, 20])) == [0, 20, 30]
        assert list(choices(logits.bfloat16(), sequence, [0, 20])) == [0, 20, 30]


def test_ties_at_the_border_of_top_k_go_to_the_lowest_ids() -> None:
    params = SamplingParams(max_tokens=100, temperature=1.0, top_k=3, seed=5)
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0, 1.0, 1.0]])
    chosen = set()
    for index in range(200):
        sequence = make_sequence(params, prompt=[1], output=[], sample_index=index)
        chosen |= set(choices(logits, sequence, []))
    assert chosen == {1, 2, 3}


class CountingRows:
    """Logits that tell how many rows were processed."""

    def __init__(self, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits, self.num_read, real = logits, 0, choose_module._chosen

        def counting(rows: list[Any]) -> list[Choice]:
            self.num_read += len(rows)
            return real(rows)

        monkeypatch.setattr(choose_module, "_chosen", counting)

    def choices(self, sequence: Sequence, ahead: list[int]) -> Iterator[int]:
        return choices(self.logits, sequence, ahead)


def test_rows_behind_the_last_wanted_one_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = CountingRows(torch.zeros(16, 8), monkeypatch)
    monkeypatch.setattr(choose_module, "sampled", lambda *_: None)
    sequence = make_sequence(SamplingParams(temperature=1.0, seed=1), prompt=[1], output=[])
    found = rows.choices(sequence, [0] * 15)
    next(found)
    next(found)
    assert rows.num_read == 2


def test_the_logits_stay_as_they_are() -> None:
    """The raw distribution is reported after the choice."""
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(temperature=1.0, seed=1, logit_bias={3: 9.0}, repetition_penalty=2.0)
    list(choices(logits, make_sequence(params, prompt=[1, 2], output=[3]), [4]))
    assert torch.equal(logits, before)


def test_temperature_near_zero_is_greedy() -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    for seed in range(50):
        params = SamplingParams(temperature=1e-6, seed=seed)
        sequence = make_sequence(params, prompt=[1], output=[])
        assert list(choices(logits, sequence, [])) == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30])
@pytest.mark.parametrize("filtered", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_no_temperature_is_too_small(temperature: float, filtered: dict[str, Any]) -> None:
    """Scores divided by it would be infinite, and the first of them would win."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 4.0, -1.0]])
    for sign, best in ((1.0, 3), (-1.0, 4)):
        params = SamplingParams(temperature=temperature, seed=1, **filtered)
        sequence = make_sequence(params, prompt=[1], output=[])
        assert list(choices(sign * logits, sequence, [])) == [best]


CHOOSERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"logit_bias": {2: -100.0}},
)


@pytest.mark.parametrize("params", CHOOSERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [0, 2, 8])
def test_there_is_no_choice_where_a_logit_is_no_number(
    place: int, dtype: torch.dtype, params: dict[str, Any]
) -> None:
    """Not even among the others: what made it may have made them, too."""
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    sequence = make_sequence(SamplingParams(seed=1, **params), prompt=[1, 2], output=[3])
    expected = list(choices(logits, sequence, [4, 5]))
    assert NO_CHOICE not in expected
    logits[1, place] = math.nan
    assert list(choices(logits, sequence, [4, 5])) == [expected[0], NO_CHOICE, expected[2]]


@pytest.mark.parametrize("has_kernels", [True, False])
def test_argmax_of_many_rows_is_that_of_each(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties go to the lowest id; infinite logits are numbers, but some must have a chance."""
    if not has_kernels:
        monkeypatch.setattr(choose_module, "first_largest", lambda logits: None)
    logits = torch.zeros(6, 50)
    logits[1, 20:] = 1.0
    logits[2, [7, 30]] = math.inf
    logits[3] = -math.inf
    logits[4, 49] = math.nan
    logits[5, 40] = 2.0
    logits[5, 3] = -math.inf
    expected = [0, 20, 7, NO_CHOICE, NO_CHOICE, 40]
    assert argmax_ids(logits) == argmax_ids(logits.bfloat16()) == expected
    assert [argmax_ids(row[None])[0] for row in logits] == expected
    assert argmax_ids(logits[:0]) == []


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    total = math.log(sum(math.exp(value) for value in logits.tolist()))
    logprob, top = token_logprobs(logits, 0, 2)
    assert logprob == pytest.approx(1.0 - total)
    assert [token_id for token_id, _ in top] == [1, 2]
    assert [value for _, value in top] == pytest.approx([3.0 - total, 2.0 - total])
    assert token_logprobs(logits, 2, 0)[1] == []
