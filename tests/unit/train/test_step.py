"""Steps cut into parts: packed rows, chunks of the head, batches, tiles (reference case 25)."""

import dataclasses
from collections import Counter

import pytest
import torch

from blockdraft.data.dataset import Batch, collate, collate_rows
from blockdraft.data.store import Example
from blockdraft.models.draft.attention import attend, flex_masks
from blockdraft.models.draft.masks import block_masks
from blockdraft.train import loss as loss_module
from blockdraft.train.blocks import Anchors, make_blocks, sample_anchors
from blockdraft.train.features import FeatureCache, FrozenTarget
from blockdraft.train.kinds.block import BlockDrafter
from blockdraft.train.loss import PartialVocabulary
from blockdraft.train.step import (
    Part,
    StepStats,
    accumulate_gradients,
    group_loss,
    num_possible_slots,
)
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_draft_config, tiny_drafter, tiny_target
from tests.train_runs import small_config

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
KINDS = pytest.mark.parametrize(
    "changes", [{}, SLIDING, {**SLIDING, "causal": False}, {"causal": True}], ids=str
)


def some_examples() -> list[Example]:
    generator = torch.Generator().manual_seed(7)
    examples = []
    for number, (prompt, answer) in enumerate([(4, 20), (7, 9), (3, 30), (5, 12)]):
        ids = torch.randint(VOCAB_SIZE - 1, (prompt + answer,), generator=generator).tolist()
        examples.append(
            Example(
                id=str(number),
                set="s",
                prompt_ids=tuple(ids[:prompt]),
                response_ids=tuple(ids[prompt:]),
            )
        )
    return examples


class Trained:
    """A drafter and what its gradient needs."""

    def __init__(self, tmp_path, **changes):
        self.config = small_config(tmp_path, anchors_per_forward=3)
        self.model = tiny_drafter(**changes)
        self.target = FrozenTarget(tiny_target(), LAYER_IDS)
        self.examples = some_examples()
        self.states = FeatureCache(self.target, self.examples, None, "tiny")
        head = self.target.lm_head_weight
        self.vocabulary = PartialVocabulary(head, Counter(), 0, 0).draw(
            torch.tensor([0]), torch.Generator()
        )

    def gradients(self, parts: list[tuple[list[list[int]], Batch, Anchors]]):
        """Of the batches given, together one step."""
        self.model.zero_grad()
        per_anchor = self.model.config.block_size - 1
        num_slots = sum(num_possible_slots(anchors, per_anchor) for _, _, anchors in parts)
        stats: list[StepStats] = []
        for rows, batch, anchors in parts:
            drafter, part = BlockDrafter(self.model), Part(rows, batch, anchors, self.vocabulary)
            states, num_groups = self.states.get(rows, batch), anchors.num_groups(3)
            given = (drafter, self.target, part, states, self.config, 1 / num_slots, num_groups)
            stats.append(accumulate_gradients(*given))
        grads = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        return grads, sum(s.nll_sum for s in stats), sum(s.num_slots for s in stats)


def assert_same(one, two):
    (grads, nll, slots), (other_grads, other_nll, other_slots) = one, two
    assert slots == other_slots
    assert nll == pytest.approx(other_nll, rel=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, other_grads[name], atol=1e-5, rtol=1e-3)


def anchors_at(*rows: list[int]) -> Anchors:
    positions = torch.tensor(rows)
    return Anchors(positions, torch.ones_like(positions, dtype=torch.bool))


@KINDS
def test_packed_texts_give_the_gradient_of_texts_alone(tmp_path, changes):
    trained = Trained(tmp_path, **changes)
    examples = trained.examples
    alone = trained.gradients(
        [([[n] for n in range(4)], collate(examples), anchors_at([4, 9], [8, 13], [3, 31], [6, 8]))]
    )
    # The second text of a row begins where the first one ends, 24 and 33 tokens later.
    packed = collate_rows([examples[:2], examples[2:]], width=60)
    anchors = anchors_at([4, 9, 24 + 8, 24 + 13], [3, 31, 33 + 6, 33 + 8])
    assert_same(alone, trained.gradients([([[0, 1], [2, 3]], packed, anchors)]))


def test_a_slot_learns_the_targets_word_on_its_own_token(tmp_path):
    """The drafter that has the target's states of one token earlier gets its very distribution."""
    trained = Trained(tmp_path)
    batch, anchors = collate(trained.examples), anchors_at([4, 9], [8, 11], [3, 20], [6, 8])
    _, final_states = trained.target.split(trained.states.get([[0], [1], [2], [3]], batch))
    size = trained.model.config.block_size
    blocks = make_blocks(batch, anchors, size, trained.model.config.mask_token_id)
    config = dataclasses.replace(trained.config, distill_share=1.0)
    losses = {}
    for shift in (-2, -1, 0):
        places = anchors.positions[:, :, None] + torch.arange(1, size) + shift
        places = places.clamp(max=final_states.shape[1] - 1)
        hidden = final_states[torch.arange(4)[:, None, None], places]
        result = group_loss(
            trained.model, hidden, final_states, blocks, anchors, trained.vocabulary, config
        )
        losses[shift] = float((result.distill * blocks.keep.flatten(0, 1)).sum())
    assert min(losses, key=losses.__getitem__) == -1
    # Slot k is at anchor + k; no other distribution is as near to the target's as itself.
    assert losses[-1] < 0.99 * min(losses[-2], losses[0])


