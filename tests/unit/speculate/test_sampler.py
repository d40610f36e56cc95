"""The choices of many rows together are those of each row alone, by the reference form."""

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.core.plan import ForwardPlan
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Constraint, Row, Sequence
from blockdraft.kernels.backends import sampled as sampled_by_kernel
from blockdraft.kernels.cpu.library import library
from blockdraft.speculate.sampler import choose as choose_module
from blockdraft.speculate.sampler import noise as noise_module
from blockdraft.speculate.sampler import race as race_module
from blockdraft.speculate.sampler.choose import Chooser, Walk, choose, choose_processed
from blockdraft.speculate.sampler.logits import Place, processed
from blockdraft.speculate.sampler.noise import MIN_NOISE, large_noise
from blockdraft.speculate.sampler.philox import Stream
from blockdraft.speculate.sampler.reference import NO_CHOICE, choose_row
from blockdraft.speculate.verify import verify

needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels on this machine")

Outcome = int | str
"""A token id, or what was raised."""


class AllowsMultiples:
    """Allows multiples of a number that depends on the last token; sometimes refuses."""

    def __init__(self, vocab_size: int, refuses: int) -> None:
        self.vocab_size, self.refuses, self.num_asked = vocab_size, refuses, 0

    def allowed(self, output_ids: list[int], ahead: list[int]) -> NDArray[np.bool_] | None:
        self.num_asked += 1
        last = (output_ids + ahead or [1])[-1]
        if last % self.refuses == self.refuses - 1:
            raise RequestError("refused")
        return np.arange(self.vocab_size) % (1 + last % 7) == 0


def make_sequence(
    params: SamplingParams,
    *,
    seed: int = 1,
    sample_index: int = 0,
    token_ids: tuple[int, ...] = (1, 0, 1),
    constraint: Constraint | None = None,
) -> Sequence:
    if constraint is not None:
        params = replace(params, grammar=Grammar.regex("any"))
    return Sequence(
        key=0,
        params=params,
        seed=seed,
        sample_index=sample_index,
        stop_ids=frozenset({0}),
        token_ids=list(token_ids),
        num_prompt=2,
        output_counts=Counter(token_ids[2:]),
        constraint=constraint,
    )


VOCAB_SIZES = 2, 5, 97, 1_003, 5_000


def random_logits(draw: random.Random, num_rows: int, vocab_size: int) -> Tensor:
    """As a model, and as no model should."""
    numbers = np.random.default_rng(draw.getrandbits(32))
    logits = numbers.normal(0.0, draw.choice([0.1, 1.0, 4.0]), (num_rows, vocab_size))
    kind = draw.choice(["plain", "ties", "flat", "peaked", "holes", "zeros", "huge", "edges"])
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = draw.choice([0.0, -7.5, 40.0])
    elif kind == "peaked":
        logits[:, draw.randrange(vocab_size)] += 30.0
    elif kind == "holes":
        logits[numbers.random(logits.shape) < 0.9] = -np.inf
    elif kind == "zeros":
        logits = np.where(numbers.random(logits.shape) < 0.5, 0.0, -0.0)
    elif kind == "huge":
        logits *= 1e25
    elif kind == "edges":
        for row in logits:
            token_ids = numbers.integers(0, vocab_size, 2)
            row[token_ids] = draw.choice([np.inf, -np.inf, np.nan, 3.0])
            if draw.random() < 0.2:
                row[:] = -np.inf
    dtype = draw.choice([torch.float32, torch.bfloat16])
    return torch.from_numpy(logits).to(dtype)


def random_params(draw: random.Random, vocab_size: int) -> SamplingParams:
    options: dict[str, Any] = {
        "top_k": draw.choice([1, 3, 50, 700, 2**70]),
        "top_p": draw.choice([1e-9, 0.5, 0.95, 0.999999]),
        "min_p": draw.choice([1e-6, 0.05, 1.0]),
        "repetition_penalty": draw.choice([0.5, 1.3]),
        "presence_penalty": draw.choice([-1.0, 1.5]),
        "frequency_penalty": draw.choice([-0.5, 0.3]),
        "logit_bias": {draw.randrange(vocab_size): draw.choice([-100.0, 1.0, 9.0])},
        "min_tokens": draw.randint(1, 6),
    }
    chance = draw.choice([0.0, 0.15, 0.4])
    chosen = {name: value for name, value in options.items() if draw.random() < chance}
    temperature = draw.choice([0.0, 5e-324, 1e-6, 0.1, 0.7, 1.0, 1.0, 2.0, 5.0, 1e30])
    return SamplingParams(max_tokens=100, temperature=temperature, **chosen)


