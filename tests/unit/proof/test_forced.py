"""Teacher forcing: what separates a near-tie from a violation."""

from dataclasses import replace

import pytest
import torch

from blockdraft import LLM, SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.proof import faults
from blockdraft.proof.cases import Case
from blockdraft.proof.corpus import ProofPrompt
from blockdraft.proof.differences import first_differences
from blockdraft.proof.forced import (
    Noise,
    classify,
    forced_logits,
    judged_differences,
    max_margin,
    measure_noise,
)
from blockdraft.proof.ways import PLAIN, Output, run
from blockdraft.speculate.sampler.choose import choices
from blockdraft.speculate.sampler.margin import MOST_MARGIN, PRECISION, margin_of
from tests.small_llm import assert_nothing_left

SAMPLINGS = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.3},
)


def make_case(llm: LLM, **sampling: object) -> Case:
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True, **sampling)
    ids = tuple(llm.tokenizer.encode("the abc " * 12))
    return Case(ProofPrompt("p", "k", ""), ids, "s", params)


def decode(llm: LLM, case: Case) -> Output:
    return run(llm, [case], PLAIN)[case]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_plain_output_is_made_of_choices(llm: LLM, sampling: dict[str, object]) -> None:
    case = make_case(llm, **sampling)
    assert max_margin(llm.engine, case, 0, decode(llm, case)[0].token_ids) == 0.0
    assert_nothing_left(llm)


def test_a_minimum_length_is_followed_by_force_too(llm: LLM) -> None:
    """An end that was wanted and not allowed yet says nothing against the token that came."""
    case = make_case(llm)
    end = llm.tokenizer.encode("a")[0]
    params = replace(case.params, min_tokens=9, logit_bias={end: 100.0})
    case = replace(case, params=params, stop_ids=frozenset({end}))
    params = replace(params, stop_token_ids=(end,))
    output = decode(llm, replace(case, params=params))
    assert output[0].token_ids.index(end) == 9
    assert max_margin(llm.engine, case, 0, output[0].token_ids) == 0.0


def test_a_sample_is_judged_whatever_the_others_are(llm: LLM) -> None:
    """A near-tie of the first sample does not hide what is wrong with the second."""
    case = make_case(llm)
    (sample,) = decode(llm, case)
    rows = [*forced_logits(llm.engine, case.prompt_ids, sample.token_ids, 1)]
    ids = list(sample.token_ids)
    second, last = (int(token_id) for token_id in rows[-1].float().argsort()[[-2, 0]])
    drafted = [replace(sample, token_ids=(*ids[:-1], other)) for other in (second, last)]
    lead = max_margin(llm.engine, case, 0, drafted[0].token_ids)
    noise = Noise(largest=lead, mean=0.0, num_positions=1, shapes=(1,))
    found = judged_differences(llm.engine, case, tuple(drafted), (sample, sample), noise)
    assert [one.verdict for one in found] == ["near-tie", "violation"]


def test_all_shapes_give_the_same_bits_in_exact_mode(llm: LLM) -> None:
    case = make_case(llm)
    ids = decode(llm, case)[0].token_ids
    runs = [torch.stack([*forced_logits(llm.engine, case.prompt_ids, ids, n)]) for n in (1, 5, 16)]
    assert runs[0].shape[0] == len(ids)
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert measure_noise(llm.engine, [(case, decode(llm, case))]).largest == 0.0


def test_noise_is_what_shapes_make(llm: LLM) -> None:
    case = make_case(llm)
    output = decode(llm, case)
    with faults.attention_by_company(llm.engine):
        noise = measure_noise(llm.engine, [(case, output)])
    assert 0.0 < noise.mean <= noise.largest < 1e-3
    assert noise.num_positions == 20
    assert noise.shapes == (1, 6, 16)


def test_a_wrong_token_anywhere_is_a_violation(llm: LLM) -> None:
    case = make_case(llm)
    plain = decode(llm, case)
    noise = Noise(largest=1e-3, mean=1e-4, num_positions=9, shapes=(1, 6))
    ids = list(plain[0].token_ids)
    ids[-2] = (ids[-2] + 1) % llm.engine.target.vocab_size
    drafted = (replace(plain[0], token_ids=tuple(ids)),)
    (found,) = first_differences(case, drafted, plain, bits=False)
    assert found.index == len(ids) - 2
    judged = classify(llm.engine, case, found, drafted, noise)
    assert judged.verdict == "violation"
    assert judged.is_failure
    assert judged.margin is not None
    assert judged.margin > noise.largest
    tied = classify(llm.engine, case, found, drafted, replace(noise, largest=judged.margin))
    assert tied.verdict == "near-tie"
    assert not tied.is_failure


