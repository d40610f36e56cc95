"""Trees that a block-diffusion drafter proposes: best first, with the request's own noise."""

import itertools
import random

import numpy as np
import pytest
import torch

from blockdraft.allocation.best_rate import BestRate
from blockdraft.cli.options import llm_config
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError
from blockdraft.core.grammar import Grammar
from blockdraft.core.plan import ROOT
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.engine.engine import Engine
from blockdraft.speculate.drafters.branches import Marginals, Slot, best_first
from blockdraft.speculate.drafters.slots import Guessable, chosen_slots, slots_of
from blockdraft.speculate.sampler.choose import choices
from blockdraft.speculate.sampler.filters import survivors
from blockdraft.speculate.sampler.logits import Place, processed
from blockdraft.speculate.sampler.noise import gumbel_noise
from blockdraft.speculate.sampler.reference import choose_row
from tests.parity.proposals import PROMPT, check_output
from tests.parity.targets import WAYS, make_dflash, make_target
from tests.small_llm import check_grammar, load_llm
from tests.tiny import (
    VOCAB_SIZE,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

BLOCK = 6


def random_slots(draw, num_slots, num_tokens):
    slots = []
    for _ in range(num_slots):
        weights = sorted((draw.random() ** 3 for _ in range(num_tokens)), reverse=True)
        tokens = draw.sample(range(100), num_tokens)
        slots.append(Slot(tokens, [weight / sum(weights) for weight in weights]))
    return slots


def every_path(slots):
    """Of all paths, those of one token included, the ranks and the probability."""
    for depth in range(1, len(slots) + 1):
        for ranks in itertools.product(*(range(len(slot.token_ids)) for slot in slots[:depth])):
            chances = [slot.probabilities[rank] for slot, rank in zip(slots, ranks, strict=False)]
            yield ranks, float(np.prod(chances))


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_holds_the_chain_and_the_most_probable_other_paths(seed):
    draw = random.Random(seed)
    slots = random_slots(draw, draw.randint(1, 5), draw.randint(1, 4))
    paths = dict(every_path(slots))
    num_nodes = draw.randint(len(slots), 30)
    tree, probabilities = best_first(Marginals(slots), num_nodes)
    assert len(tree) == min(num_nodes, len(paths))
    assert list(probabilities) == sorted(probabilities, reverse=True)
    chain = [slot.token_ids[0] for slot in slots]
    assert [tree.tokens[node] for node in tree.through([])] == chain
    places = [{token: rank for rank, token in enumerate(slot.token_ids)} for slot in slots]
    found = {}
    for node, probability in enumerate(probabilities):
        tokens = [tree.tokens[one] for one in tree.path(node)]
        ranks = tuple(place[token] for place, token in zip(places, tokens, strict=False))
        found[ranks] = probability
        assert probability == pytest.approx(paths[ranks])
    branching = [ranks for ranks in paths if any(ranks)]
    best = sorted((paths[ranks] for ranks in branching), reverse=True)[: len(tree) - len(slots)]
    assert sorted((found[ranks] for ranks in found if any(ranks)), reverse=True) == pytest.approx(
        best
    )


def sample_of(**params):
    options = SamplingParams(seed=7, **params)
    return Sequence(0, options, 7, 2, frozenset(), list(PROMPT), len(PROMPT))


def random_logits(num_slots, num_tokens=300):
    generator = torch.Generator().manual_seed(1)
    return 3.0 * torch.randn(num_slots, num_tokens, generator=generator)


def test_without_noise_probabilities_are_the_drafters():
    logits = random_logits(4)
    chain = logits.argmax(1).tolist()
    for slot, own, first in zip(
        slots_of(logits, chain, sample_of(temperature=0.0), Guessable(300)),
        logits,
        chain,
        strict=True,
    ):
        assert slot.token_ids[0] == first
        expected, ids = own.double().softmax(0).topk(32)
        assert slot.token_ids == ids.tolist()
        assert slot.probabilities == pytest.approx(expected.tolist())


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_candidates_are_ranked_by_the_noise_that_chooses_the_targets_token(temperature):
    logits, sample = random_logits(3), sample_of(temperature=temperature)
    noisy = [
        own.double().numpy() + temperature * gumbel_noise(Place(sample, index, []).stream, 300)
        for index, own in enumerate(logits)
    ]
    chain = [int(own.argmax()) for own in noisy]
    for slot, own, scores in zip(
        slots_of(logits, chain, sample, Guessable(300)), logits, noisy, strict=True
    ):
        near = set(own.topk(32).indices.tolist())
        order = [i for i in np.argsort(-scores).tolist() if i in near]
        expected = [slot.token_ids[0], *(i for i in order if i != slot.token_ids[0])]
        assert slot.token_ids == expected
        assert slot.probabilities == sorted(slot.probabilities, reverse=True)
        assert 0.0 < sum(slot.probabilities) <= 1.0 + 1e-9 + slot.probabilities[0]


def test_a_small_draft_vocabulary_and_logits_that_are_no_numbers():
    ids = torch.tensor([5, 9, 30, 41])
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [torch.nan] * 4, [torch.inf, 0.0, 0.0, 0.0]])
    slots = slots_of(logits, [9, 0, 5], sample_of(temperature=0.0), Guessable(50, ids))
    assert slots[0].token_ids == [9, 30, 5, 41]
    assert slots[1:] == [Slot([0], [0.0]), Slot([5], [0.0])]
    tree, probabilities = best_first(Marginals(slots), 12)
    assert [tree.tokens[node] for node in tree.through([])] == [9, 0, 5]
    assert all(chance >= 0.0 for chance in probabilities)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("ids", [None, torch.arange(0, 5000, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_is_the_targets_rule_on_the_drafters_logits(temperature, ids, dtype):
    num = 5000 if ids is None else len(ids)
    logits, sample = random_logits(12, num).to(dtype), sample_of(temperature=temperature)
    guessable = Guessable(5000, ids)
    found = chosen_slots(logits, sample, guessable)
    for index, (slot, own) in enumerate(zip(found, logits, strict=True)):
        noise = gumbel_noise(Place(sample, index, []).stream, 5000)
        noisy = own.double().numpy() + temperature * noise[slice(None) if ids is None else ids]
        assert slot.token_ids[0] == guessable.token(int(noisy.argmax())), index
        assert len(slot.token_ids) >= 32
        assert slot.probabilities == sorted(slot.probabilities, reverse=True)


def test_a_token_beyond_the_most_likely_is_chosen_for_its_noise():
    """Of 5,000 tokens alike the noise chooses, and not the places among them."""
    logits = torch.zeros(20, 5000)
    found = chosen_slots(logits, sample_of(temperature=1.0), Guessable(5000))
    assert sum(slot.token_ids[0] >= 32 for slot in found) > 15


@pytest.mark.parametrize("temperature", [5e-324, 1e-300])
def test_a_temperature_next_to_zero_is_no_reason_for_a_warning(temperature):
    logits, greedy = random_logits(3), sample_of(temperature=0.0)
    sampled = sample_of(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1)
    found, expected = (chosen_slots(logits, one, Guessable(300)) for one in (sampled, greedy))
    assert [one.token_ids[0] for one in found] == [one.token_ids[0] for one in expected]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_are_no_reason_for_a_warning(bad):
    sample = sample_of(temperature=0.7, top_k=5, top_p=0.8, min_p=0.05)
    (slot,) = chosen_slots(torch.full((1, 300), bad), sample, Guessable(300))
    assert slot.token_ids[0] < 300


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 60}])
def test_a_slot_alone_is_what_it_is_behind_others(params):
    """`num_ahead` says whose noise it has."""
    logits, sample = random_logits(12), sample_of(**params)
    together = chosen_slots(logits, sample, Guessable(300))
    for index, slot in enumerate(together):
        (alone,) = chosen_slots(logits[index : index + 1], sample, Guessable(300), num_ahead=index)
        assert alone == slot


