"""What DFlash 2 proposes is what its definition says, step by step; output is plain decoding's.

The definition is written here once more, in loops and in float64, from features of the target that
transformers computes: a convolution reads the slots before it in its block, a candidate is scored
behind the token before it, and the choice is the target's rule with the request's own noise.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.convolution import DynamicConvolution, Layer
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.conditionals import ChangedCandidates
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.dflash2 import DFlash2Drafter
from tests.parity import faults
from tests.parity.proposals import (
    PROMPT,
    Fault,
    Oracle,
    OwnLogits,
    check_model,
    check_no_numbers,
    check_output,
    check_own_logits,
)
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.small_llm import check_grammar, load_llm
from tests.tiny import (
    DFLASH2,
    VOCAB_SIZE,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

BLOCK = 6
NUM_NODES = 14


class ByDefinition(nn.Module):
    """A dynamic convolution in loops over blocks, slots and taps."""

    def __init__(self, convolution: DynamicConvolution) -> None:
        super().__init__()
        self.base = convolution.base_kernel
        self.projection = convolution.kernel_projection

    def around(self, layer: Layer, x: Tensor, block_size: int) -> Tensor:
        _, num_taps, size = self.base.shape
        dynamic = self.projection(x).unflatten(-1, (2, num_taps, -1))
        dynamic = dynamic.repeat_interleave(size // dynamic.shape[-1], dim=-1)

        def convolved(values: Tensor, side: int) -> Tensor:
            rows = []
            for slot in range(values.shape[1]):
                row = torch.zeros_like(values[:, slot])
                for tap in range(min(num_taps, slot % block_size + 1)):
                    weight = self.base[side, tap] + dynamic[:, slot, side, tap]
                    row = row + weight * values[:, slot - tap]
                rows.append(row)
            return torch.stack(rows, dim=1)

        return convolved(layer(convolved(x, 0)), 1)


def by_definition(model: DraftModel) -> DraftModel:
    twin = copy.deepcopy(model)
    for layer in twin.layers:
        layer.attention_conv = ByDefinition(layer.attention_conv)
        layer.mlp_conv = ByDefinition(layer.mlp_conv)
    return twin


class SelectorOracle(Oracle):
    """With convolutions and a selector."""

    def __init__(self, drafter: DFlashDrafter, model: DraftModel, target: Any) -> None:
        super().__init__(drafter, by_definition(model), target)

    @torch.no_grad()
    def ranked(self, path: Sequence[int]) -> list[int]:
        """See Oracle: the candidates."""
        before, slot = (path[-1] if path else self.sample.token_ids[-1]), len(path)
        selector, noise = self.model.candidate_selector, self.noise(len(path))
        weights = selector.hidden_projection.weight @ self.hidden[slot]
        scores = {}
        for token in self.logits[slot].topk(selector.top_k).indices.tolist():
            transition = selector.predecessor_codebook[before] * weights
            behind = transition @ selector.successor_codebook[token]
            scores[token] = float(self.logits[slot, token] + behind + noise[token])
        return sorted(scores, key=lambda token: -scores[token])


def check_proposals(way: Way, num_nodes: int | None, **params: Any) -> None:
    """Those of a tiny drafter."""
    model = tiny_drafter(torch.float64, block_size=BLOCK, dflash2=DFLASH2)
    check_model(way, model, SelectorOracle, num_nodes, **params)


SAMPLED = {"temperature": 0.8, "seed": 4}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
def test_proposals_are_those_of_the_definition(
    way: Way, params: dict[str, Any], num_nodes: int | None
) -> None:
    check_proposals(way, num_nodes, **params)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fault",
    [
        faults.convolution_of_the_future,
        faults.convolution_that_remembers,
        faults.selector_behind_the_anchor,
    ],
)
def test_the_definition_finds(fault: Fault, way: Way) -> None:
    with fault(), pytest.raises(AssertionError, match="another candidate is best"):
        check_proposals(way, NUM_NODES)


def test_the_definition_finds_a_convolution_that_reads_another_sequence() -> None:
    with (
        faults.convolution_over_all_rows(),
        pytest.raises(AssertionError, match="another candidate is best"),
    ):
        check_proposals("paged", None)


def test_the_definition_finds_noise_of_another_place() -> None:
    with faults.noise_by_slot(), pytest.raises(AssertionError, match="another candidate is best"):
        check_proposals("paged", None, **SAMPLED)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filters": {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "cold": {"temperature": 0.0, "top_p": 0.5},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    "no stop": {"min_tokens": 20, "presence_penalty": 0.5},
}


@pytest.mark.one_in(12)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("way", WAYS)
def test_output_is_plain_decoding(way: Way, name: str, num_nodes: int | None) -> None:
    params = SamplingParams(max_tokens=30, seed=3, logprobs=1, **PARAMS[name])
    with make_target(way, tiny_target()).released_after() as target:
        drafter = make_dflash(target, tiny_drafter(block_size=BLOCK, dflash2=DFLASH2))
        trees = check_output(target, drafter, params, num_nodes)
    assert trees[-1][1].sources[0] == "dflash2"
    for row, proposal in trees[1:]:
        assert proposal.tree.is_chain == (num_nodes is None or row.num_draft_tokens <= 1)


class SelectorWithOwnLogits(OwnLogits, DFlash2Drafter):
    """With a selector that adds nothing, and candidates enough, it has the target's."""