def random_walk(draw: random.Random) -> Walk:
    vocab_size, num_rows = draw.choice(VOCAB_SIZES), draw.randint(1, 5)
    params = random_params(draw, vocab_size)
    constraint = None
    if draw.random() < 0.15:
        constraint = AllowsMultiples(vocab_size, draw.choice([3, 50]))
    sequence = make_sequence(
        params,
        seed=draw.getrandbits(64),
        sample_index=draw.randrange(2**16),
        token_ids=tuple(draw.randrange(vocab_size) for _ in range(draw.randint(2, 7))),
        constraint=constraint,
    )
    ahead = [draw.randrange(vocab_size) for _ in range(num_rows - 1)]
    return Walk.chain(random_logits(draw, num_rows, vocab_size), sequence, ahead)


def outcomes(found: Iterator[int]) -> list[Outcome]:
    """The choices, and what ends them."""
    told: list[Outcome] = []
    try:
        told.extend(found)
    except RequestError as error:
        told.append(str(error))
    return told


def told(walk: Walk, choice_at: Chooser) -> Iterator[int]:
    """The choices of a walk that goes through all its rows."""
    return map(choice_at, range(walk.logits.shape[0]))


def chosen(walk: Walk) -> Iterator[int]:
    """The choices of one walk alone."""
    (choice_at,) = choose([walk])
    return told(walk, choice_at)


def by_reference(walk: Walk) -> Iterator[int]:
    """The same row by row, with the noise of the whole vocabulary."""
    for index, row in enumerate(walk.logits):
        yield choose_row(row.float().numpy(), walk.places[index])


def num_different(seed: int, num_walks: int = 40) -> int:
    """Walks of a mixed batch whose choices are not those of the reference."""
    draw = random.Random(seed)
    walks = [random_walk(draw) for _ in range(num_walks)]
    found = [outcomes(told(*each)) for each in zip(walks, choose(walks), strict=True)]
    return sum(own != outcomes(by_reference(walk)) for own, walk in zip(found, walks, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(40))
def test_mixed_batches_equal_the_reference(seed: int) -> None:
    """Some 5,000 rows: greedy and sampled, filters, penalties, grammars, infinities, no numbers."""
    assert num_different(seed) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_comes_with_the_logits_that_it_was_made_from(seed: int) -> None:
    draw = random.Random(seed)
    for walk in [random_walk(draw) for _ in range(100)]:
        for row, place in zip(walk.logits.float().numpy(), walk.places, strict=True):
            try:
                expected = processed(row, place)
            except RequestError:
                with pytest.raises(RequestError):
                    choose_processed(row, place)
                continue
            found, scores = choose_processed(row, place)
            assert found == choose_row(row, place)
            assert scores.tobytes() == expected.tobytes()


def test_mixed_batches_equal_the_reference_in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_module, "TILE_BYTES", 3 * 4 * 97)
    monkeypatch.setattr(race_module, "MAX_TOGETHER", 10)
    assert [num_different(seed) for seed in range(4)] == [0] * 4


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice by kernels."""
    monkeypatch.setattr(choose_module, "sampled", lambda *_: None)


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_equal_the_reference_without_kernels(seed: int) -> None:
    assert num_different(seed) == 0


@pytest.fixture
def coarse_noise(monkeypatch: pytest.MonkeyPatch, by_numpy: None) -> Iterator[None]:
    """Noise in whole numbers: with logits in whole numbers, many tokens have the largest sum."""
    real = noise_module._noise_of
    monkeypatch.setattr(noise_module, "_noise_of", lambda words: np.round(real(words)))
    monkeypatch.setattr(race_module, "MIN_NOISE", -4.0)
    large_noise.cache_clear()
    yield
    large_noise.cache_clear()


def num_ties_different(temperature: float = 1.0, **filters: Any) -> int:
    """Rows with ties whose choice is not the reference's, of 200."""
    numbers = np.random.default_rng(0)
    logits = torch.from_numpy(np.round(numbers.normal(0.0, 2.0, (200, 2_000))).astype(np.float32))
    walks = [
        Walk.chain(
            row[None], make_sequence(SamplingParams(temperature=temperature, **filters), seed=i), []
        )
        for i, row in enumerate(logits)
    ]
    pairs = zip(walks, choose(walks), strict=True)
    return sum(list(told(*pair)) != list(by_reference(pair[0])) for pair in pairs)


