"""The choice rule against exact probabilities, on a vocabulary that can be enumerated.

Equality with plain decoding says that drafting changes nothing; this says that what it leaves
unchanged is a sample of the target's distribution. Outputs of three tokens, verified block by block
with drafts of several kinds, are counted and compared with the joint distribution.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockdraft.core.plan import ForwardPlan
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.proof.faults import redraw_rejected
from blockdraft.speculate.sampler.choose import choices
from blockdraft.speculate.verify import Verdict, verify

VOCAB = 8
LENGTH = 3
PROMPT = (2, 6)
LEAST_P = 1e-3
"""Another distribution is what gives its counts a smaller p-value. Seeds are fixed, so that a right
rule does not fail once in a while."""

Draft = Callable[[Sequence], list[int]]
Verify = Callable[[ForwardPlan, Tensor], list[Verdict]]

SAMPLINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "temperature": {"temperature": 0.7},
        "top_k": {"temperature": 0.7, "top_k": 3},
        "top_p": {"temperature": 0.7, "top_p": 0.8},
        "all_filters": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
        "rare_tokens": {"temperature": 1.0},
    }
)


@dataclass(frozen=True, slots=True)
class DistributionCheck:
    """Pearson's chi-square of the joint counts of three tokens, and of each token alone.

    p_value: the smallest of them. planted: draws with a fault, which must not pass.
    """

    name: str
    num_draws: int
    p_value: float
    planted: bool = False

    @property
    def is_right(self) -> bool:
        """True if the counts are those of the distribution, or the fault was found."""
        return (self.p_value > LEAST_P) != self.planted


def check_sampling(name: str, num_draws: int) -> DistributionCheck:
    """Draw with one of SAMPLINGS."""
    return DistributionCheck(name, num_draws, _p_value_of(name, num_draws, verify))


def check_planted(num_draws: int) -> DistributionCheck:
    """Draw again after each rejection, as if rejection sampling had been misunderstood."""
    p_value = _p_value_of("temperature", num_draws, redraw_rejected)
    return DistributionCheck("a redraw after a rejection", num_draws, p_value, planted=True)


def _p_value_of(name: str, num_draws: int, verify_block: Verify) -> float:
    counts = count_outputs(name, num_draws, verify_block)
    expected = exact_joint(make_table(name), sampling_params(name))
    others = ((1, 2), (0, 2), (0, 1))
    alone = [p_value(counts.sum(axes), expected.sum(axes)) for axes in others]
    return min(p_value(counts, expected), *alone)


def sampling_params(name: str) -> SamplingParams:
    """The parameters of one of SAMPLINGS."""
    return SamplingParams(max_tokens=LENGTH, seed=20 + len(name), **SAMPLINGS[name])


def count_outputs(name: str, num_draws: int, verify_block: Verify = verify) -> Tensor:
    """How often each output of three tokens was drawn, [V, V, V]; three drafters take turns."""
    table, params = make_table(name), sampling_params(name)
    drafts = [draft_likeliest(table), draft_randomly(), draft_with_the_noise(table)]
    counts = torch.zeros((VOCAB,) * LENGTH)
    for index in range(num_draws):
        first, second, third = sample(table, params, index, drafts[index % 3], verify_block)
        counts[first, second, third] += 1
    return counts


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


def sample(
    table: Tensor, params: SamplingParams, index: int, draft: Draft, verify_block: Verify = verify
) -> list[int]:
    """Three tokens, verified in blocks of as many as `draft` gives."""
    sequence = make_sequence(params, index)
    while sequence.num_output < LENGTH:
        guessed = draft(sequence)[: LENGTH - 1 - sequence.num_output]
        tokens = sequence.token_ids[-2:] + guessed
        logits = torch.stack([table[a, b] for a, b in itertools.pairwise(tokens)])
        row = Row(sequence, tokens[1:2], len(guessed))
        (verdict,) = verify_block(ForwardPlan.of_chains([row], [guessed]), logits)
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


def draft_randomly() -> Draft:
    """Pairs of random tokens, the same each time."""
    generator = np.random.default_rng(3)
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


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square of outcome counts against exact probabilities, of any shape.

    Outcomes expected less than five times share one bin. 0 if an impossible one occurred.
    """
    counts, probabilities = counts.double().flatten(), probabilities.double().flatten()
    if counts[probabilities == 0.0].sum() > 0:
        return 0.0
    expected = counts.sum() * probabilities
    common = expected >= 5.0
    found, wanted = counts[common], expected[common]
    rare = expected[~common].sum()
    if rare >= 5.0:
        found = torch.cat([found, counts[~common].sum()[None]])
        wanted = torch.cat([wanted, rare[None]])
    statistic = ((found - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((wanted.shape[0] - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2.0))