@pytest.mark.parametrize("params", [{}, SAMPLED, PARAMS["penalties"]], ids=str)
def test_the_targets_own_logits_are_accepted(params: dict[str, Any]) -> None:
    options = SamplingParams(max_tokens=24, **{"seed": 3, **params})
    every = replace(DFLASH2, selector_top_k=VOCAB_SIZE)
    target = make_target("sequential", tiny_target(dtype=torch.float64))
    assert isinstance(target, SequentialTarget)
    with target.released_after():
        model = tiny_drafter(torch.float64, block_size=BLOCK, dflash2=every)
        assert model.candidate_selector is not None
        model.candidate_selector.reset_parameters()
        drafter = make_dflash(target, model, SelectorWithOwnLogits)
        check_own_logits(target, drafter, options, least_drafted=12)


def test_a_path_of_changed_logits_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the chain and for the tree, which begins with it."""
    scored: list[tuple[int, tuple[int, ...]]] = []
    real = ChangedCandidates.scores

    def counting(self: ChangedCandidates, path: Sequence[int]) -> Any:
        scored.append((len(self._sample.token_ids), tuple(path)))
        return real(self, path)

    monkeypatch.setattr(ChangedCandidates, "scores", counting)
    params = SamplingParams(max_tokens=12, seed=3, **PARAMS["penalties"])
    with make_target("paged", tiny_target()).released_after() as target:
        drafter = make_dflash(target, tiny_drafter(block_size=BLOCK, dflash2=DFLASH2))
        engine = Engine(target, drafter)
        engine.use_fixed_drafting(NUM_NODES)
        engine.add(PROMPT, params)
        while engine.has_work:
            engine.step()
    assert scored
    assert len(set(scored)) == len(scored)


def test_a_grammar_that_forbids_every_candidate(tmp_path: Any) -> None:
    """Drafts still follow the grammar, and the output is plain decoding's."""
    drafter = tiny_drafter_folder(tmp_path, block_size=BLOCK, dflash2=DFLASH2)
    folders = tiny_target_folder(tmp_path), drafter
    acceptance = check_grammar(load_llm(folders, num_draft_tokens=15))
    assert any(rank for _, rank in acceptance.drafted_at)
    assert acceptance.num_accepted


def test_logits_that_are_no_numbers_harm_nobody() -> None:
    check_no_numbers(
        lambda: tiny_drafter(block_size=BLOCK, dflash2=DFLASH2),
        [{}, SAMPLED, PARAMS["filters"], PARAMS["penalties"]],
    )
