"""Trees on a target: outputs, keys and values of every path have the bits of plain decoding.

On the sequential path its paths run one after another; in pages all branches are in one forward.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.plan import ROOT, ForwardPlan, PlannedRow, Proposal, Tree
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.kernels.interface import Span
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.target.interface import TargetOutput
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from tests.parity import faults
from tests.parity.targets import WAYS, Way, make_target
from tests.tiny import VOCAB_SIZE, tiny_target

KINDS = ("llama", "qwen3", "gemma3", "qwen2")
DTYPES = (torch.float32, torch.bfloat16)
NUM_NODES = 9
LENGTHS = (7, PAGE_SIZE - 2, PAGE_SIZE, 100)
"""Of prompts: the tree is in one page, in two, begins a page, or lies beyond every window."""

pytestmark = pytest.mark.usefixtures("either_way")


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def random_tree(draw: random.Random, num_nodes: int, vocab_size: int = VOCAB_SIZE) -> Tree:
    """Nodes under random parents; siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < num_nodes:
        parent, token = draw.randrange(ROOT, len(tokens)), draw.randrange(vocab_size)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
    return Tree(tuple(tokens), tuple(parents))


def tokens_of(tree: Tree, nodes: Sequence[int]) -> list[int]:
    return [tree.tokens[node] for node in nodes]


class Samples:
    """Sequences in a target, moved by hand as commit does it."""

    def __init__(self, way: Way, kind: str, dtype: torch.dtype) -> None:
        self.target = make_target(way, tiny_target(kind, dtype))
        self.samples: dict[int, Sample] = {}

    def open(self, key: int, prompt: Sequence[int]) -> None:
        params = SamplingParams(max_tokens=64)
        self.samples[key] = Sample(key, params, 0, 0, frozenset(), list(prompt), len(prompt))
        self.target.memory.open(key, prompt, with_context=False)

    def plan(self, key: int, tree: Tree | None = None, chunk: int | None = None) -> PlannedRow:
        """What the cache lacks, or a chunk of it, and a tree."""
        sample = self.samples[key]
        new_ids = sample.token_ids[sample.num_cached :][:chunk]
        proposal = Proposal.chain([], "test")
        if tree is not None:
            proposal = Proposal(tree, (1.0,) * len(tree), ("test",) * len(tree))
        planned = PlannedRow(Row(sample, new_ids, 0), proposal)
        assert self.target.memory.reserve(key, sample.num_cached + planned.num_positions)
        return planned

    def pass_over(self, *planned: PlannedRow) -> TargetOutput:
        return self.target.forward(ForwardPlan(list(planned)))

    def commit(self, planned: PlannedRow, nodes: Sequence[int], bonus: int) -> None:
        """What commit does with a path and the token behind it."""
        self.target.keep(planned, nodes)
        sample = planned.row.sequence
        sample.token_ids += [*tokens_of(planned.tree, nodes), bonus]
        sample.num_cached = len(sample.token_ids) - 1

    def kept(self, key: int) -> list[Tensor]:
        """Keys and values of all tokens that count, layer by layer."""
        length = self.samples[key].num_cached
        if isinstance(self.target, SequentialTarget):
            cache = self.target._caches[key]
            assert cache.length == length
            layers = [torch.stack([held.keys[0], held.values[0]]) for held in cache._held]
            return [layer[:, :, :length].clone() for layer in layers]
        slots = self.target.memory.slots(key, 0, length)
        return [pool.flatten(2, 3)[:, :, slots] for pool in self.target.kv.pools]


