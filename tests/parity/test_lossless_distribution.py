"""Sampling has the target's exact distribution, however the tokens were drafted.

200,000 outputs of three tokens over a vocabulary of 8, verified block by block, against exact
enumeration.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.speculate.choice import choices
from blockdraft.speculate.verify import verify
from tests.fakes import RandomDrafter, TableTarget
from tests.parity.checks import check_distribution, check_drafted_equals_plain, generate_plain

VOCAB = 8
LENGTH = 3
NUM_SAMPLES = 40_000
PROMPT = (2, 6)
Draft = Callable[[Sequence], list[int]]

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "all_filters": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "rare_tokens": {"temperature": 1.0},
}


def make_table(name: str) -> Tensor:
    """Logits after each two tokens; with rare ones, half of the tokens have chances near 1e-3."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn((VOCAB,) * 3, generator=generator)
    if name == "rare_tokens":
        table[:, :, ::2] -= 5.0
    return table


def exact_row(logits: Tensor, params: SamplingParams) -> list[float]:
    """Probabilities of the next token by the definitions of temperature and filters."""
    scaled = [value / params.temperature for value in logits.double().tolist()]
    ids = sorted(range(VOCAB), key=lambda i: (-scaled[i], i))[: params.top_k or None]
    weights = {i: math.exp(scaled[i] - scaled[ids[0]]) for i in ids}
    total, reached, kept = math.fsum(weights.values()), 0.0, []
    for i in ids:
        kept.append(i)
        reached += weights[i]
        if reached >= params.top_p * total:
            break
    kept = [i for i in kept if weights[i] >= params.min_p]
    return [
        weights[i] / math.fsum(weights[j] for j in kept) if i in kept else 0.0 for i in range(VOCAB)
    ]