def test_noise_explains_no_other_end_after_the_same_tokens(llm: LLM) -> None:
    case = make_case(llm)
    plain = decode(llm, case)
    generous = Noise(largest=MOST_MARGIN, mean=1.0, num_positions=9, shapes=(1, 6))
    for changed in (
        replace(plain[0], text=plain[0].text + "!"),
        replace(plain[0], finish_reason="stop"),
        replace(plain[0], token_ids=plain[0].token_ids[:-1]),
    ):
        (found,) = first_differences(case, (changed,), plain, bits=False)
        assert classify(llm.engine, case, found, (changed,), generous).verdict == "violation"


def test_a_near_tie_explains_no_end_that_its_tokens_do_not_give(llm: LLM) -> None:
    case = make_case(llm)
    plain = decode(llm, case)
    generous = Noise(largest=MOST_MARGIN, mean=1.0, num_positions=9, shapes=(1, 6))
    ids = list(plain[0].token_ids)
    ids[3] += 1 if ids[3] < 200 else -1
    other = replace(plain[0], token_ids=tuple(ids))
    stops = replace(case, params=replace(case.params, stop=("a",)))
    for on, changed, verdict in (
        (case, other, "near-tie"),
        (case, replace(other, token_ids=tuple(ids[:-4])), "violation"),
        (case, replace(other, finish_reason="stop"), "violation"),
        (replace(case, stop_ids=frozenset(ids[5:6])), other, "violation"),
        (stops, replace(other, token_ids=tuple(ids[:-4]), finish_reason="stop"), "near-tie"),
        (stops, replace(other, token_ids=tuple(ids[:-4])), "violation"),
        (stops, replace(other, finish_reason="stop"), "near-tie"),  # with the last token
    ):
        (found,) = first_differences(on, (changed,), plain, bits=False)
        assert classify(llm.engine, on, found, (changed,), generous).verdict == verdict


def test_what_follows_a_near_tie_is_looked_at_too(llm: LLM) -> None:
    """The first difference is small; a later token that nothing explains makes it a violation."""
    case = make_case(llm)
    plain = decode(llm, case)
    ids = list(plain[0].token_ids)
    rows = [*forced_logits(llm.engine, case.prompt_ids, ids, 1)]
    second = rows[3].float().topk(2).indices[1]
    ids[3] = int(second)
    near = max_margin(llm.engine, case, 0, ids[:4])
    assert 0.0 < near < MOST_MARGIN
    last = [*forced_logits(llm.engine, case.prompt_ids, ids, 1)][-1]
    ids[-1] = int(last.argmin())
    assert max_margin(llm.engine, case, 0, ids) > near


def sequence(**sampling: object) -> Sequence:
    return Sequence(0, SamplingParams(seed=3, **sampling), 3, 0, frozenset(), [1, 2], 2)


def test_a_greedy_margin_is_the_lead() -> None:
    logits = torch.tensor([0.5, 2.0, 1.25, -60.0, -90.0])
    assert margin_of(logits, sequence(), 1) == 0.0
    for token_id, lead in ((0, 1.5), (2, 0.75), (3, 62.0)):
        found = margin_of(logits, sequence(), token_id)
        # A tie goes to the lowest id.
        assert lead - 1e-6 <= found <= lead + 2 * PRECISION
    assert margin_of(logits, sequence(), 4) == MOST_MARGIN


@pytest.mark.parametrize("sampling", SAMPLINGS[1:])
def test_a_margin_is_the_least_rise_that_makes_a_token_the_choice(
    sampling: dict[str, object],
) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    own = sequence(**sampling)
    choice = next(choices(logits[None], own, []))
    for token_id in set(range(0, 40, 7)) - {choice}:
        margin = margin_of(logits, own, token_id)
        assert 0.0 < margin < MOST_MARGIN
        for extra, is_choice in ((PRECISION, True), (-2 * PRECISION, False)):
            risen = logits.clone()
            risen[token_id] += margin + extra
            assert (next(choices(risen[None], own, [])) == token_id) == is_choice
    assert margin_of(logits, own, choice) == 0.0


def test_a_choice_that_barely_passes_a_filter_leads_by_as_little() -> None:
    """Had the third token been rounded down, top-k 2 would have let another one pass."""
    logits = torch.tensor([5.0, 1.0, 1.01, -9.0])
    for seed in range(200):
        own = Sequence(0, SamplingParams(temperature=4.0, top_k=2), seed, 0, frozenset(), [1], 1)
        if next(choices(logits[None], own, [])) == 2:
            other = logits.clone()
            other[2] -= 0.02
            without = next(choices(other[None], own, []))
            assert margin_of(logits, own, without) <= 0.01 + 2 * PRECISION
            break
    else:
        pytest.fail("no seed chooses the token at the border")