class Plain:
    """Plain decoding behind a prompt, one token a pass: what each token gave."""

    def __init__(
        self, way: Way, kind: str, dtype: torch.dtype, prompt: Sequence[int], path: Sequence[int]
    ) -> None:
        one = Samples(way, kind, dtype)
        one.open(0, prompt)
        self.logits: list[Tensor] = []
        self.features: list[Tensor] = []
        with one.target.released_after():
            for token_id in [*path, 0]:
                planned = one.plan(0)
                output = one.pass_over(planned)
                features = output.features_of(0)
                assert features is not None
                self.logits.append(output.logits[-1])
                self.features.append(features[-1])
                one.commit(planned, [], token_id)
            self.kept = one.kept(0)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def check_paths(way: Way, kind: str, dtype: torch.dtype, length: int, seed: int = 0) -> None:
    """Of every node of a random tree."""
    prompt, tree = prompt_of(length), random_tree(random.Random(f"{kind} {seed}"), NUM_NODES)
    one = Samples(way, kind, dtype)
    one.open(0, prompt)
    with one.target.released_after():
        # Alone the anchor goes in, with what a prompt has in a pass before it.
        one.pass_over(first := one.plan(0, chunk=length - 1))
        one.target.keep(first, [])
        one.samples[0].num_cached = length - 1
        output = one.pass_over(one.plan(0, tree))
    features = output.features_of(0)
    assert features is not None
    assert len(output.logits) == len(features) == 1 + len(tree)
    for leaf in tree.leaves:
        path = tree.path(leaf)
        plain = Plain(way, kind, dtype, prompt, tokens_of(tree, path))
        rows = [0, *(1 + node for node in path)]
        assert same([output.logits[row] for row in rows], plain.logits), "other logits"
        assert same([features[row] for row in rows], plain.features), "other features"


def check_kept(way: Way, kind: str, dtype: torch.dtype, length: int) -> None:
    """Whatever path is kept, the cache and the next step are plain decoding's."""
    prompt, tree = prompt_of(length), random_tree(random.Random(kind), NUM_NODES)
    for leaf in [ROOT, 0, *tree.leaves]:
        path = tree.path(leaf)
        one = Samples(way, kind, dtype)
        one.open(0, prompt)
        with one.target.released_after():
            planned = one.plan(0, tree)
            one.pass_over(planned)
            one.commit(planned, path, 3)
            plain = Plain(way, kind, dtype, prompt, [*tokens_of(tree, path), 3])
            kept = [layer[:, :, : len(prompt) + len(path)] for layer in plain.kept]
            assert same(one.kept(0), kept), "other keys or values"
            after = one.pass_over(one.plan(0)).logits[-1]
        assert torch.equal(after, plain.logits[-1]), "another step behind it"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(16)