def test_a_step_of_several_batches_is_one_step(tmp_path):
    trained = Trained(tmp_path)
    batch = collate(trained.examples)
    anchors = sample_anchors(batch, 5, torch.Generator().manual_seed(0))
    rows = [[n] for n in range(4)]
    whole = trained.gradients([(rows, batch, anchors)])
    parts = [
        (rows[s], batch.rows(s), Anchors(anchors.positions[s], anchors.keep[s]))
        for s in (slice(0, 4, 2), slice(1, 4, 2))
    ]
    assert_same(whole, trained.gradients(parts))


def test_the_head_in_chunks_gives_the_same_gradient_with_less_memory(tmp_path, monkeypatch):
    trained = Trained(tmp_path)
    batch = collate(trained.examples)
    anchors = sample_anchors(batch, 6, torch.Generator().manual_seed(0))
    parts = [([[n] for n in range(4)], batch, anchors)]
    largest: list[int] = []
    logits = trained.model.logits

    def counting(hidden, head):
        result = logits(hidden, head)
        largest.append(result.numel())
        return result

    monkeypatch.setattr(trained.model, "logits", counting)
    whole = trained.gradients(parts)
    most = max(largest)
    largest.clear()
    limit = most // 4
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", limit)
    assert_same(whole, trained.gradients(parts))
    assert max(largest) <= limit


def test_anchors_of_packed_rows_stay_in_their_texts():
    examples = some_examples()
    batch = collate_rows([examples[:2], examples[2:]])
    anchors = sample_anchors(batch, 100, torch.Generator().manual_seed(0))
    kept = anchors.positions[0][anchors.keep[0]].tolist()
    # Answers at 4..23 and, of the second text, at 31..39; a block needs a token behind its anchor.
    assert kept == [*range(4, 23), *range(31, 39)]
    blocks = make_blocks(batch, anchors, 4, 96)
    at = kept.index(22)
    assert blocks.keep[0, at].tolist() == [True, False, False]
    assert blocks.starts[0, kept.index(31)] == 24
    assert blocks.positions[0].view(-1, 4)[kept.index(31)].tolist() == [7, 8, 9, 10]


def test_answers_without_a_prompt_are_told_apart_in_a_packed_row():
    one, two = (
        Example(id=name, set="s", prompt_ids=(), response_ids=tuple(range(5))) for name in "ab"
    )
    anchors = sample_anchors(collate_rows([[one, two]]), 100, torch.Generator().manual_seed(0))
    # Neither a last token, before the other text, nor a first one, which has only that before it.
    assert anchors.positions[0][anchors.keep[0]].tolist() == [1, 2, 3, 6, 7, 8]


ANCHORS = torch.tensor([[3, 4, 9, 9], [5, 12, 13, 20]])
STARTS = torch.tensor([[0, 0, 6, 6], [0, 7, 7, 7]])


@KINDS
def test_mask_of_packed_texts_equals_brute_force(changes):
    config = tiny_draft_config(**changes)
    for kind, mask in block_masks(config, ANCHORS, 4, 20, STARTS).items():
        for row in range(2):
            for query in range(16):
                block, place = query // 4, int(ANCHORS[row, query // 4]) + query % 4
                for key in range(20 + 16):
                    other = (key - 20) // 4
                    key_place = key if key < 20 else int(ANCHORS[row, other]) + (key - 20) % 4
                    start, anchor = int(STARTS[row, block]), int(ANCHORS[row, block])
                    sees = start <= key < anchor if key < 20 else other == block
                    if config.is_causal(kind):
                        sees = sees and key_place <= place
                    if kind == "sliding_attention":
                        sees = sees and abs(place - key_place) < 5
                    assert bool(mask[row, 0, query, key]) == sees


@KINDS
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@torch.no_grad()
def test_tiles_attend_as_the_dense_mask_does(changes):
    config = tiny_draft_config(**changes)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16, 16), *(torch.randn(2, 2, 36, 16) for _ in range(2))
    dense = block_masks(config, ANCHORS, 4, 20, STARTS)
    tiles = flex_masks(config, ANCHORS, 4, 20, STARTS)
    for kind, mask in dense.items():
        bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        torch.testing.assert_close(attend(q, k, v, tiles[kind]), attend(q, k, v, bias))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_tiles_train_as_the_dense_mask_does_on_a_gpu(tmp_path, changes):
    trained = Trained(tmp_path, **changes)
    trained.model.cuda()
    trained.target = FrozenTarget(tiny_target().cuda(), LAYER_IDS)
    trained.states = FeatureCache(trained.target, trained.examples, None, "tiny")
    trained.vocabulary = PartialVocabulary(trained.target.lm_head_weight, Counter(), 0, 0).draw(
        torch.tensor([0]), torch.Generator()
    )
    batch = collate(trained.examples, "cuda")
    anchors = sample_anchors(batch, 6, torch.Generator().manual_seed(0))
    parts = [([[n] for n in range(4)], batch, anchors)]
    trained.config = dataclasses.replace(trained.config, device="cuda", attention="dense")
    dense = trained.gradients(parts)
    trained.config = dataclasses.replace(trained.config, attention="flex")
    assert_same(dense, trained.gradients(parts))
