"""Trees on a target, path by path: logits, features, keys and values have plain decoding's bits."""

import random

import pytest
import torch

from blockdraft.core.plan import ROOT, ForwardPlan, PlannedRow, Proposal, Tree
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.sequential import SequentialTarget
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_target

KINDS = ("llama", "qwen3", "gemma3", "qwen2")
PROMPT = [5, 9, 33, 2, 71, 8, 14]


def random_tree(draw, num_nodes, vocab_size=VOCAB_SIZE):
    """Nodes under random parents; siblings differ."""
    tokens, parents = [], []
    while len(tokens) < num_nodes:
        parent, token = draw.randrange(ROOT, len(tokens)), draw.randrange(vocab_size)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
    return Tree(tuple(tokens), tuple(parents))


def proposal_of(tree):
    return Proposal(tree, (1.0,) * len(tree), ("test",) * len(tree))


class OneSequence:
    """A target with one sequence in it."""

    def __init__(self, kind, dtype):
        self.target = SequentialTarget(tiny_target(kind, dtype), layer_ids=LAYER_IDS)
        params = SamplingParams(max_tokens=64)
        self.sequence = Sequence(0, params, 0, 0, frozenset(), list(PROMPT), len(PROMPT))

    def plan(self, tree=None):
        row = Row(self.sequence, self.sequence.token_ids[self.sequence.num_cached :], 0)
        return PlannedRow(row, *([] if tree is None else [proposal_of(tree)]))

    def pass_over(self, planned):
        return self.target.forward(ForwardPlan([planned]))

    def commit(self, planned, nodes, bonus):
        """What commit does with a path and the token behind it."""
        self.target.keep(planned, nodes)
        self.sequence.token_ids += [*(planned.tree.tokens[node] for node in nodes), bonus]
        self.sequence.num_cached = len(self.sequence.token_ids) - 1

    def kept(self):
        """Bits of keys and values of all tokens that count."""
        cache = self.target._caches[0]
        kept = [
            kv[:, :, : cache.length] for layer in cache._held for kv in (layer.keys, layer.values)
        ]
        return [tensor.clone() for tensor in kept]


def plainly(kind, dtype, token_ids):
    """Logits and features behind each of these tokens, and the keys and values of all, one each."""
    one = OneSequence(kind, dtype)
    logits, features = [], []
    first = one.plan()
    output = one.pass_over(first)
    logits.append(output.logits[-1])
    features.append(output.features[0][-1])
    for token_id in token_ids:
        one.commit(first, [], token_id)
        first = one.plan()
        output = one.pass_over(first)
        logits.append(output.logits[-1])
        features.append(output.features[0][-1])
    one.target.keep(first, [])
    return logits, features, one.kept()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_of_a_tree_has_the_bits_of_plain_decoding(kind, dtype):
    draw = random.Random(kind)
    tree = random_tree(draw, 8)
    one = OneSequence(kind, dtype)
    planned = one.plan(tree)
    output = one.pass_over(planned)
    assert output.logits.shape[0] == 1 + len(tree)
    assert output.features[0].shape[0] == len(PROMPT) + len(tree)
    for leaf in tree.leaves:
        path = tree.path(leaf)
        logits, features, _ = plainly(kind, dtype, [tree.tokens[node] for node in path])
        for expected, expected_features, node in zip(logits, features, [ROOT, *path], strict=True):
            assert torch.equal(output.logits[1 + node], expected)
            assert torch.equal(output.features[0][len(PROMPT) + node], expected_features)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_a_tree_has_the_bits_of_plain_decoding(kind):
    draw = random.Random(kind)
    dtype = torch.float32
    tree = random_tree(draw, 6)
    for leaf in [ROOT, *tree.leaves, 0]:
        one = OneSequence(kind, dtype)
        planned, path = one.plan(tree), tree.path(leaf)
        one.pass_over(planned)
        one.commit(planned, path, 3)
        _, _, expected = plainly(kind, dtype, [tree.tokens[node] for node in path])
        for own, plain in zip(one.kept(), expected, strict=True):
            assert torch.equal(own, plain)
        # The next step stands on it.
        after = one.pass_over(one.plan()).logits[-1]
        logits, _, _ = plainly(kind, dtype, [*(tree.tokens[node] for node in path), 3])
        assert torch.equal(after, logits[-1])


def test_a_step_that_failed_leaves_nothing_of_its_tree():
    one = OneSequence("llama", torch.float32)
    one.pass_over(one.plan(random_tree(random.Random(1), 6)))
    one.target.truncate(0, one.sequence.num_cached)
    assert not one.target._node_kv
    planned = one.plan()
    assert torch.equal(
        one.pass_over(planned).logits[-1], plainly("llama", torch.float32, [])[0][-1]
    )


def swapped(planned, nodes):
    """The wrong branch: another leaf's path of the same length, or one node less."""
    tree = planned.tree
    others = [tree.path(node) for node in range(len(tree))]
    same = [path for path in others if len(path) == len(nodes) and path != list(nodes)]
    return same[0] if same else list(nodes)[:-1]


def test_the_wrong_branch_in_the_cache_is_noticed():
    tree = Tree((5, 6, 7, 7), (ROOT, ROOT, 0, 1))
    one = OneSequence("llama", torch.float32)
    planned = one.plan(tree)
    one.pass_over(planned)
    one.commit(planned, swapped(planned, [0, 2]), 3)
    _, _, expected = plainly("llama", torch.float32, [5, 7])
    assert not all(map(torch.equal, one.kept(), expected))
