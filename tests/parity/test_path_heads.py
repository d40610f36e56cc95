"""What DSpark, Domino and DFly propose is what their definitions say; output is plain decoding's.

The formulas are written here once more, in loops over the tokens of a path and in float64, from
features of the target that transformers computes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.diagnose.doctor import offline
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.path_heads import HiddenCorrection, PathLogits
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.path_head import PathHeadDrafter
from blockdraft.speculate.drafters.slots import NUM_CANDIDATES
from tests.parity import faults
from tests.parity.checks import plain_features
from tests.parity.proposals import (
    PROMPT,
    Fault,
    Oracle,
    OwnLogits,
    check_model,
    check_no_numbers,
    check_output,
    check_own_logits,
    check_together,
)
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.small_llm import check_grammar, load_llm
from tests.tiny import (
    PATH_HEADS,
    VOCAB_SIZE,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

BLOCK = 6
NUM_NODES = 14
SAMPLED = {"temperature": 0.8, "seed": 4}


class PathOracle(Oracle):
    """Reads the whole path again for every node."""

    @torch.no_grad()
    def ranked(self, path: Sequence[int]) -> list[int]:
        """See Oracle. Behind the choice come those that are looked at, of the largest logits."""
        tokens = [self.sample.token_ids[-1], *path]
        kind = {"dspark": self.markov, "domino": self.domino, "dfly": self.dfly}
        added = kind[self.model.config.kind](tokens)
        logits = self.logits[len(path)] + added
        noisy = logits + self.noise(len(path))
        first, looked_at = int(noisy.argmax()), logits.topk(NUM_CANDIDATES).indices
        others = looked_at[noisy[looked_at].argsort(descending=True)].tolist()
        return [first, *(token for token in others if token != first)]

    def markov(self, tokens: list[int]) -> Tensor:
        """B(x) = W2 W1[x], gated by the hidden state, or from a state of all tokens."""
        weights = {
            name.removeprefix("markov_head."): value
            for name, value in self.model.state_dict().items()
        }
        embedding, rank = weights["markov_w1.weight"], weights["markov_w1.weight"].shape[1]
        latent, state = embedding[tokens[-1]], torch.zeros(rank, dtype=torch.float64)
        if "gate_proj.weight" in weights:
            inputs = torch.cat((self.hidden[len(tokens) - 1], latent))
            gate = weights["gate_proj.weight"] @ inputs + weights["gate_proj.bias"]
            latent = torch.sigmoid(gate) * latent
        if "joint_proj.weight" in weights:
            for slot, token in enumerate(tokens):
                inputs = torch.cat((state, embedding[token], self.hidden[slot]))
                joint = weights["joint_proj.weight"] @ inputs + weights["joint_proj.bias"]
                gate, candidate, latent = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
                gate, latent = torch.sigmoid(gate), torch.tanh(latent)
                state = gate * state + (1 - gate) * torch.tanh(candidate)
        return weights["markov_w2.weight"] @ latent

    def domino(self, tokens: list[int]) -> Tensor:
        """U silu(D [h; g]), where g is the state of a GRU over the embeddings of the path."""
        added = self.model.config.domino
        assert added is not None
        if len(tokens) - 1 < added.pure_draft_prefix_len:
            return torch.zeros(VOCAB_SIZE, dtype=torch.float64)
        weights = self.model.state_dict()
        unit = torch.nn.GRU(self.hidden.shape[1], added.gru_hidden_dim, bias=False).double()
        unit.load_state_dict(
            {name: weights[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")}
        )
        _, state = unit(self.drafter.embed_weight[torch.tensor(tokens)])
        inputs = torch.cat((self.hidden[len(tokens) - 1], state[0]))
        inner = torch.nn.functional.silu(weights["embed_proj.0.weight"] @ inputs)
        result: Tensor = weights["embed_proj.2.weight"] @ inner
        return result

    def dfly(self, tokens: list[int]) -> Tensor:
        """W D (silu(G x) * U x), x = norm(h) :: norm(e), e of the last token, W the head."""
        weights = {
            name.removeprefix("hidden_correction."): value
            for name, value in self.model.state_dict().items()
        }

        def normed(x: Tensor, name: str) -> Tensor:
            scale = torch.sqrt((x * x).mean() + self.model.config.rms_norm_eps)
            return x / scale * weights[name]

        hidden = normed(self.hidden[len(tokens) - 1], "hidden_norm.weight")
        x = torch.cat((hidden, normed(self.drafter.embed_weight[tokens[-1]], "embed_norm.weight")))
        gate = torch.nn.functional.silu(weights["gate_proj.weight"] @ x)
        added = weights["down_proj.weight"] @ (gate * (weights["up_proj.weight"] @ x))
        result: Tensor = self.target.model.get_output_embeddings().weight @ added
        return result


def drafter_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> DraftModel:
    return tiny_drafter(dtype, block_size=BLOCK, **{**PATH_HEADS[name], **changes})


def check_proposals(name: str, way: Way, num_nodes: int | None, **params: Any) -> None:
    check_model(way, drafter_of(name, torch.float64), PathOracle, num_nodes, **params)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PATH_HEADS)
def test_proposals_are_those_of_the_definition(
    name: str, way: Way, params: dict[str, Any], num_nodes: int | None
) -> None:
    check_proposals(name, way, num_nodes, **params)


@pytest.mark.parametrize("name", PATH_HEADS)
def test_the_doctor_guesses_the_same(name: str) -> None:
    """It guesses behind every token of an answer in one forward."""
    ids, num_prompt = PROMPT[:20], 12
    with make_target("sequential", tiny_target(dtype=torch.float64)).released_after() as target:
        model = drafter_of(name, torch.float64)
        drafter = make_dflash(target, model)
        features = plain_features(target, ids, drafter)[0]
        head = target.model.get_output_embeddings()
        found = offline._guesses(drafter, head, features, ids, num_prompt).tolist()
        oracle = PathOracle(drafter, model, target)
        for row, anchor in enumerate(range(num_prompt, len(ids) - 1)):
            known = ids[: anchor + 1]
            oracle.open(
                Sample(0, SamplingParams(), 0, 0, frozenset(), known, num_prompt),
                model.config.num_drafted,
            )
            path: list[int] = []
            for _ in range(model.config.num_drafted):
                path.append(oracle.ranked(path)[0])
            assert found[row] == path
    assert len(found) == 7


# Planted faults.


def behind_the_anchor() -> AbstractContextManager[object]:
    """Every slot is corrected as if the anchor stood before it."""
    step, anchors = PathLogits.step, dict[int, int]()

    def of_the_anchor(
        behind: PathLogits, rows: Tensor, depth: int, state: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        if depth == 0:
            anchors.update(zip(rows.tolist(), before.tolist(), strict=True))
        first = torch.tensor([anchors[row] for row in rows.tolist()])
        return step(behind, rows, depth, state, first)

    return patch.object(PathLogits, "step", of_the_anchor)


def slots_shifted_by_one() -> AbstractContextManager[object]:
    """The anchor's slot drafts where it should not, and does not where it should."""

    def first_slot(config: DraftConfig) -> int:
        return 1 if config.drafts_from_anchor else 0

    return patch.object(DraftConfig, "first_slot", property(first_slot))