FILTERS = [{"top_k": 3}, {"top_k": 60}, {"top_p": 0.6}, {"top_p": 0.9}, {"min_p": 0.2}]


@pytest.mark.parametrize("params", FILTERS)
def test_choices_respect_filters(params):
    """Of top-p the border is estimated: it may leave a few tokens more, unlikely ones."""
    logits, sample = random_logits(12, 300), sample_of(temperature=0.8, **params)
    slots, num_same = chosen_slots(logits, sample, Guessable(300)), 0
    for index, (slot, own) in enumerate(zip(slots, logits.numpy(), strict=True)):
        left = set(survivors(own, sample.params).tolist())
        num_same += slot.token_ids[0] == choose_row(own, Place(sample, index, []))
        more = list(set(slot.token_ids) - left)
        assert torch.tensor(own / 0.8).softmax(0)[more].sum() <= 0.1 * ("top_p" in params)
    assert num_same >= 11


PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "nucleus": {"temperature": 0.7, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    "one token": {"temperature": 0.8, "top_k": 1, "min_tokens": 20},
    "few nodes": {"num_draft_tokens": 7},
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("way", WAYS)
def test_output_with_proposed_trees_is_plain_decoding(way, name):
    params = SamplingParams(max_tokens=30, seed=3, logprobs=1, **PARAMS[name])
    num_nodes = 7 if name == "few nodes" else 17
    with make_target(way, tiny_target()).released_after() as target:
        drafter = make_dflash(target, tiny_drafter(block_size=BLOCK))
        trees = check_output(target, drafter, params, 17)
    assert max(len(proposal) for _, proposal in trees) == num_nodes
    for row, proposal in trees:
        assert max(proposal.tree.depths) == min(BLOCK - 1, row.max_depth)
        assert len(proposal) <= row.num_draft_tokens
    assert not trees[1][1].tree.is_chain


def test_the_first_path_is_the_chain_that_is_drafted_without_trees():
    target, seen = make_target("paged", tiny_target()), []
    with target.released_after():
        drafter = make_dflash(target, tiny_drafter(block_size=BLOCK))
        real = drafter._slots

        def slots(logits, row, known=None):
            found = real(logits, row, known)
            seen.append([slot.token_ids[0] for slot in found])
            return found

        drafter._slots = slots
        engine = Engine(target, drafter)
        engine.use_fixed_drafting(12)
        engine.add(PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=1))
        while engine.has_work:
            for output in engine.step():
                if output.proposal:
                    tree = output.proposal.tree
                    assert [tree.tokens[node] for node in tree.through([])] == seen[-1]
                    assert tree.parents[0] == ROOT
    assert seen


