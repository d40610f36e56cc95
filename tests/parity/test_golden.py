"""Replay decoding cycles of golden drafters and compare with the official implementation.

A case is a folder with a drafter (`config.json`, `model.safetensors`), `cycles.json` and
`expected.safetensors`; `--golden DIR` runs another folder of such cases.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from blockdraft.models.draft.candidate_selector import lattice_of
from blockdraft.models.draft.context import ConcatContext, ContextKV, LayerKV
from blockdraft.models.draft.context_projection import ContextProjection
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.path_heads import PathLogits
from blockdraft.models.layers.packed import packed_copy

TOLERANCE = 1e-4
ONLY_OF = {
    "test_the_selector_finds_the_official_path": ("DFlash2",),
    "test_the_path_head_finds_the_official_path": (
        *("projector_type", "markov_head_type"),
        '"enable_hidden_correction": true',
    ),
}
"""Any of this stands in the configs that these tests are for."""


@dataclass(frozen=True)
class Golden:
    """One drafter with the official outputs."""

    model: DraftModel
    cycles: list[dict[str, Any]]
    expected: dict[str, Tensor]

    def forward(self, cycle: dict[str, Any], context: ContextKV) -> Tensor:
        """Hidden states [1, block, D] of a cycle's block after this context."""
        start, block_size = cycle["start"], self.model.config.block_size
        mask_token_id = self.model.config.mask_token_id
        token_ids = torch.tensor([[cycle["anchor"]] + [mask_token_id] * (block_size - 1)])
        embeddings = self.model.embed(token_ids, self.expected["target.embed_tokens.weight"])
        positions = torch.arange(start, start + block_size)[None]
        masks = self.model.block_masks(context.num_context, block_size)
        hidden: Tensor = self.model(embeddings, positions, context, masks)
        return hidden


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder: Path = metafunc.config.getoption("--golden")
    cases = sorted(path.parent for path in folder.glob("*/cycles.json"))
    if not cases:
        raise pytest.UsageError(f"no golden drafters in {folder}")
    if (signs := ONLY_OF.get(metafunc.function.__name__)) is not None:
        configs = {case: (case / "config.json").read_text(encoding="utf-8") for case in cases}
        cases = [case for case in cases if any(sign in configs[case] for sign in signs)]
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


def load_case(case: Path) -> Golden:
    info = json.loads((case / "cycles.json").read_text())
    model = DraftModel.from_pretrained(case, torch.float32)
    assert model.config.target_layer_ids == tuple(info["target_layer_ids"])
    assert model.config.block_size == info["block_size"]
    assert model.config.mask_token_id == info["mask_token_id"]
    return Golden(model, info["cycles"], load_file(case / "expected.safetensors"))


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@torch.inference_mode()
def test_incremental_decoding_gives_the_official_outputs(case: Path, packed: bool) -> None:
    golden = load_case(case)
    project_context: Callable[[Tensor, Tensor], list[LayerKV]] = golden.model.project_context
    if packed:  # as `DFlashDrafter` runs it
        golden = replace(golden, model=packed_copy(golden.model))
        project_context = ContextProjection(golden.model)
    context = golden.model.new_context(capacity=4)
    for index, cycle in enumerate(golden.cycles):
        features = golden.expected[f"cycle{index}.features"][None]
        assert features.shape[1] == cycle["new_context"]
        positions = torch.arange(len(context), cycle["start"])[None]
        context.append(project_context(features, positions))
        assert len(context) == cycle["start"]

        hidden = golden.forward(cycle, context)[0]
        drafting = hidden[golden.model.config.first_slot :]
        logits = golden.model.logits(drafting, golden.expected["target.lm_head.weight"])

        torch.testing.assert_close(
            hidden, golden.expected[f"cycle{index}.hidden"], rtol=0, atol=TOLERANCE
        )
        torch.testing.assert_close(
            logits, golden.expected[f"cycle{index}.logits"], rtol=0, atol=TOLERANCE
        )
        assert len(context) == cycle["start"]


@torch.inference_mode()
def test_fresh_full_context_gives_the_official_outputs(case: Path) -> None:
    golden = load_case(case)
    features = torch.empty(1, 0, golden.model.config.context_width)
    for index, cycle in enumerate(golden.cycles):
        features = torch.cat((features, golden.expected[f"cycle{index}.features"][None]), dim=1)
        positions = torch.arange(cycle["start"])[None]
        context = ConcatContext(golden.model.project_context(features, positions))
        torch.testing.assert_close(
            golden.forward(cycle, context)[0],
            golden.expected[f"cycle{index}.hidden"],
            rtol=0,
            atol=TOLERANCE,
        )


@torch.inference_mode()
def test_the_selector_finds_the_official_path(case: Path) -> None:
    golden = load_case(case)
    selector = golden.model.candidate_selector
    assert selector is not None
    head = golden.expected["target.lm_head.weight"]
    for index, cycle in enumerate(golden.cycles):
        hidden = golden.expected[f"cycle{index}.hidden"][None, 1:]
        logits = golden.model.logits(hidden, head)
        anchor = torch.tensor([cycle["anchor"]])
        path = golden.model.greedy_guesses(hidden, logits, anchor)[0].tolist()
        assert path == cycle["path"]

        lattice = lattice_of(selector, hidden, logits, anchor)
        found = torch.full_like(logits[0], -torch.inf)
        place = 0
        for slot, token_id in enumerate(path):
            found[slot, lattice.token_ids[0, slot]] = lattice.scores[0, slot, place]
            place = lattice.token_ids[0, slot].tolist().index(token_id)
        expected = golden.expected[f"cycle{index}.selector_scores"]
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def test_the_path_head_finds_the_official_path(case: Path) -> None:
    golden = load_case(case)
    embed = golden.expected["target.embed_tokens.weight"]
    for index, cycle in enumerate(golden.cycles):
        hidden = golden.expected[f"cycle{index}.hidden"][None, golden.model.config.first_slot :]
        logits = golden.expected[f"cycle{index}.logits"][None]
        anchor = torch.tensor([cycle["anchor"]])
        head = partial(F.linear, weight=golden.expected["target.lm_head.weight"])
        path = golden.model.greedy_guesses(hidden, logits, anchor, embed_weight=embed, lm_head=head)
        assert path[0].tolist() == cycle["path"]
        tokens = [cycle["anchor"], *cycle["path"]]
        corrected = along(golden.model, embed, head, hidden, logits, tokens)
        torch.testing.assert_close(
            corrected, golden.expected[f"cycle{index}.corrected"], rtol=0, atol=TOLERANCE
        )
        assert not torch.allclose(corrected, logits[0], atol=0.1)


def along(
    model: DraftModel,
    embed: Tensor,
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    logits: Tensor,
    tokens: list[int],
) -> Tensor:
    """The corrected logits [s, V] behind the anchor and the tokens behind it."""
    path_head = model.path_head(embed)
    assert path_head is not None
    if (weights := path_head.successors) is not None:
        head = partial(F.linear, weight=weights)
    behind = PathLogits(path_head, head, hidden, logits)
    state, found = behind.start[None], []
    for depth in range(logits.shape[1]):
        before = torch.tensor([tokens[depth]])
        state, own = behind.step(torch.tensor([0]), depth, state, before)
        found.append(own[0])
    return torch.stack(found)