def test_every_path_of_a_tree_has_the_bits_of_plain_decoding(
    way: Way, kind: str, dtype: torch.dtype, length: int
) -> None:
    check_paths(way, kind, dtype, length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(32)
def test_what_is_kept_of_a_tree_has_the_bits_of_plain_decoding(
    way: Way, kind: str, dtype: torch.dtype, length: int
) -> None:
    check_kept(way, kind, dtype, length)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_trees_in_company(kind: str, dtype: torch.dtype) -> None:
    """Trees, chains, plain rows and prompts in one pass, and more rows than a forward holds."""
    draw = random.Random(kind)
    trees = {
        0: random_tree(draw, NUM_NODES),
        1: random_tree(draw, 40),
        2: Tree((4, 5, 6), (ROOT, 0, 1)),
        3: None,
        5: random_tree(draw, 30),
    }
    prompts = {key: prompt_of(length) for key, length in enumerate((7, 62, 64, 30, 90, 129))}
    batched = Samples("paged", kind, dtype)
    with batched.target.released_after():
        for key, prompt in prompts.items():
            batched.open(key, prompt)
        rows = [
            batched.plan(4, chunk=50) if key == 4 else batched.plan(key, trees[key])
            for key in prompts
        ]
        output = batched.pass_over(*rows)
        num_logits = 0
        for planned, features in zip(rows, output.features, strict=True):
            key, tree = planned.row.sequence.key, planned.tree
            own = output.logits[num_logits : num_logits + planned.num_logits]
            num_logits += planned.num_logits
            assert features is not None
            leaves = tree.leaves[::8] or [ROOT] * (key != 4)
            for leaf in leaves:
                path = tree.path(leaf)
                plain = Plain("paged", kind, dtype, prompts[key], tokens_of(tree, path))
                found = [own[1 + node] for node in [ROOT, *path]]
                assert same(found, plain.logits), (key, leaf)
                places = [len(prompts[key]) + node for node in [ROOT, *path]]
                assert same(list(features.at(places)), plain.features), (key, leaf)
                if leaf == leaves[-1]:
                    batched.commit(planned, path, 0)
                    assert same(batched.kept(key), plain.kept), (key, leaf)
        assert num_logits == len(output.logits)


def test_a_step_that_failed_leaves_nothing_of_its_tree() -> None:
    for way in WAYS:
        one = Samples(way, "llama", torch.float32)
        one.open(0, prompt_of(7))
        with one.target.released_after():
            one.pass_over(one.plan(0, random_tree(random.Random(1), NUM_NODES)))
            one.target.truncate(0, 0)
            found = one.pass_over(one.plan(0)).logits[-1]
        assert torch.equal(found, Plain(way, "llama", torch.float32, prompt_of(7), []).logits[0])


# Planted faults.


def nothing_moves() -> AbstractContextManager[object]:
    """The kept path stays where it was computed."""
    return patch.object(PagedKV, "move", lambda *_: None)


def spans(change: Callable[[Span], Span]) -> AbstractContextManager[object]:
    """Attention gets other branches than those of the tree."""
    real = AttentionPlan.__init__

    def init(plan: AttentionPlan, backend: Any, kv: Any, given: list[Span], *args: Any) -> None:
        real(plan, backend, kv, [change(s) if s.path_slots else s for s in given], *args)

    return patch.object(AttentionPlan, "__init__", init)


def sibling_visible(span: Span) -> Span:
    """A branch sees the first path instead of its own."""
    return replace(span, path_slots=())


def path_in_wrong_order(span: Span) -> Span:
    return replace(span, path_slots=span.path_slots[::-1])


def wrong_slot(span: Span) -> Span:
    """The deepest key is read one slot too early."""
    return replace(span, path_slots=[*span.path_slots[:-1], span.path_slots[-1] - 1])


@pytest.mark.parametrize("length", [7, PAGE_SIZE - 2])
@pytest.mark.parametrize("change", [sibling_visible, path_in_wrong_order, wrong_slot])
def test_the_check_finds_what_a_branch_should_not_see(
    change: Callable[[Span], Span], length: int
) -> None:
    with spans(change), pytest.raises(AssertionError, match="other"):
        check_paths("paged", "llama", torch.float32, length)


@pytest.mark.parametrize(
    "fault",
    [
        partial(faults.keeping, PagedTarget, faults.other_branch),
        partial(faults.keeping, PagedTarget, faults.in_wrong_order),
        nothing_moves,
    ],
    ids=["branch", "order", "place"],
)
def test_the_check_finds_another_path_kept(fault: Any) -> None:
    with fault(), pytest.raises(AssertionError, match="other keys or values"):
        check_kept("paged", "llama", torch.float32, 7)


def test_the_check_finds_outputs_in_the_order_of_branches() -> None:
    """Logits and features as they were computed, branch by branch."""
    with (
        patch.object(Tree, "order", property(lambda tree: list(range(len(tree))))),
        pytest.raises(AssertionError, match="other"),
    ):
        check_paths("paged", "llama", torch.float32, 7)


def test_keys_move_as_if_all_at_once() -> None:
    kv = PagedKV([(1, 2)], 2, dtype=torch.float32, device="cpu")
    kv.pools[0].copy_(torch.arange(kv.pools[0].numel()).view_as(kv.pools[0]))
    before = kv.pools[0].flatten(2, 3).clone()
    kv.move([70, 71, 72], [69, 70, 71])
    assert torch.equal(kv.pools[0].flatten(2, 3)[:, :, 69:72], before[:, :, 70:73])
    kv.move([69, 70], [70, 71])
    assert torch.equal(kv.pools[0].flatten(2, 3)[:, :, 69:72], before[:, :, [70, 70, 71]])
