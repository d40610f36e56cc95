"""Training and decoding compute the same drafter (reference case 27)."""

import pytest
import torch

from blockdraft.data.dataset import collate
from blockdraft.data.store import Example
from blockdraft.train.blocks import Anchors, make_blocks
from blockdraft.train.features import FrozenTarget
from blockdraft.train.kinds.block import draft_hidden
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_drafter, tiny_target

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7}


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{}, SLIDING, {**SLIDING, "causal": False}, {"causal": True}], ids=str
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_block_logits_equal_the_draft_after_prefill(kind, changes):
    model = tiny_drafter(**changes)
    target = FrozenTarget(tiny_target(kind), LAYER_IDS)
    torch.manual_seed(0)
    rows = torch.randint(VOCAB_SIZE - 1, (2, 31)).tolist()
    examples = [
        Example(id="0", set="s", prompt_ids=tuple(rows[0][:4]), response_ids=tuple(rows[0][4:])),
        Example(id="1", set="s", prompt_ids=tuple(rows[1][:9]), response_ids=tuple(rows[1][9:25])),
    ]
    batch = collate(examples)
    positions = torch.tensor([[5, 6, 18], [9, 14, 20]])
    anchors = Anchors(positions, torch.ones_like(positions, dtype=torch.bool))
    size = model.config.block_size
    blocks = make_blocks(batch, anchors, size, model.config.mask_token_id)
    features, _ = target.split(target.states(batch.token_ids))
    places = torch.arange(features.shape[1]).expand(2, -1)
    context_kv = model.project_context(features, places)
    hidden = draft_hidden(model, target.embed_weight, blocks, anchors, context_kv)
    trained = model.logits(hidden, target.lm_head_weight)

    for row, example in enumerate(examples):
        for column, anchor in enumerate(positions[row].tolist()):
            # Decoding has never seen the anchor or anything behind it.
            prefix = torch.tensor([example.token_ids[:anchor]])
            known, _ = target.split(target.states(prefix))
            context = model.new_context()
            context.append(model.project_context(known, torch.arange(anchor)[None]))
            slots = [example.token_ids[anchor]] + [model.config.mask_token_id] * (size - 1)
            states = model(
                model.embed(torch.tensor([slots]), target.embed_weight),
                torch.arange(anchor, anchor + size)[None],
                context,
                model.block_masks(anchor, size),
            )
            drafted = model.logits(states, target.lm_head_weight)[0]
            torch.testing.assert_close(trained[row, column], drafted, atol=1e-4, rtol=1e-4)