def state_that_forgets() -> AbstractContextManager[object]:
    """The state before a token is that before the anchor."""
    step = PathLogits.step

    def without(
        behind: PathLogits, rows: Tensor, depth: int, state: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        return step(behind, rows, depth, torch.zeros_like(state), before)

    return patch.object(PathLogits, "step", without)


def hidden_of_the_slot_before() -> AbstractContextManager[object]:
    """The correction sees the hidden state of the slot before."""
    real = PathLogits.__init__

    def init(behind: PathLogits, head: Any, weigh: Any, hidden: Tensor, logits: Tensor) -> None:
        real(behind, head, weigh, hidden.roll(1, dims=1), logits)

    return patch.object(PathLogits, "__init__", init)


def without_correction() -> AbstractContextManager[object]:
    """Nothing is added to the hidden states."""
    return patch.object(HiddenCorrection, "forward", lambda self, hidden, embeddings: hidden * 0.0)


SEEN = "another candidate is best|assert .* == "


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("dspark", behind_the_anchor),
        ("domino", behind_the_anchor),
        ("dspark", slots_shifted_by_one),
        ("domino unshifted", slots_shifted_by_one),
        ("rnn", state_that_forgets),
        ("domino", state_that_forgets),
        ("gated", hidden_of_the_slot_before),
        ("dfly", behind_the_anchor),
        ("dfly", slots_shifted_by_one),
        ("dfly", hidden_of_the_slot_before),
        ("dfly", without_correction),
    ],
)
def test_the_definition_finds(name: str, fault: Fault, way: Way) -> None:
    with fault(), pytest.raises(AssertionError, match=SEEN):
        check_proposals(name, way, NUM_NODES)


