"""Sampling has the target's exact distribution, however the tokens were drafted.

200,000 outputs of three tokens over a vocabulary of 8, verified block by block, against exact
enumeration.
"""

import math
from collections.abc import Sequence as Ids

import pytest
import torch
from torch import Tensor

from blockdraft.core.plan import ROOT, ForwardPlan, Proposal, Tree
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.proof.distribution import (
    PROMPT,
    SAMPLINGS,
    VOCAB,
    Draft,
    count_outputs,
    draft_likeliest,
    exact_joint,
    exact_row,
    make_sequence,
    make_table,
    sample,
    sampling_params,
)
from blockdraft.speculate.sampler.choose import choices
from blockdraft.speculate.verify import verify
from tests.fakes import RandomDrafter, TableTarget
from tests.parity.checks import (
    check_distribution,
    check_drafted_equals_plain,
    generate,
    generate_plain,
)

NUM_SAMPLES = 40_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLINGS)
def test_three_tokens_have_the_exact_joint_distribution(name: str) -> None:
    counts, expected = (
        count_outputs(name, NUM_SAMPLES),
        exact_joint(make_table(name), sampling_params(name)),
    )
    assert float(expected.sum()) == pytest.approx(1.0)
    check_distribution(counts, expected)
    for axes in ((1, 2), (0, 2), (0, 1)):
        check_distribution(counts.sum(axes), expected.sum(axes))


def test_the_engine_draws_the_same_samples() -> None:
    """What was counted above is what the engine returns."""
    for name in SAMPLINGS:
        table, params = make_table(name), sampling_params(name)
        target = TableTarget(table)
        for index in range(100):
            result = check_drafted_equals_plain(
                target, RandomDrafter(2, VOCAB, index), PROMPT, params, sample_index=index
            )
            assert result.token_ids == sample(table, params, index, draft_likeliest(table))


class SiblingDrafter(RandomDrafter):
    """Several tokens for the next position."""

    def propose(self, rows: Ids[Row]) -> list[Proposal]:
        return [self._siblings(row) for row in rows]

    def _siblings(self, row: Row) -> Proposal:
        tokens = tuple(dict.fromkeys(self.guess(row.sequence, row.num_draft_tokens)))
        tree = Tree(tokens, (ROOT,) * len(tokens))
        return Proposal(tree, (1.0,) * len(tree), (self.kind,) * len(tree))


def test_the_engine_draws_the_same_samples_with_trees() -> None:
    num_kept = 0
    for name in SAMPLINGS:
        table, params = make_table(name), sampling_params(name)
        target = TableTarget(table)
        for index in range(25):
            result = generate(
                target,
                SiblingDrafter(2, VOCAB, index),
                PROMPT,
                params,
                sample_index=index,
                after_step=lambda engine, _: engine.use_fixed_drafting(5),
            )
            assert result.token_ids == sample(table, params, index, draft_likeliest(table))
            num_kept += result.acceptance.accepted_at[0, 1]
    assert num_kept > 10


def keep_rate(target: Tensor, params: SamplingParams, draft: Draft, num: int) -> float:
    """How often the target keeps a first draft; logits [V]."""
    kept = 0
    for index in range(num):
        sequence = make_sequence(params, index)
        rows = target[None].expand(2, VOCAB)
        guess = draft(sequence)[:1]
        (verdict,) = verify(ForwardPlan.of_chains([Row(sequence, [PROMPT[1]], 1)], [guess]), rows)
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


@pytest.mark.one_in(4)
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