@pytest.mark.usefixtures("coarse_noise")
@pytest.mark.parametrize("filters", [{}, {"top_k": 300}, {"top_k": 900}, {"min_p": 0.01}], ids=str)
def test_ties_of_logits_with_their_noise_go_to_the_lowest_id(filters: dict[str, Any]) -> None:
    assert num_ties_different(**filters) == 0
    assert num_ties_different(0.5, **filters) == 0


def test_a_tie_between_large_and_small_noise_goes_to_the_lowest_id() -> None:
    ids, values, noise = np.array([4, 9]), np.array([0.0, 0.0]), np.array([1.0, 1.0])
    for leader, expected in ((3, 3), (5, 4)):
        tied = race_module.Contest(Stream(0, 0, 0), ids, values, leader, 1.0)
        assert tied.winner(noise) == expected


def one_noise_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real, large = race_module.noise_at, race_module.large_noise
    monkeypatch.setattr(
        race_module, "noise_at", lambda streams, counts, ids: real([streams[0]], [sum(counts)], ids)
    )
    first: list[Stream] = []

    def of_first(stream: Stream, vocab_size: int) -> noise_module.LargeNoise:
        first.append(stream)
        return large(first[0], vocab_size)

    monkeypatch.setattr(race_module, "large_noise", of_first)


