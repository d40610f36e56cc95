"""Anchors, blocks and who sees whom (reference cases 25 and 26)."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockdraft.data.dataset import Batch, collate
from blockdraft.data.store import Example
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.masks import block_masks
from blockdraft.train.blocks import Anchors, make_blocks, sample_anchors
from blockdraft.train.config import TrainConfig
from blockdraft.train.features import FrozenTarget
from blockdraft.train.kinds.block import draft_hidden
from blockdraft.train.loss import LossVocabulary
from blockdraft.train.step import group_loss
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_draft_config, tiny_drafter, tiny_target

SLIDING = {
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 5,
}


def some_batch(num_rows: int = 3, width: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(VOCAB_SIZE - 1, (num_rows, width), generator=generator).tolist()
    return collate(
        [
            Example(
                id=str(i), set="s", prompt_ids=tuple(row[: 4 + i]), response_ids=tuple(row[4 + i :])
            )
            for i, row in enumerate(rows)
        ]
    )


def brute_force_mask(
    config: DraftConfig, kind: str, anchors: list[int], block_size: int, num_context: int
) -> Tensor:
    """Slot by slot and key by key."""
    slots = [(block, a + k) for block, a in enumerate(anchors) for k in range(block_size)]
    rows = []
    for block, query in slots:
        keys = [(None, c) for c in range(num_context)] + slots
        row = []
        for key_block, key in keys:
            sees = key < anchors[block] if key_block is None else key_block == block
            if config.is_causal(kind):
                sees = sees and key <= query
            if kind == "sliding_attention":
                sees = sees and abs(query - key) < config.sliding_window
            row.append(sees)
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "changes", [{}, SLIDING, {**SLIDING, "causal": False}, {"causal": True}], ids=str
)
def test_mask_equals_brute_force(changes):
    config = tiny_draft_config(**changes)
    anchors = [[3, 4, 9, 9], [5, 12, 13, 20]]
    masks = block_masks(config, torch.tensor(anchors), 4, 20)
    assert set(masks) == set(config.layer_types)
    for kind, mask in masks.items():
        expected = [brute_force_mask(config, kind, row, 4, 20) for row in anchors]
        assert torch.equal(mask, torch.stack(expected)[:, None])


def test_anchors_are_distinct_answer_tokens_with_a_successor():
    batch = some_batch()
    anchors = sample_anchors(batch, 16, torch.Generator().manual_seed(0))
    for row, (positions, keep) in enumerate(zip(anchors.positions, anchors.keep, strict=True)):
        kept = positions[keep].tolist()
        assert kept == sorted(set(kept))
        assert all(batch.is_answer[row, a] and batch.is_answer[row, a + 1] for a in kept)


def test_surplus_anchors_weigh_nothing():
    batch = collate([Example(id="a", set="s", prompt_ids=(1, 2), response_ids=(3, 4, 5))])
    anchors = sample_anchors(batch, 5, torch.Generator().manual_seed(0))
    assert anchors.positions[0].tolist() == [2, 3, 3, 3, 3]
    assert anchors.keep[0].tolist() == [True, True, False, False, False]
    blocks = make_blocks(batch, anchors, 4, 96)
    assert blocks.keep[0].tolist() == [[True, True, False], [True, False, False]] + 3 * [
        3 * [False]
    ]
    assert blocks.token_ids.view(5, 4)[0].tolist() == [3, 96, 96, 96]
    assert blocks.labels[0, 0, :2].tolist() == [4, 5]


def test_anchors_follow_the_seed():
    batch = some_batch()
    draws = [
        sample_anchors(batch, 4, torch.Generator().manual_seed(seed)).positions
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_a_block_sees_nothing_from_its_anchor_on(changes):
    """Gradients of one block's loss: none to features at or after the anchor or other blocks."""
    torch.manual_seed(0)
    model, target = tiny_drafter(**changes), FrozenTarget(tiny_target(), LAYER_IDS)
    batch = some_batch(num_rows=1)
    positions = torch.tensor([[6, 8, 15]])
    anchors = Anchors(positions, torch.ones_like(positions, dtype=torch.bool))
    states = target.states(batch.token_ids).requires_grad_()
    features, final_states = target.split(states)
    blocks = make_blocks(batch, anchors, 6, model.config.mask_token_id)
    inputs = model.embed(blocks.token_ids, target.embed_weight).requires_grad_()
    places = torch.arange(features.shape[1])[None]
    model.embed = lambda token_ids, embed_weight: inputs  # type: ignore[method-assign]
    context_kv = model.project_context(features, places)
    hidden = draft_hidden(model, target.embed_weight, blocks, anchors, context_kv)
    config = TrainConfig(target=Path("t"), data=(Path("d"),), out=Path("o"), distill_share=0.0)
    every = torch.arange(VOCAB_SIZE)
    vocabulary = LossVocabulary(target.lm_head_weight, torch.zeros(VOCAB_SIZE), every, every)
    middle = dataclasses.replace(blocks, keep=blocks.keep & torch.tensor([[[0], [1], [0]]]).bool())
    loss = group_loss(
        model, hidden[:, :, 1:], final_states, middle, anchors, vocabulary, config
    ).loss
    by_state, by_input = torch.autograd.grad(loss, (states, inputs))
    assert (by_state[0, 8:] == 0).all()
    assert (by_state[0, 7] != 0).any()
    by_block = by_input[0].view(3, 6, -1)
    assert (by_block[[0, 2]] == 0).all()
    assert (by_block[1, 0] != 0).any()
