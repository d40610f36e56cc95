"""Keys and values in pages: what is written at a slot is read at its place."""

import pytest
import torch

from blockdraft.cache.paged_kv import Int8KV, LayerShape, PagedKV, page_bytes
from blockdraft.cache.pages import PAGE_SIZE

SHAPES: list[LayerShape] = [(2, 4), (3, 8), (2, 4)]


def make(num_pages: int = 6, dtype: torch.dtype = torch.float32) -> PagedKV:
    return PagedKV(SHAPES, num_pages, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_was_never_written_is_zero(dtype: torch.dtype) -> None:
    kv = make(dtype=dtype)
    for layer, (heads, head_dim) in enumerate(SHAPES):
        found = kv.gather(layer, torch.tensor([0, 5, 3]))
        assert found.shape == (2, heads, 3 * PAGE_SIZE, head_dim)
        assert found.dtype == dtype
        assert not found.any()


def test_writes_are_gathered_in_the_order_of_the_page_table() -> None:
    kv, table = make(), [4, 1, 3]
    num_tokens = 2 * PAGE_SIZE + 7
    slots = [table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(num_tokens)]
    expected = []
    for layer, (heads, head_dim) in enumerate(SHAPES):
        k, v = torch.randn(2, heads, num_tokens, head_dim)
        kv.write(layer, torch.tensor(slots), k, v)
        expected.append((k, v))
    for layer, (k, v) in enumerate(expected):
        keys, values = kv.gather(layer, torch.tensor(table))
        assert torch.equal(keys[:, :num_tokens], k)
        assert torch.equal(values[:, :num_tokens], v)
        assert not keys[:, num_tokens:].any()
        others = kv.gather(layer, torch.tensor([0, 2, 5]))
        assert not others.any()


def test_a_write_changes_its_slots_only() -> None:
    kv = make()
    heads, head_dim = SHAPES[1]
    before = torch.randn(2, heads, 6 * PAGE_SIZE, head_dim)
    kv.write(1, torch.arange(6 * PAGE_SIZE), before[0], before[1])
    slots = torch.tensor([5, 3 * PAGE_SIZE, 6 * PAGE_SIZE - 1])
    k, v = torch.randn(2, heads, 3, head_dim)
    kv.write(1, slots, k, v)
    before[0][:, slots], before[1][:, slots] = k, v
    assert torch.equal(kv.gather(1, torch.arange(6)), before)
    assert not kv.gather(0, torch.arange(6)).any()
    assert not kv.gather(2, torch.arange(6)).any()


def test_a_page_may_be_gathered_more_than_once() -> None:
    kv = make()
    heads, head_dim = SHAPES[0]
    k, v = torch.randn(2, heads, PAGE_SIZE, head_dim)
    kv.write(0, torch.arange(2 * PAGE_SIZE, 3 * PAGE_SIZE), k, v)
    keys, values = kv.gather(0, torch.tensor([2, 0, 2]))
    assert torch.equal(keys, torch.cat((k, torch.zeros_like(k), k), dim=1))
    assert torch.equal(values, torch.cat((v, torch.zeros_like(v), v), dim=1))


def test_a_gather_may_overwrite_the_one_before_and_never_the_pages() -> None:
    kv = make()
    heads, head_dim = SHAPES[0]
    for page_id in range(6):
        content = torch.full((heads, PAGE_SIZE, head_dim), float(page_id))
        slots = torch.arange(page_id * PAGE_SIZE, (page_id + 1) * PAGE_SIZE)
        kv.write(0, slots, content, content)
    for table in ([1, 2], [3, 4], [5], [1, 2]):
        found = kv.gather(0, torch.tensor(table))
        assert found[0, 0, ::PAGE_SIZE, 0].tolist() == table
        found.fill_(-1.0)
    assert kv.gather(0, torch.arange(6))[1, 1, ::PAGE_SIZE, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_pages_are_filled_with_copies_of_the_first() -> None:
    kv = make()
    heads, head_dim = SHAPES[2]
    k, v = torch.randn(2, heads, PAGE_SIZE, head_dim)
    kv.write(2, torch.arange(3 * PAGE_SIZE, 4 * PAGE_SIZE), k, v)
    kv.repeat_first([3, 1, 5])
    keys, values = kv.gather(2, torch.tensor([3, 1, 5, 2]))
    assert torch.equal(keys, torch.cat((k, k, k, torch.zeros_like(k)), dim=1))
    assert torch.equal(values, torch.cat((v, v, v, torch.zeros_like(v)), dim=1))


def test_a_page_costs_what_its_keys_and_values_do() -> None:
    num_values = 2 * PAGE_SIZE * sum(heads * head_dim for heads, head_dim in SHAPES)
    assert page_bytes(SHAPES, torch.bfloat16) == 2 * num_values
    assert page_bytes(SHAPES, torch.float64) == 8 * num_values
    assert sum(layer.nbytes for layer in make(5).pools) == 5 * 4 * num_values


@pytest.mark.parametrize("kind", [PagedKV, Int8KV])
def test_what_is_done_to_slots_is_done_in_all_layers(kind: type[PagedKV]) -> None:
    """Some layers are alike, some are not, and one has no attention."""
    shapes: list[LayerShape] = [(2, 16), (3, 8), (2, 16), (0, 0), (2, 16)]
    kv = kind(shapes, 4, dtype=torch.float32, device="cpu")
    draw = torch.Generator().manual_seed(0)
    parts = [*kv.pools, *(scales for scales in kv.scales if scales is not None)]
    for part in parts:
        part.copy_(torch.randn(part.shape, generator=draw).mul(50).to(part.dtype))
    before = [part.clone().flatten(2, 3) for part in parts]
    kv.move([70, 71, 3], [64, 65, 70])
    for part, old in zip(parts, before, strict=True):
        found = part.flatten(2, 3)
        assert torch.equal(found[:, :, [64, 65, 70]], old[:, :, [70, 71, 3]])
        others = [slot for slot in range(4 * PAGE_SIZE) if slot not in (64, 65, 70)]
        assert torch.equal(found[:, :, others], old[:, :, others])
    kv.clear_begun([5, PAGE_SIZE, 2 * PAGE_SIZE + 1])
    for part, old in zip(parts, before, strict=True):
        assert not part[:, :, 1].any()
        assert torch.equal(part[:, :, 2:].flatten(2, 3)[:, :, 10:], old[:, :, 2 * PAGE_SIZE + 10 :])
