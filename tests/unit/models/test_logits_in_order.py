"""Logits of several forwards come in the order of the plan, and are held once."""

from weakref import ref

import pytest
import torch

from blockdraft.cache.pages import Pages
from blockdraft.core.plan import ForwardPlan, PlannedRow, Proposal, Tree
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target.paged import PagedTarget, _Logits
from tests.tiny import tiny_target


@pytest.mark.parametrize("order", [None, [3, 0, 5, 1, 4, 2]])
def test_each_forward_is_forgotten_once_its_logits_are_taken(order: list[int] | None) -> None:
    parts = list(torch.randn(6, 5).split([3, 0, 1, 2]))
    whole = torch.cat(parts)
    found, kept = _Logits(6, len(parts), order), []
    while parts:
        part = parts.pop(0).clone()
        kept.append(ref(part))
        found.take(part)
        del part
    assert found.values is not None
    assert torch.equal(found.values, whole if order is None else whole[order])
    assert [own() for own in kept] == [None] * 4


def test_logits_of_one_forward_are_not_copied() -> None:
    logits, found = torch.randn(6, 5), _Logits(6, 1, None)
    found.take(logits)
    assert found.values is logits


def test_trees_that_take_several_forwards_have_the_logits_of_each_row_alone() -> None:
    """They run path by path, which is not the order of the nodes."""
    target = PagedTarget(tiny_target(), Pages(40))
    tree = Tree(tuple(range(15)), (-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6))
    proposal = Proposal(tree, (1.0,) * 15, ("given",) * 15)

    def logits_of(keys: range) -> torch.Tensor:
        rows = []
        for key in keys:
            prompt = [key, 7, 3 + key]
            sequence = Sequence(key, SamplingParams(), 0, 0, frozenset(), prompt, 3)
            target.memory.open(key, [0], with_context=False)
            assert target.memory.reserve(key, 30)
            rows.append(PlannedRow(Row(sequence, prompt, 15), proposal))
        output = target.forward(ForwardPlan(rows))
        assert (output.num_forwards > 1) == (len(keys) > 1)
        for key in keys:
            target.close(key)
        return output.logits

    together = logits_of(range(6)).split(16)
    for key in range(6):
        assert torch.equal(together[key], logits_of(range(key, key + 1)))
