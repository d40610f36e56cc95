"""Position weights, the partial vocabulary and the loss in both its forms."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.train.config import TrainConfig
from blockdraft.train.fused_loss import fused_block_loss
from blockdraft.train.loss import (
    PartialVocabulary,
    block_loss,
    decay_weights,
    dpace_weights,
    slot_weights,
)


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"target": Path("t"), "data": (Path("d"),), "out": Path("o"), **changes})


def test_decay_weights_of_the_published_recipes():
    assert [round(float(w), 3) for w in decay_weights(7, 4.0)] == [
        *(1.0, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223)
    ]
    assert decay_weights(15, 7.0).sum() == pytest.approx(6.631, abs=1e-3)
    assert decay_weights(9, 5.0).sum() == pytest.approx(4.605, abs=1e-3)


def test_dpace_example():
    nll = -torch.tensor([[0.9, 0.5, 0.2]]).log().requires_grad_()
    weights = dpace_weights(nll, torch.ones(1, 3, dtype=torch.bool), 0.5)
    assert weights[0].tolist() == pytest.approx([2.09, 1.14, 0.4275], abs=1e-5)
    assert not weights.requires_grad


def test_dpace_expects_nothing_of_slots_without_labels():
    nll = torch.rand(5, 6)
    keep = torch.ones(5, 6, dtype=torch.bool)
    weights = dpace_weights(nll, keep & (torch.arange(6) < 4), 0.5)
    torch.testing.assert_close(weights[:, :4], dpace_weights(nll[:, :4], keep[:, :4], 0.5))


@pytest.mark.parametrize("kind", ["dpace", "decay", "uniform"])
def test_weights_fall_and_vanish_without_labels(kind):
    nll = torch.rand(20, 7) * 3
    keep = torch.arange(7) < torch.arange(20)[:, None] % 8
    weights = slot_weights(nll, keep, config(position_weights=kind))
    assert (weights[:, 1:] <= weights[:, :-1]).all()
    assert (weights[~keep] == 0).all()
    assert (weights[keep] > 0).all()


BOTH = pytest.mark.parametrize("loss_of", [block_loss, fused_block_loss])


@BOTH
@pytest.mark.parametrize("kind", ["dpace", "decay", "uniform"])
def test_all_masked_rows_are_finite(kind, loss_of):
    logits = torch.randn(2, 3, 11, requires_grad=True)
    labels, keep = torch.full((2, 3), -1), torch.zeros(2, 3, dtype=torch.bool)
    loss = loss_of(logits, None, labels, keep, torch.zeros(11), config(position_weights=kind))
    loss.loss.backward()
    assert loss.loss == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("kind", ["dpace", "decay", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [None, 0.0, 0.4, 1.0])
def test_the_fused_loss_is_the_plain_one(share, dtype, kind):
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 11).to(dtype)
    target_logits = None if share is None else torch.randn(4, 3, 11).to(dtype)
    labels, keep = torch.randint(-1, 11, (4, 3)), torch.rand(4, 3) < 0.7
    settings = config(distill_share=share or 0.0, position_weights=kind)
    results, gradients = [], []
    for loss_of in (block_loss, fused_block_loss):
        leaf = logits.clone().requires_grad_()
        result = loss_of(leaf, target_logits, labels, keep, torch.arange(11) / 9, settings)
        assert not result.nll.requires_grad
        (2 * result.loss).backward()
        results.append(result)
        gradients.append(leaf.grad)
    plain, fused = results
    torch.testing.assert_close(fused.loss, plain.loss)
    torch.testing.assert_close(fused.nll, plain.nll)
    torch.testing.assert_close(fused.distill, plain.distill)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_the_plain_loss_is_what_its_words_say():
    """One slot after another."""
    torch.manual_seed(1)
    logits, target_logits = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    labels, keep = torch.randint(5, (2, 3)), torch.tensor([[True, True, False], [True] * 3])
    settings = config(distill_share=0.25)
    result = block_loss(logits, target_logits, labels, keep, torch.zeros(5), settings)
    weights = slot_weights(result.nll, keep, settings)
    expected = 0.0
    for block in range(2):
        for slot in range(3):
            p, q = (x[block, slot].softmax(0) for x in (logits, target_logits))
            right = -float(p[labels[block, slot]].log())
            both = -sum(float(q[token] * p[token].log()) for token in range(5))
            expected += float(weights[block, slot]) * (0.75 * right + 0.25 * both)
    assert float(result.loss) == pytest.approx(expected, rel=1e-5)


@BOTH
def test_distillation_rests_where_the_drafter_agrees(loss_of):
    logits = torch.randn(2, 3, 11, requires_grad=True)
    keep = torch.ones(2, 3, dtype=torch.bool)
    labels = torch.zeros(2, 3, dtype=torch.long)
    settings = config(distill_share=1.0)
    loss_of(logits, logits.detach(), labels, keep, torch.zeros(11), settings).loss.backward()
    assert logits.grad.abs().max() < 1e-6


def test_vocabulary_holds_frequent_tokens_labels_and_random_others():
    head = torch.randn(50, 4)
    counts = Counter({3: 9, 7: 5, 8: 1})
    vocabulary = PartialVocabulary(head, counts, 2, 5)
    drawn = vocabulary.draw(torch.tensor([[40, 3], [41, 40]]), torch.Generator().manual_seed(0))
    assert drawn.head.shape == (2 + 2 + 5, 4)
    assert (drawn.slot_of[[3, 7, 40, 41]] >= 0).all()
    assert (drawn.slot_of >= 0).sum() == 9
    for token in (3, 7, 40, 41):
        assert torch.equal(drawn.head[drawn.slot_of[token]], head[token])
        assert drawn.log_share[drawn.slot_of[token]] == 0
    # The 5 drawn ones stand for the 46 that are not kept.
    assert drawn.log_share.exp().sum() == pytest.approx(50.0, rel=1e-5)


def test_whole_vocabulary():
    head = torch.randn(50, 4)
    drawn = PartialVocabulary(head, Counter(), 0, 5).draw(torch.tensor([1]), torch.Generator())
    assert torch.equal(drawn.head, head)
    assert torch.equal(drawn.slot_of, torch.arange(50))