def test_a_grammar_and_trees(tmp_path):
    folders = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path, block_size=BLOCK)
    acceptance = check_grammar(load_llm(folders, num_draft_tokens=15))
    assert any(rank for _, rank in acceptance.drafted_at)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1; give a whole number of at least 0"),
        ({"num_draft_tokens": 1025}, "num_draft_tokens is 1025; give at most 1024"),
        ({"draft_depth": 0}, "draft_depth is 0; give a whole number of at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        LLMConfig(**options)


def test_the_command_line_bounds_trees():
    given = {"exact": "on", "recheck": False}
    assert llm_config({**given, "num_draft_tokens": 15}) == LLMConfig(num_draft_tokens=15)
    assert llm_config({**given, "num_draft_tokens": None}) == LLMConfig()


def test_trees_are_drafted_as_they_pay_unless_asked_otherwise(tmp_path):
    folders = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path, block_size=BLOCK)
    for options, expected in (({}, 15), ({"num_draft_tokens": 9}, 9), ({"num_draft_tokens": 1}, 1)):
        llm = load_llm(folders, adaptive=True, **options)
        assert isinstance(llm.engine.allocator.policy, BestRate)
        project = llm.engine._costs.project
        assert project(2) < 0.1 * project(256) or project(256) == 0.0
        assert llm.engine.candidates.num_tree_nodes == expected
    assert load_llm(folders, num_draft_tokens=9).engine.candidates.num_tree_nodes == 9


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("num_nodes", [None, 12])
def test_a_block_drafter_says_how_likely_each_token_is(params, num_nodes):
    """Also of a plain chain."""
    target = make_target("sequential", tiny_target())
    proposals = []
    with target.released_after():
        engine = Engine(target, make_dflash(target, tiny_drafter(block_size=BLOCK)))
        if num_nodes is not None:
            engine.use_fixed_drafting(num_nodes)
        engine.add(PROMPT, SamplingParams(max_tokens=12, seed=1, **{"temperature": 0.0, **params}))
        while engine.has_work:
            proposals += [output.proposal for output in engine.step() if output.proposal]
    assert proposals
    for proposal in proposals:
        assert 0.0 < proposal.probabilities[0] < 1.0
        assert list(proposal.probabilities) == sorted(proposal.probabilities, reverse=True)


