"""Position weights, the partial vocabulary and the hand-made gradient (reference case 28)."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.train.config import TrainConfig
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


@pytest.mark.parametrize("kind", ["dpace", "decay", "uniform"])
def test_weights_fall_and_vanish_without_labels(kind):
    nll = torch.rand(20, 7) * 3
    keep = torch.arange(7) < torch.arange(20)[:, None] % 8
    weights = slot_weights(nll, keep, config(position_weights=kind))
    assert (weights[:, 1:] <= weights[:, :-1]).all()
    assert (weights[~keep] == 0).all()
    assert (weights[keep] > 0).all()


@pytest.mark.parametrize("kind", ["dpace", "decay", "uniform"])
def test_all_masked_rows_are_finite(kind):
    logits = torch.randn(2, 3, 11, requires_grad=True)
    labels, keep = torch.full((2, 3), -1), torch.zeros(2, 3, dtype=torch.bool)
    loss = block_loss(logits, None, labels, keep, torch.zeros(11), config(position_weights=kind))
    loss.loss.backward()
    assert loss.loss == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_gradient_equals_autograd(share):
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 11, dtype=torch.float32, requires_grad=True)
    target_logits, log_share = torch.randn(4, 3, 11), torch.rand(11)
    labels = torch.randint(11, (4, 3))
    keep = torch.rand(4, 3) < 0.7
    settings = config(distill_share=share)
    result = block_loss(logits, target_logits, labels, keep, log_share, settings)
    (2 * result.loss).backward()

    plain = logits.detach().clone().requires_grad_()
    log_p = (plain + log_share).log_softmax(-1)
    nll = -log_p.gather(-1, labels[..., None]).squeeze(-1)
    distill = -((target_logits + log_share).softmax(-1) * log_p).sum(-1)
    weights = slot_weights(nll.detach(), keep, settings)
    expected = (weights * ((1 - share) * nll + share * distill)).sum()
    (2 * expected).backward()
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.nll, nll.detach())
    torch.testing.assert_close(logits.grad, plain.grad)


def test_distillation_rests_where_the_drafter_agrees():
    logits = torch.randn(2, 3, 11, requires_grad=True)
    keep = torch.ones(2, 3, dtype=torch.bool)
    labels = torch.zeros(2, 3, dtype=torch.long)
    settings = config(distill_share=1.0)
    block_loss(logits, logits.detach(), labels, keep, torch.zeros(11), settings).loss.backward()
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