def test_the_definition_finds_noise_of_another_place() -> None:
    with faults.noise_by_slot(), pytest.raises(AssertionError, match=SEEN):
        check_proposals("dspark", "paged", None, **SAMPLED)


# Output.

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filters": {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    "no stop": {"min_tokens": 9, "presence_penalty": 0.5},
}


@pytest.mark.one_in(20)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("asked", PARAMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PATH_HEADS)
def test_output_is_plain_decoding(name: str, way: Way, asked: str, num_nodes: int | None) -> None:
    params = SamplingParams(max_tokens=30, seed=3, logprobs=1, **PARAMS[asked])
    with make_target(way, tiny_target()).released_after() as target:
        drafter = make_dflash(target, drafter_of(name))
        proposed = [own for _, own in check_output(target, drafter, params, num_nodes)]
    assert proposed[-1].sources[0] == drafter.model.config.kind
    assert all(own.tree.is_chain for own in proposed) == (num_nodes is None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_nodes", [None, NUM_NODES], ids=["chain", "tree"])
@pytest.mark.parametrize("name", PATH_HEADS)
def test_several_requests_at_once(name: str, num_nodes: int | None) -> None:
    check_together(drafter_of(name), [*PARAMS.values()], 6, num_nodes)


class PathHeadWithOwnLogits(OwnLogits, PathHeadDrafter):
    """With a head that adds nothing it has the target's."""


@pytest.mark.parametrize("params", [{}, SAMPLED, PARAMS["penalties"]], ids=str)
@pytest.mark.parametrize("name", ["dspark", "gated", "domino"])
def test_the_targets_own_logits_are_accepted(name: str, params: dict[str, Any]) -> None:
    options = SamplingParams(max_tokens=24, **{"seed": 3, **params})
    target = make_target("sequential", tiny_target(dtype=torch.float64))
    assert isinstance(target, SequentialTarget)
    with target.released_after():
        model = drafter_of(name, torch.float64)
        head = model.path_head(target.model.get_input_embeddings().weight)
        assert head is not None
        torch.nn.init.zeros_(head.successors)
        drafter = make_dflash(target, model, PathHeadWithOwnLogits)
        check_own_logits(target, drafter, options, least_drafted=12)


@pytest.mark.parametrize("name", ["dspark", "domino", "dfly"])
@pytest.mark.parametrize("known", [None, list(range(0, 272, 3))], ids=["all", "some"])
def test_a_grammar_is_followed(name: str, known: list[int] | None, tmp_path: Any) -> None:
    """Also where the drafter guesses some tokens only."""
    folder = tiny_drafter_folder(tmp_path, block_size=BLOCK, **PATH_HEADS[name])
    model = DraftModel.from_pretrained(folder)
    model.draft_vocabulary = known
    model.save_pretrained(folder)
    llm = load_llm((tiny_target_folder(tmp_path), folder), num_draft_tokens=15)
    assert llm.engine.drafter.kind == name
    assert check_grammar(llm).num_drafted


def test_each_path_takes_one_product_and_chains_share_them() -> None:
    """Chains and their children are asked for twice, and found once."""
    asked: list[tuple[int, int]] = []
    step = PathLogits.step

    def counting(behind: PathLogits, rows: Tensor, depth: int, *args: Tensor) -> Any:
        asked.append((depth, len(rows)))
        return step(behind, rows, depth, *args)

    with make_target("paged", tiny_target()).released_after() as target:
        engine = Engine(target, make_dflash(target, drafter_of("dspark")))
        for temperature in (0.0, 1.0, 0.7):
            engine.add(PROMPT, SamplingParams(max_tokens=3, temperature=temperature, seed=1))
        engine.step()
        with patch.object(PathLogits, "step", counting):
            engine.step()
    assert asked == [(depth, 3) for depth in range(len(asked))]
    assert asked


def test_logits_that_are_no_numbers_harm_nobody() -> None:
    asked = [{}, SAMPLED, PARAMS["filters"], PARAMS["penalties"]]
    check_no_numbers(lambda: drafter_of("rnn"), asked)


def test_without_a_head_the_layers_alone_draft() -> None:
    """DSpark of rank 0: DFlash with the anchor's slot drafting."""
    rank0 = replace(PATH_HEADS["dspark"]["dspark"], markov_rank=0)
    model = drafter_of("dspark", dspark=rank0)
    assert model.path_head(None) is None
    with make_target("paged", tiny_target()).released_after() as target:
        drafter = make_dflash(target, model)
        assert (drafter.kind, drafter.max_nodes) == ("dspark", BLOCK)
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
        assert any(own for _, own in check_output(target, drafter, params))