CHANGES = [
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.9, "logit_bias": {5: 3.0}, "min_tokens": 9, "top_p": 0.9},
]


@pytest.mark.parametrize("num_draft_tokens", [BLOCK - 1, 15], ids=["chain", "tree"])
@pytest.mark.parametrize("params", CHANGES, ids=str)
def test_slots_of_changed_logits_are_those_behind_the_chain(params, num_draft_tokens):
    """Each row is changed once; probabilities are of changed rows where there is room to branch."""
    target, sample = make_target("sequential", tiny_target()), sample_of(**params)
    with target.released_after():
        drafter = make_dflash(target, tiny_drafter(block_size=BLOCK))
    logits, row = random_logits(BLOCK - 1, VOCAB_SIZE), Row(sample, [], num_draft_tokens, False, 5)
    chain = []
    for choice in choices(logits, sample, chain):
        chain.append(choice)
    expected = slots_of(logits, chain, sample, drafter.guessable)
    if num_draft_tokens > len(chain):
        places = [Place(sample, index, chain) for index in range(len(chain))]
        changed = np.stack(list(map(processed, logits.numpy(), places)))
        expected = slots_of(torch.from_numpy(changed), chain, sample, drafter.guessable)
    assert drafter._slots(logits, row) == expected


def test_more_candidates_than_the_path_is_long_are_a_tree():
    target = make_target("sequential", tiny_target())
    engine = Engine(target, make_dflash(target, tiny_drafter(block_size=BLOCK)))
    with target.released_after():
        for given, expected in (
            ((), (0, 5)),
            ((4,), (0, 4)),
            ((5,), (0, 5)),
            ((6,), (6, 5)),
            ((3, 2), (3, 2)),
            ((0,), (0, 0)),
        ):
            engine.use_fixed_drafting(*given)
            limits = engine.candidates
            assert (limits.num_tree_nodes, limits.model_depth) == expected


@pytest.mark.parametrize("num_draft_tokens", [None, 12], ids=["chains", "trees"])
def test_a_grammar_that_nothing_can_follow_drafts_nothing_and_is_no_failure(
    tmp_path, monkeypatch, num_draft_tokens
):
    """Such as one that became too complex: there is no chain, and so no probability either."""
    folders = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    llm = load_llm(folders, num_draft_tokens=num_draft_tokens, adaptive=False)
    drafter = llm.engine.drafter
    chains = []
    monkeypatch.setattr(drafter, "_chain", lambda *_: chains.append([]) or ([], []))
    params = SamplingParams(max_tokens=8, grammar=Grammar.regex("[a-f ]{10,30}"))
    answer = llm.generate("a b c", params).completions[0]
    assert len(answer.token_ids) == 8
    assert chains
    assert llm.engine.proposer.failures.num_failures == 0