def exact_joint(table: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [V, V, V] of the three tokens after PROMPT."""
    rows = torch.tensor(
        [[exact_row(table[a, b], params) for b in range(VOCAB)] for a in range(VOCAB)],
        dtype=torch.float64,
    )
    first = rows[PROMPT[0], PROMPT[1]]
    second = rows[PROMPT[1]]
    return first[:, None, None] * second[:, :, None] * rows


def make_sequence(params: SamplingParams, index: int) -> Sequence:
    """A fresh sequence; samples of one seed differ by their index."""
    assert params.seed is not None
    sequence = Sequence(0, params, params.seed, index, frozenset(), [*PROMPT], len(PROMPT))
    sequence.num_cached = len(PROMPT) - 1
    return sequence


def sample(table: Tensor, params: SamplingParams, index: int, draft: Draft) -> list[int]:
    """Three tokens, verified in blocks of as many as `draft` gives."""
    sequence = make_sequence(params, index)
    while sequence.num_output < LENGTH:
        guessed = draft(sequence)[: LENGTH - 1 - sequence.num_output]
        tokens = sequence.token_ids[-2:] + guessed
        logits = torch.stack([table[a, b] for a, b in itertools.pairwise(tokens)])
        (verdict,) = verify([guessed], logits, [Row(sequence, tokens[1:2], len(guessed))])
        for token_id in verdict.token_ids:
            sequence.append(token_id)
        sequence.num_cached = len(sequence.token_ids) - 1
    return sequence.output_ids


def draft_likeliest(table: Tensor) -> Draft:
    """Chains of the most likely token: what a drafter without the noise proposes."""
    best = table.argmax(dim=-1).tolist()

    def draft(sequence: Sequence) -> list[int]:
        a, b = sequence.token_ids[-2:]
        first = best[a][b]
        return [first, best[b][first]]

    return draft


def draft_randomly(seed: int) -> Draft:
    generator = np.random.default_rng(seed)
    guesses = itertools.cycle(generator.integers(0, VOCAB, (1021, 2)).tolist())
    return lambda sequence: next(guesses)


def draft_with_the_noise(table: Tensor) -> Draft:
    """What our own drafter does: the choice rule on its logits, here those of a worse model."""
    generator = torch.Generator().manual_seed(8)
    own = table + 0.7 * torch.randn(table.shape, generator=generator)

    def draft(sequence: Sequence) -> list[int]:
        a, b = sequence.token_ids[-2:]
        first = next(choices(own[a, b][None], sequence, []))
        rows = own[b, first][None].expand(2, VOCAB)
        guesses = choices(rows, sequence, [first])
        next(guesses)
        return [first, next(guesses)]

    return draft


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_have_the_exact_joint_distribution(name: str) -> None:
    table = make_table(name)
    params = SamplingParams(max_tokens=LENGTH, seed=20 + len(name), **SETTINGS[name])
    drafts = [draft_likeliest(table), draft_randomly(3), draft_with_the_noise(table)]
    counts = torch.zeros((VOCAB,) * LENGTH)
    for index in range(NUM_SAMPLES):
        first, second, third = sample(table, params, index, drafts[index % 3])
        counts[first, second, third] += 1
    expected = exact_joint(table, params)
    assert float(expected.sum()) == pytest.approx(1.0)
    check_distribution(counts, expected)
    for axes in ((1, 2), (0, 2), (0, 1)):
        check_distribution(counts.sum(axes), expected.sum(axes))


def test_the_engine_draws_the_same_samples() -> None:
    """What was counted above is what the engine returns."""
    for name, options in SETTINGS.items():
        table = make_table(name)
        params = SamplingParams(max_tokens=LENGTH, seed=20 + len(name), **options)
        target = TableTarget(table)
        for index in range(100):
            result = check_drafted_equals_plain(
                target, RandomDrafter(2, VOCAB, index), PROMPT, params, sample_index=index
            )
            assert result.token_ids == sample(table, params, index, draft_likeliest(table))


def keep_rate(target: Tensor, params: SamplingParams, draft: Draft, num: int) -> float:
    """How often the target keeps a first draft; logits [V]."""
    kept = 0
    for index in range(num):
        sequence = make_sequence(params, index)
        rows = target[None].expand(2, VOCAB)
        guess = draft(sequence)[:1]
        (verdict,) = verify([guess], rows, [Row(sequence, [PROMPT[1]], 1)])
        kept += verdict.num_accepted
    return kept / num


def test_a_fixed_draft_is_kept_with_the_targets_probability() -> None:
    num, logits = 4000, make_table("temperature")[PROMPT]
    params = SamplingParams(max_tokens=9, temperature=0.7, seed=91)
    exact = exact_row(logits, params)
    for token_id in (int(logits.argmax()), int(logits.argmin())):
        rate = keep_rate(logits, params, lambda _, guess=token_id: [guess], num)
        sigma = math.sqrt(exact[token_id] * (1 - exact[token_id]) / num)
        assert abs(rate - exact[token_id]) < 4 * sigma


@pytest.mark.parametrize("distance", [0.0, 0.3, 1.0, 3.0])
def test_drafts_that_share_the_noise_are_kept_within_the_known_bounds(distance: float) -> None:
    """From (1 - d) / (1 + d) (Daliri et al.) to 1 - d, with d the total variation distance."""
    num, target = 4000, make_table("temperature")[PROMPT]
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    own = target + distance * noise
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=92)
    rate = keep_rate(target, params, lambda sequence: list(choices(own[None], sequence, [])), num)
    apart = float((target.double().softmax(0) - own.double().softmax(0)).abs().sum() / 2)
    tolerance = 4 * math.sqrt(0.25 / num)
    assert (1 - apart) / (1 + apart) - tolerance <= rate <= 1 - apart + tolerance
    if distance == 0.0:
        assert rate == 1.0


def test_a_draft_that_the_filters_forbid_is_never_kept() -> None:
    logits = make_table("top_k")[PROMPT]
    params = SamplingParams(max_tokens=9, temperature=5.0, top_k=2, seed=93)
    forbidden = logits.argsort(descending=True)[2:].tolist()
    for token_id in forbidden:
        assert keep_rate(logits, params, lambda _, guess=token_id: [guess], 200) == 0.0


def test_a_seed_means_one_text_and_no_seed_another_each_time() -> None:
    target = TableTarget.random(97, seed=2)
    seeded = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    texts = [generate_plain(target, PROMPT, seeded).token_ids for _ in range(2)]
    assert texts[0] == texts[1]
    free = SamplingParams(max_tokens=20, temperature=1.0)
    texts = [generate_plain(target, PROMPT, free).token_ids for _ in range(2)]
    assert texts[0] != texts[1]


def test_a_temperature_near_zero_equals_greedy() -> None:
    target = TableTarget.random(97, seed=2)
    greedy = generate_plain(target, PROMPT, SamplingParams(max_tokens=30)).token_ids
    for seed in range(5):
        cold = SamplingParams(max_tokens=30, temperature=1e-5, seed=seed)
        assert generate_plain(target, PROMPT, cold).token_ids == greedy