def noise_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise belongs to the place among the survivors instead of the token."""
    real = race_module.noise_at

    def by_rank(streams: list[Stream], counts: list[int], ids: NDArray[np.int64]) -> Any:
        ranks = np.concatenate([np.arange(count) for count in counts]).astype(np.int64)
        return real(streams, counts, ranks)

    monkeypatch.setattr(race_module, "noise_at", by_rank)


def too_low_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that could still win are left out."""
    real = race_module.threshold
    monkeypatch.setattr(
        race_module, "threshold", lambda top, t, distance: real(top, t, distance + 4.0)
    )


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("plant", [one_noise_for_all_rows, noise_by_rank, too_low_a_bound])
def test_the_comparison_finds_planted_faults(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert sum(num_different(seed) for seed in range(4)) > 0


Known = tuple[NDArray[np.int64], NDArray[np.float64], float]
"""Of the tokens with large noise: ids, noise, and the bound that it exceeds."""


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 0.3, 1.0, 2.0])
def test_kernels_choose_what_the_reference_chooses(dtype: torch.dtype, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    num_certain = 0
    for spread in (0.0, 1.0, 5.0):
        logits = (spread * torch.randn(60, 3_001, generator=generator)).to(dtype)
        logits[::7, ::5] = -math.inf
        for i, row in enumerate(logits):
            sequence = make_sequence(SamplingParams(temperature=temperature), seed=i)
            place = Place(sequence, 0, [])
            large = large_noise(place.stream, len(row))
            known: Known = (large.ids, large.noise, large.bound)
            found = sampled_by_kernel(row, temperature, place.stream.address(), known, MIN_NOISE)
            num_certain += found is not None
            assert found in (None, choose_row(row.float().numpy(), place))
    # Where all are alike too many could win.
    assert num_certain >= (120 if temperature < 2.0 else 60)


@needs_kernels
def test_kernels_leave_alone_what_is_too_close_to_tell() -> None:
    """Of two tokens whose sums differ by less than logarithms may."""
    stream = Stream(1, 0, 0)
    nothing: Known = (np.zeros(0, np.int64), np.zeros(0), 40.0)
    noise = noise_module.gumbel_noise(stream, 2_000)
    scores, num_close = np.full(2_000, -1e4, np.float32), 0
    for id in range(1, 2_000):
        scores[0], scores[id] = noise[id] - noise[0], 0.0
        difference = abs(float(scores[0]) + noise[0] - noise[id])
        found = sampled_by_kernel(
            torch.from_numpy(scores), 1.0, stream.address(), nothing, MIN_NOISE
        )
        assert (found is None) == (difference <= 1e-9)
        num_close += found is None
        scores[id] = -1e4
    assert num_close > 0


@needs_kernels
def test_kernels_tell_where_nothing_can_be_chosen() -> None:
    nothing: Known = (np.zeros(0, np.int64), np.zeros(0), 40.0)
    address = Stream(1, 0, 0).address()
    for value, expected in ((math.nan, -1), (-math.inf, -1), (math.inf, 5), (0.0, 5)):
        scores = torch.full((64,), -math.inf)
        scores[5] = value
        assert sampled_by_kernel(scores, 1.0, address, nothing, MIN_NOISE) == expected


def another_stream(scores: Tensor, temperature: float, stream: Any, *rest: Any) -> int | None:
    return sampled_by_kernel(scores, temperature, stream + np.uint64(1), *rest)


def too_low_a_bound_of_kernels(
    scores: Tensor, temperature: float, stream: Any, large: Known, least: float
) -> int | None:
    """Tokens that could still win are left out."""
    ids, noise, bound = large
    return sampled_by_kernel(scores, temperature, stream, (ids[:2], noise[:2], bound - 4.0), least)


def temperature_of_one(scores: Tensor, temperature: float, *rest: Any) -> int | None:
    return sampled_by_kernel(scores, 1.0, *rest)


@needs_kernels
@pytest.mark.parametrize("fault", [another_stream, too_low_a_bound_of_kernels, temperature_of_one])
def test_the_comparison_finds_faults_planted_into_kernels(
    fault: Callable[..., int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_module, "sampled", fault)
    assert sum(num_different(seed) for seed in range(4)) > 0


@pytest.mark.usefixtures("coarse_noise")
def test_the_comparison_finds_ties_that_go_to_the_highest_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def highest(contest: race_module.Contest, noise: noise_module.Noise) -> int:
        totals = dict(zip(contest.ids.tolist(), (contest.values + noise).tolist(), strict=True))
        totals.setdefault(contest.leader, contest.leader_value)
        return max(totals, key=lambda token_id: (totals[token_id], token_id))

    monkeypatch.setattr(race_module.Contest, "winner", highest)
    assert num_ties_different() > 0


def test_the_comparison_finds_greedy_ties_that_go_to_the_highest_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def highest(logits: Tensor) -> list[int]:
        return [int(row.shape[0] - 1 - row.flip(0).argmax()) for row in logits.float()]

    monkeypatch.setattr(choose_module, "first_largest", highest)
    assert sum(num_different(seed) for seed in range(4)) > 0


# --- the values of earlier versions ---


def golden_logits(num_rows: int, vocab_size: int) -> Tensor:
    """Multiples of 1/64 from whole numbers alone, so that every machine has the same."""
    columns = np.arange(vocab_size, dtype=np.uint64)[None]
    rows = np.arange(num_rows, dtype=np.uint64)[:, None]
    words = columns * np.uint64(0x9E3779B97F4A7C15)
    words = words + (rows + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    uniform = (words >> np.uint64(40)).astype(np.float64) / 2**24
    return torch.from_numpy(np.round(64 * 24 * uniform**3).astype(np.float32) / 64)


GOLDEN_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 4.0},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 200, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3},
)
GOLDEN: dict[int, list[list[list[int]]]] = {
    97: [
        [[90, 16, 1, 91], [62, 16, 1, 22]],
        [[90, 16, 1, 91], [62, 94, 1, 22]],
        [[38, 37, 77, 91], [38, 13, 1, 18]],
        [[90, 16, 1, 91], [62, 94, 1, 22]],
        [[90, 16, 1, 91], [62, 16, 1, 22]],
        [[90, 29, 1, 91], [62, 94, 1, 94]],
        [[90, 16, 9, 91], [62, 94, 9, 22]],
    ],
    49152: [
        [[17817, 9123, 26594, 7573], [24839, 24112, 31007, 22245]],
        [[17817, 9123, 26594, 7573], [24839, 24112, 31007, 13958]],
        [[17817, 9123, 26594, 7573], [30328, 24112, 31007, 13958]],
        [[25936, 13485, 33571, 24500], [28377, 46829, 12920, 11634]],
        [[17817, 9123, 26594, 7573], [24839, 24112, 31007, 13958]],
        [[17817, 9123, 26594, 7573], [24839, 24112, 31007, 13958]],
        [[4057, 30734, 42649, 6207], [12321, 29735, 31007, 40119]],
    ],
    151936: [
        [[66301, 84173, 137780, 7573], [133536, 24112, 31007, 108732]],
        [[17817, 84173, 137780, 145959], [133536, 24112, 31007, 108732]],
        [[120601, 134831, 137780, 145959], [133536, 24112, 132297, 108732]],
        [[25936, 13485, 133516, 24500], [115136, 95466, 116885, 51787]],
        [[66301, 84173, 137780, 7573], [115304, 24112, 31007, 108732]],
        [[17817, 84173, 137780, 145959], [133536, 24112, 31007, 108732]],
        [[50059, 62236, 112194, 100178], [115136, 69503, 12920, 107308]],
    ],
}
"""By vocabulary, for each of the options in turn the choices of two seeds."""


