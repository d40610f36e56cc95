"""DFlare and DFly: each layer's context is the fusion that the definition says; output is plain.

The definition is written here once more, in loops over tokens, layers and features. What the
reference implementation computes is in `golden`, and DFly's correction in `test_path_heads`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.models.draft.context_projection import ContextProjection
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.modules import DraftAttention
from blockdraft.speculate.drafters.slots import NUM_CANDIDATES
from tests.parity.proposals import (
    Fault,
    Oracle,
    check_model,
    check_output,
    check_together,
)
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.small_llm import check_grammar, load_llm
from tests.tiny import (
    LAYER_FUSIONS,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

NUM_NODES = 14
SAMPLED = {"temperature": 0.8, "seed": 4}
each_fusion = pytest.mark.parametrize("name", LAYER_FUSIONS)


def drafter_of(name: str, dtype: torch.dtype = torch.float32) -> DraftModel:
    return tiny_drafter(dtype, **LAYER_FUSIONS[name])


@torch.no_grad()
def contexts_of(model: DraftModel, features: Tensor, positions: Tensor) -> list[tuple[Tensor, ...]]:
    """See DraftModel.project_context; of one sequence."""
    weights, config = model.state_dict(), model.config
    found = []
    for layer in range(config.num_hidden_layers):
        own = f"layers.{layer}.self_attn."
        name = "fc.weight" if config.dflare else "layer_fusion_weights"
        raised = weights[name][layer].exp()
        shares = raised / raised.sum()
        kind = "_target" if config.dflare else ""
        keys, values = [], []
        for feature, position in zip(features[0], positions[0], strict=True):
            parts = feature.view(config.num_features, -1)
            x = sum(share * part for share, part in zip(shares, parts, strict=True))
            assert isinstance(x, Tensor)
            if not config.dflare:
                x = x + weights["fc.weight"] @ feature
            x = normed(x, weights["hidden_norm.weight"], config.rms_norm_eps)
            heads = (weights[f"{own}k_proj{kind}.weight"] @ x).view(-1, config.head_dim)
            norm = weights[f"{own}k_norm.weight"]
            heads = torch.stack([normed(head, norm, config.rms_norm_eps) for head in heads])
            keys.append(rotated(heads, int(position), config.rope["rope_theta"]))
            values.append((weights[f"{own}v_proj{kind}.weight"] @ x).view(-1, config.head_dim))
        found.append((torch.stack(keys, dim=1)[None], torch.stack(values, dim=1)[None]))
    return found


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotated(heads: Tensor, position: int, theta: float) -> Tensor:
    half = heads.shape[1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = heads[:, :half], heads[:, half:]
    cos, sin = angles.cos().to(heads), angles.sin().to(heads)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


def check_contexts(name: str) -> None:
    model = drafter_of(name)
    features = torch.randn(1, 7, model.config.context_width, generator=torch.manual_seed(0))
    positions = torch.arange(4, 11)[None]
    expected = contexts_of(model, features, positions)
    with torch.no_grad():
        both = model.project_context(features, positions), ContextProjection(model)
        for found in (both[0], both[1](features, positions)):
            for own, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(own[0], wanted[0], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(own[1], wanted[1], rtol=1e-4, atol=1e-4)


@each_fusion
def test_contexts_are_those_of_the_definition(name: str) -> None:
    check_contexts(name)


# Proposals. Those of DFly with its correction are in `test_path_heads`.


class FusionOracle(Oracle):
    """Its contexts are those of the definition here."""

    def open(self, sample: Sample, num_slots: int) -> None:
        """See Oracle."""
        model = self.model

        def project(features: Tensor, positions: Tensor) -> list[tuple[Tensor, ...]]:
            return contexts_of(model, features, positions)

        with patch.object(model, "project_context", project):
            super().open(sample, num_slots)

    def ranked(self, path: Sequence[int]) -> list[int]:
        """See Oracle."""
        logits = self.logits[len(path)]
        noisy = logits + self.noise(len(path))
        first, looked_at = int(noisy.argmax()), logits.topk(NUM_CANDIDATES).indices
        others = looked_at[noisy[looked_at].argsort(descending=True)].tolist()
        return [first, *(token for token in others if token != first)]


def check_proposals(name: str, way: Way, num_nodes: int | None, **params: Any) -> None:
    check_model(way, drafter_of(name, torch.float64), FusionOracle, num_nodes, **params)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["dflare", "dfly without correction"])
def test_proposals_are_those_of_the_definition(
    name: str, way: Way, params: dict[str, Any], num_nodes: int | None
) -> None:
    check_proposals(name, way, num_nodes, **params)


# Planted faults.


def fusion_of_the_first_layer() -> AbstractContextManager[object]:
    """All layers read the fusion of the first."""
    fused = DraftModel._fused

    def faulty(self: DraftModel, features: Tensor, weights: Tensor) -> Tensor:
        return fused(self, features, weights[:1].expand_as(weights))

    return patch.object(DraftModel, "_fused", faulty)


def equal_shares() -> AbstractContextManager[object]:
    """Features are added up with equal weights."""
    fused = DraftModel._fused

    def faulty(self: DraftModel, features: Tensor, weights: Tensor) -> Tensor:
        return fused(self, features, weights * 0.0)

    return patch.object(DraftModel, "_fused", faulty)


def projections_of_the_block() -> AbstractContextManager[object]:
    """The context is projected as the slots of a block are."""
    own = property(lambda self: (self.k_proj, self.v_proj))
    return patch.object(DraftAttention, "context_projections", own)


def nothing_added() -> AbstractContextManager[object]:
    """Only `fc` makes the contexts, as in DFlash."""
    fused = DraftModel._fused

    def faulty(self: DraftModel, features: Tensor, weights: Tensor) -> Tensor:
        return fused(self, features, weights) * 0.0

    return patch.object(DraftModel, "_fused", faulty)


FAULTS: list[tuple[str, Callable[[], AbstractContextManager[object]]]] = [
    ("dflare", fusion_of_the_first_layer),
    ("dflare", equal_shares),
    ("dflare", projections_of_the_block),
    ("dfly without correction", fusion_of_the_first_layer),
    ("dfly without correction", nothing_added),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_the_definition_finds(name: str, fault: Fault) -> None:
    with fault(), pytest.raises(AssertionError, match="not close"):
        check_contexts(name)
    with fault(), pytest.raises(AssertionError, match="another candidate is best"):
        check_proposals(name, "paged", NUM_NODES)


# Output.

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
}


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("asked", PARAMS)
@pytest.mark.parametrize("way", WAYS)
@each_fusion
def test_output_is_plain_decoding(name: str, way: Way, asked: str, num_nodes: int | None) -> None:
    params = SamplingParams(max_tokens=30, seed=3, logprobs=1, **PARAMS[asked])
    with make_target(way, tiny_target()).released_after() as target:
        drafter = make_dflash(target, drafter_of(name))
        proposed = [own for _, own in check_output(target, drafter, params, num_nodes)]
    assert proposed[-1].sources[0] == drafter.model.config.kind == name.split()[0]
    assert all(own.tree.is_chain for own in proposed) == (num_nodes is None)


@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["dflare", "dfly"])
def test_several_requests_at_once(name: str, num_nodes: int | None) -> None:
    check_together(drafter_of(name), [*PARAMS.values()], 5, num_nodes)


def test_a_grammar_is_followed(tmp_path: Any) -> None:
    folder = tiny_drafter_folder(tmp_path, **LAYER_FUSIONS["dflare"])
    llm = load_llm((tiny_target_folder(tmp_path), folder), num_draft_tokens=15)
    assert llm.engine.drafter.kind == "dflare"
    assert check_grammar(llm).num_drafted
