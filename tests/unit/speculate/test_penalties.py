"""Penalties from arrays that are kept between places have the bits of the plain formula."""

import gc
import random
from collections import Counter
from weakref import ref

import numpy as np
import pytest
from numpy.typing import NDArray

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.speculate.sampler import penalties
from blockdraft.speculate.sampler.penalties import penalize

VOCAB_SIZE = 50


def make_sequence(params: SamplingParams, prompt: list[int]) -> Sequence:
    return Sequence(0, params, 0, 0, frozenset(), prompt, len(prompt))


def plain(scores: NDArray[np.float32], sequence: Sequence, ahead: list[int]) -> None:
    """Token by token, from all that the sequence holds."""
    params, counts = sequence.params, Counter(sequence.output_ids + ahead)
    factor = np.float32(params.repetition_penalty)
    for i in set(sequence.token_ids + ahead) if factor != 1 else ():
        scores[i] = scores[i] / factor if scores[i] > 0 else scores[i] * factor
    for i, count in counts.items():
        frequency = np.float32(params.frequency_penalty) * np.float32(count)
        scores[i] -= frequency + np.float32(params.presence_penalty)


@pytest.mark.parametrize("seed", range(8))
def test_values_are_those_of_the_formula_on_every_path_of_every_step(seed: int) -> None:
    draw = random.Random(seed)
    chances = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.3}
    chosen = {name: value for name, value in chances.items() if draw.random() < 0.7}
    params = SamplingParams(max_tokens=100, **chosen)
    sequence = make_sequence(params, [draw.randrange(VOCAB_SIZE) for _ in range(8)])
    numbers = np.random.default_rng(seed)
    for _ in range(20):
        for _ in range(4):  # the same token may stand on a path more than once
            ahead = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(6))]
            scores = numbers.normal(0.0, 3.0, VOCAB_SIZE).astype(np.float32)
            scores[draw.randrange(VOCAB_SIZE)] = draw.choice([np.inf, -np.inf, np.nan, -0.0])
            expected = scores.copy()
            plain(expected, sequence, ahead)
            penalize(scores, sequence, ahead)
            assert scores.tobytes() == expected.tobytes()
        for _ in range(draw.randint(1, 3)):
            sequence.append(draw.randrange(VOCAB_SIZE))


def test_sets_are_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], penalties._Known.of
    monkeypatch.setattr(penalties._Known, "of", lambda *own: made.append(own) or real(*own))
    sequence = make_sequence(SamplingParams(repetition_penalty=1.3), [1, 2])
    for num_reads in (1, 2):
        for ahead in ([], [3], [3, 4]):
            penalize(np.zeros(VOCAB_SIZE, np.float32), sequence, ahead)
        assert len(made) == num_reads
        sequence.append(3)


def test_what_is_kept_goes_with_its_sequence() -> None:
    sequence = make_sequence(SamplingParams(repetition_penalty=1.3), [1, 2])
    penalize(np.zeros(VOCAB_SIZE, np.float32), sequence, [])
    kept = ref(penalties._last[sequence].prompt)
    del sequence
    gc.collect()
    assert kept() is None


def test_a_prompt_is_read_once_and_not_in_every_step() -> None:
    sequence = make_sequence(SamplingParams(repetition_penalty=1.3), [1, 2])
    read = []
    for _ in range(3):
        penalize(np.zeros(VOCAB_SIZE, np.float32), sequence, [])
        read.append(penalties._last[sequence].prompt)
        sequence.append(3)
    assert all(own is read[0] for own in read)
