"""A model's forward with all layers in one call: the bits of transformers' own forward."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft.cache.pages import Pages
from blockdraft.kernels.cpu.layer import NativeStack
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.interface import Rotation
from blockdraft.models.layers.fused_layer import with_sign
from blockdraft.models.layers.rotation_table import RotationTable
from blockdraft.models.target import direct as direct_module
from blockdraft.models.target.direct import direct_forward
from blockdraft.models.target.packed_rows import PackedRows
from blockdraft.models.target.paged import PagedTarget
from tests.tiny import NUM_LAYERS, VOCAB_SIZE, tiny_drafter, tiny_target
from tests.torch_threads import threads
from tests.unit.models.test_fused import MODELS, PACKED_DTYPES, make

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

IDS = list(range(5, 45))
LAST = NUM_LAYERS - 1
FORWARDS: list[list[tuple[int, int, int, dict[int, int]]]] = [
    [(0, 0, 9, {}), (1, 0, 21, {}), (2, 0, 5, {})],
    [(0, 9, 11, {}), (2, 5, 1, {})],
    [
        (0, 20, 4, {}),
        (0, 22, 1, {21: 21, 22: 24}),
        (0, 23, 2, {21: 21, 22: 24, 23: 25, 24: 26}),
        (1, 21, 19, {}),
    ],
    [(2, 6, 4, {})],
]
"""Of each span the sequence, its first position, its rows, and where a branch of a tree lies."""


ROWS = 9
"""The place of the wanted rows among the arguments of the kernels' `layers`."""
SCORED = 16
"""That of the rows that the head reads."""