@pytest.mark.parametrize("place", range(len(GOLDEN_OPTIONS)))
@pytest.mark.parametrize("vocab_size", GOLDEN)
def test_a_seed_means_these_tokens_for_good(vocab_size: int, place: int) -> None:
    options = GOLDEN_OPTIONS[place]
    logits = golden_logits(4, vocab_size)
    walks = []
    for seed, sample_index in ((0, 0), (2**64 - 1, 3)):
        params = SamplingParams(seed=seed, **options)
        sequence = make_sequence(params, seed=seed, sample_index=sample_index, token_ids=(1, 2))
        sequence.token_ids, sequence.num_prompt = [1, 2, 3], 3
        walks.append(Walk.chain(logits, sequence, [4, 5, 6]))
    found = [list(told(*each)) for each in zip(walks, choose(walks), strict=True)]
    assert found == GOLDEN[vocab_size][place]


# --- what it costs ---


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 5.0},
        {"temperature": 1.0, "top_p": 0.999},
        {"temperature": 0.7, "logit_bias": {3: 1.0}},
    ],
    ids=str,
)
def test_memory_does_not_grow_with_the_rows(options: dict[str, Any]) -> None:
    """Of numpy, which all copies are made with; in float64 the rows would take 78 MB."""
    vocab_size, num_rows = 151_936, 64
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(num_rows, vocab_size, generator=generator)
    sequence = make_sequence(SamplingParams(**options))
    choose([Walk.chain(logits[:1], sequence, [])])
    tracemalloc.start()
    try:
        choose([Walk.chain(row[None], make_sequence(sequence.params, seed=i), [])
                for i, row in enumerate(logits)])  # fmt: skip
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * choose_module.TILE_BYTES


@pytest.mark.usefixtures("by_numpy")
def test_few_tokens_get_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000: the survivors of filters alone, or those that are near the best."""
    num_drawn: list[int] = []
    real = race_module.noise_at

    def counting(streams: list[Stream], counts: list[int], ids: NDArray[np.int64]) -> Any:
        num_drawn.append(ids.shape[0])
        return real(streams, counts, ids)

    monkeypatch.setattr(race_module, "noise_at", counting)
    logits = 4.0 * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    for options in ({"top_k": 7}, {}, {"top_p": 0.5}, {"min_p": 0.2}):
        params = SamplingParams(temperature=0.7, **options)
        list(chosen(Walk.chain(logits, make_sequence(params), [])))
    assert num_drawn[0] == 7
    assert len(num_drawn) == 4
    assert max(num_drawn) < 500


def test_a_drafter_and_the_target_share_the_large_noise() -> None:
    """Also in the next step, of what was rejected; whatever the vocabulary is."""
    large_noise.cache_clear()
    sequence = make_sequence(SamplingParams(temperature=1.0))
    logits = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(0))
    for num_rows in (5, 6):
        list(chosen(Walk.chain(logits[:num_rows], sequence, [])))
    assert large_noise.cache_info().misses == 6


def test_rows_wait_only_for_a_path_they_need() -> None:
    constraint = AllowsMultiples(97, 1_000)
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    free = make_sequence(SamplingParams(temperature=1.0))
    bound = make_sequence(SamplingParams(temperature=1.0), constraint=constraint)
    ahead: list[int] = []
    walks = [Walk.chain(logits, free, []), Walk.chain(logits, bound, ahead)]
    first, second = map(told, walks, choose(walks))
    assert len(list(first)) == 3
    assert constraint.num_asked == 0
    for num_asked, token_id in enumerate(second, start=1):
        ahead.append(token_id)
        assert constraint.num_asked == num_asked


# --- one bad row ---


class Fails:
    """A constraint with a bug."""

    def allowed(self, output_ids: list[int], ahead: list[int]) -> None:
        raise ZeroDivisionError("a bug")


def sampled(seed: int, **options: Any) -> Sequence:
    return make_sequence(SamplingParams(temperature=1.0, max_tokens=50, **options), seed=seed)


def test_what_one_row_raises_is_raised_for_that_row_alone() -> None:
    logits = torch.randn(4, 2, 97, generator=torch.Generator().manual_seed(0))
    logits[2] = -math.inf
    broken = make_sequence(SamplingParams(temperature=1.0), constraint=Fails())
    stuck = sampled(3, min_tokens=9)
    stuck.stop_ids = frozenset(range(97))
    sequences = [sampled(1), stuck, sampled(4), broken]
    walks = [Walk.chain(own, each, [0]) for own, each in zip(logits, sequences, strict=True)]
    good, nothing_left, no_numbers, bug = map(told, walks, choose(walks))
    assert list(good) == list(by_reference(walks[0]))
    with pytest.raises(RequestError, match="min_tokens is 9, but every token"):
        next(nothing_left)
    assert list(no_numbers) == [NO_CHOICE] * 2
    with pytest.raises(ZeroDivisionError):
        next(bug)


def test_rows_that_cannot_be_chosen_together_are_chosen_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(rows: Any) -> list[int]:
        raise MemoryError

    monkeypatch.setattr(choose_module, "winners", fails)
    assert num_different(0) == 0
    assert "chosen alone" in caplog.text


def test_verify_ends_the_bad_row_and_keeps_the_others() -> None:
    stuck = sampled(3, min_tokens=9)
    stuck.stop_ids = frozenset(range(97))
    rows = []
    for sequence in (sampled(1), stuck, sampled(2)):
        sequence.num_cached = len(sequence.token_ids) - 1
        rows.append(Row(sequence, sequence.token_ids[-1:], 0))
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    verdicts = verify(ForwardPlan.of_chains(rows, [[], [], []]), logits)
    assert [len(verdict.token_ids) for verdict in verdicts] == [1, 0, 1]
    assert "min_tokens is 9" in str(verdicts[1].error)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
def test_a_draft_from_the_targets_own_logits_is_kept_whole(temperature: float) -> None:
    """And every slot has noise of its own: equal logits give different tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5_000, generator=generator).expand(9, -1)
    sequence = make_sequence(SamplingParams(temperature=temperature), seed=11)
    sequence.num_cached = len(sequence.token_ids) - 1
    (choice_at,) = choose([Walk.chain(logits[:8], sequence, [])])
    draft = [choice_at(index) for index in range(8)]
    (verdict,) = verify(
        ForwardPlan.of_chains([Row(sequence, sequence.token_ids[-1:], 8)], [draft]), logits
    )
    assert verdict.num_accepted == 8
    assert len(set(draft)) == (1 if temperature == 0.0 else 8)


class Written(np.ndarray[Any, np.dtype[np.float32]]):
    """Counts how often values are put into it, and into its copies."""

    num_times = 0

    def __setitem__(self, place: Any, value: Any) -> None:
        Written.num_times += 1
        super().__setitem__(place, value)


def test_thousands_of_biases_are_added_at_once_with_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, vocab_size = random.Random(5), 9000
    biases = {i: draw.uniform(-100.0, 100.0) for i in draw.sample(range(vocab_size), 5000)}
    scores = np.random.default_rng(5).normal(0.0, 9.0, vocab_size).astype(np.float32)
    scores[:3] = np.inf, -np.inf, np.nan
    expected = scores.copy()
    for token_id, bias in biases.items():
        expected[token_id] += np.float32(bias)
    sequence = make_sequence(SamplingParams(logit_bias=biases))
    monkeypatch.setattr(Written, "num_times", 0)
    found = processed(scores.view(Written), Place(sequence, 0, []))
    assert found.tobytes() == expected.tobytes()
    assert Written.num_times < 3