@torch.inference_mode()
def run(target: PagedTarget, split: tuple[int, ...] = (33, 7)) -> tuple[Tensor, Tensor]:
    """Logits and features of IDS in forwards of these lengths."""
    found, start = [], 0
    with target._opened(0, len(IDS)):
        for length in split:
            rows = PackedRows()
            rows.add(target.memory, 0, IDS[start : start + length], start, length)
            found.append(target._run(rows, with_features=True))
            start += length
    logits, features = zip(*found, strict=True)
    return torch.cat(logits), torch.cat([own for own in features if own is not None])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("layer_ids", [(0, 2), (2, 0, 2), (1, LAST)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_features_are_those_of_transformers(
    name: str, layer_ids: tuple[int, ...], dtype: torch.dtype
) -> None:
    with PagedTarget(make(name, dtype), Pages(20), layer_ids=layer_ids).released_after() as target:
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        direct = run(target)
        target._direct = None
        expected = run(target)
    assert all(torch.equal(*pair) for pair in zip(direct, expected, strict=True))
    assert direct[1].shape == (len(IDS), len(layer_ids) * target.model.config.hidden_size)


@torch.inference_mode()
def run_wanting(
    target: PagedTarget, wanted: Callable[[int, int], list[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Logits of some rows and features of all, of forwards of prompts and trees together.

    wanted: of the first row and the number of rows of each span, those that have logits.
    """
    found = []
    with ExitStack() as opened:
        for key in range(3):
            opened.enter_context(target._opened(key, len(IDS)))
        for spans in FORWARDS:
            rows, want = PackedRows(), list[int]()
            for key, start, length, places in spans:
                want += wanted(len(rows), length)
                # Branches have tokens of their own.
                token_ids = [token + len(places) for token in IDS[start : start + length]]
                rows.add(target.memory, key, token_ids, start, 0, 0, places)
            rows.wanted = want
            logits, features = target._run(rows, with_features=True)
            assert features is not None
            found.append((logits, features))
    return found


def every_row(first: int, num: int) -> list[int]:
    return list(range(first, first + num))


WANTED: dict[str, Callable[[int, int], list[int]]] = {
    "the last": lambda first, num: [first + num - 1],
    "some": lambda first, num: every_row(first, num)[-7:],
    "of later spans": lambda first, num: every_row(first, num)[-2:] if first else [],
    "in another order, and one twice": lambda first, num: [first + num - 1, first, first],
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("layer_ids", [(0, 2), (0, 1), (1, LAST)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_that_go_on_alone_have_the_bits_of_all(
    name: str, layer_ids: tuple[int, ...], dtype: torch.dtype, num_threads: int
) -> None:
    with PagedTarget(make(name, dtype), Pages(20), layer_ids=layer_ids).released_after() as target:
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        whole = run_wanting(target, every_row)
        with threads(num_threads):
            for wanted in WANTED.values():
                some = run_wanting(target, wanted)
                for (logits, features), own, spans in zip(whole, some, FORWARDS, strict=True):
                    assert torch.equal(own[1], features)
                    assert torch.equal(own[0], logits[_rows_of(spans, wanted)])


def _rows_of(spans: Sequence[Any], wanted: Callable[[int, int], list[int]]) -> list[int]:
    rows, first = list[int](), 0
    for _, _, length, _ in spans:
        rows += wanted(first, length)
        first += length
    return rows


def test_rows_that_go_on_in_the_place_of_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the row before the wanted one goes on."""
    kernels = library()
    assert kernels is not None
    real = kernels.layers

    def before(*args: Any) -> None:
        own = list(args)
        if own[ROWS] is not None:
            own[ROWS] = type(own[ROWS])(*(max(0, row - 1) for row in own[ROWS]))
        real(*own)

    with PagedTarget(make("llama"), Pages(20), layer_ids=(0, 2)).released_after() as target:
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        right = run_wanting(target, WANTED["the last"])
        monkeypatch.setattr(kernels, "layers", before)
        wrong = run_wanting(target, WANTED["the last"])
    assert all(torch.equal(own[1], found[1]) for own, found in zip(wrong, right, strict=True))
    assert not any(torch.equal(own[0], found[0]) for own, found in zip(wrong, right, strict=True))


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_threads_that_share_layers_make_the_bits_of_one(dtype: torch.dtype, in_int8: bool) -> None:
    """Of a model wide enough for several, with rows few enough for norms of their own and more."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(4)
    model = LlamaForCausalLM(config).to(dtype).eval()
    target = PagedTarget(model, Pages(20), layer_ids=(0, 2), kv_in_int8=in_int8)
    with target.released_after():
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        with threads(1):
            expected = run(target)
        for num in (2, 3):
            with threads(num):
                for split in ((33, 7), (6,) * 6 + (4,), (7,) * 5 + (5,), (1,) * 40):
                    found = run(target, split)
                    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_outputs_at_wrong_places_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the features of two layers are exchanged."""
    real = NativeStack.__call__

    def exchanged(stack: NativeStack, *args: Any) -> tuple[Tensor, Tensor]:
        kept, last = real(stack, *args)
        return kept[:, [1, 0]], last

    with PagedTarget(make("llama"), Pages(20), layer_ids=(0, 2)).released_after() as target:
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        right = run(target)
        monkeypatch.setattr(NativeStack, "__call__", exchanged)
        wrong = run(target)
    assert torch.equal(wrong[0], right[0])
    assert not torch.equal(wrong[1], right[1])


def test_it_is_left_to_transformers_where_somebody_waits_for_a_call() -> None:
    calls: list[int] = []

    def called(*_: Any) -> None:
        calls.append(1)

    for attach in (
        lambda model: model.model.layers[1].register_forward_hook(called),
        lambda model: model.model.layers[1].register_forward_pre_hook(called),
        lambda model: model.model.register_forward_hook(called),
        lambda model: model.register_forward_pre_hook(called),
        lambda model: model.model.norm.register_forward_hook(called),
        lambda model: model.model.norm.register_forward_pre_hook(called),
        lambda model: model.lm_head.register_forward_hook(called),
        lambda model: model.lm_head.register_forward_pre_hook(called),
    ):
        with PagedTarget(make("llama"), Pages(20), layer_ids=(0, 1)).released_after() as target:
            if target._direct is None:
                pytest.skip("no products by kernels on this CPU")
            right = run(target)
            hook = attach(target.model)
            assert all(torch.equal(a, b) for a, b in zip(run(target), right, strict=True))
            assert calls
            hook.remove()
            calls.clear()
            run(target)
            assert not calls


def _other_norm(model: Any) -> None:
    own = model.model.norm
    model.model.norm = type(own)(len(own.weight), own.variance_epsilon)
    model.model.norm.weight = own.weight


def _other_head(model: Any) -> None:
    vars(model.lm_head)["forward"] = partial(
        torch.nn.functional.linear, weight=model.lm_head.weight
    )


@pytest.mark.parametrize("replace", [_other_norm, _other_head])
def test_a_norm_and_a_head_that_were_replaced_are_called(replace: Callable[[Any], None]) -> None:
    with PagedTarget(make("llama"), Pages(20), layer_ids=(0, 2)).released_after() as target:
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        assert target._direct.head is not None
        assert target._direct.may_run()
        right = run(target)
        replace(target.model)
        assert not target._direct.may_run()
        assert torch.allclose(run(target)[0], right[0], atol=1e-4)


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_a_head_in_the_call_has_the_bits_of_one_behind_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer_ids in ((0, 1), (1, LAST)):
        found = []
        for has_head in (True, False):
            if not has_head:
                monkeypatch.setattr(direct_module, "_head_of", lambda model: None)
            target = PagedTarget(make("qwen3", dtype), Pages(20), layer_ids=layer_ids)
            with target.released_after():
                if target._direct is None:
                    pytest.skip("no products by kernels on this CPU")
                assert (target._direct.head is not None) == has_head
                found.append([run_wanting(target, wanted) for wanted in WANTED.values()])
        monkeypatch.undo()
        for one, other in zip(*found, strict=True):
            for pair in zip(one, other, strict=True):
                assert all(torch.equal(*own) for own in zip(*pair, strict=True))


def test_a_head_of_wrong_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the head reads the rows of the last output in another order."""
    kernels = library()
    assert kernels is not None
    real = kernels.layers

    def turned(*args: Any) -> None:
        own = list(args)
        own[SCORED] = type(own[SCORED])(*reversed(own[SCORED]))
        real(*own)

    with PagedTarget(make("llama"), Pages(20), layer_ids=(0, 2)).released_after() as target:
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        right = run_wanting(target, WANTED["some"])
        monkeypatch.setattr(kernels, "layers", turned)
        wrong = run_wanting(target, WANTED["some"])
    assert not any(torch.equal(own[0], found[0]) for own, found in zip(wrong, right, strict=True))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_moe", "gpt_oss"])
def test_it_is_left_to_transformers_where_other_things_happen_between_layers(kind: str) -> None:
    with PagedTarget(tiny_target(kind), Pages(20)).released_after() as target:
        assert direct_forward(target.model, target.kv, ()) is None


def check_table(rotate: Callable[[Tensor, Tensor], Rotation], hidden: Tensor) -> None:
    """Also of positions for which it must grow, and of repeated ones in any order."""
    table = RotationTable(rotate)
    for positions in ([3], [64, 0, 64], [1000, 5, 63, 300], [2], list(range(700, 706))):
        at = torch.tensor(positions)
        expected = rotate(hidden, at[None])
        for found, own in zip(table(hidden, at, max(positions) + 1), expected, strict=True):
            assert torch.equal(found, own[0, :, 0])


def test_the_table_of_rotations_has_the_bits_of_the_module() -> None:
    with PagedTarget(make("llama"), Pages(20)).released_after() as target:
        rotary = target.model.model.rotary_emb
        check_table(lambda x, at: with_sign(rotary(x, position_ids=at)), torch.zeros(1, 1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_has_that_of_a_draft_model(dtype: torch.dtype) -> None:
    rotary = tiny_drafter().rotary
    check_table(lambda x, at: rotary(at, x.dtype), torch.zeros(1, 1, 8, dtype=dtype))


@pytest.mark.parametrize("varies", [True, False])
def test_a_rotation_that_varies_is_asked_in_every_forward(varies: bool) -> None:
    """Longrope and dynamic rotations turn a position by what else there is."""
    asked: list[int] = []

    def rotate(x: Tensor, positions: Tensor) -> Rotation:
        asked.append(positions.shape[1])
        angles = positions[..., None, None] * torch.ones(4)
        return angles.cos(), angles.sin()

    table = RotationTable(rotate, varies=varies)
    for _ in range(3):
        table(torch.zeros(1, 2, 4), torch.tensor([7, 9]), 10)
    assert asked == ([2, 2, 2] if varies else [64])
