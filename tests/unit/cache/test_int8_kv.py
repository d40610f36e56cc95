"""Keys and values in int8: rounded once, each by its own numbers, whoever is written beside it."""

import pytest
import torch
from torch import Tensor

from blockdraft.cache.paged_kv import Int8KV, LayerShape, PagedKV, int8_page_bytes, page_bytes
from blockdraft.cache.pages import PAGE_SIZE

SHAPES: list[LayerShape] = [(2, 16), (3, 8), (0, 0)]
NUM_TOKENS = 70
TABLE = [4, 1]


def make(dtype: torch.dtype = torch.float32) -> Int8KV:
    return Int8KV(SHAPES, 6, dtype=dtype, device="cpu")


def drawn(dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys and values of some tokens, of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(2, 2, NUM_TOKENS, 1, generator=generator).mul(3).exp()
    return (torch.randn(2, 2, NUM_TOKENS, 16, generator=generator) * sizes).to(dtype)


def slots(positions: range) -> Tensor:
    return torch.tensor([TABLE[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions])


def held(kv: PagedKV) -> Tensor:
    return kv.gather(0, torch.tensor(TABLE))[:, :, :NUM_TOKENS].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_numbers_are_close_and_of_the_models_type(dtype: torch.dtype) -> None:
    kv, values = make(dtype), drawn(dtype)
    kv.write(0, slots(range(NUM_TOKENS)), *values)
    found = held(kv)
    assert found.dtype == dtype
    steps = values.double().abs().amax(-1, keepdim=True) / 127
    error = (found.double() - values.double()).abs()
    # bfloat16 rounds once more.
    more = torch.finfo(dtype).eps * values.double().abs() if dtype == torch.bfloat16 else 0.0
    assert (error <= 0.5001 * steps + more).all()
    assert error.max() > 0
    assert {pool.dtype for pool in kv.pools} == {torch.int8}


@pytest.mark.parametrize("width", [1, 3, 16, NUM_TOKENS])
def test_the_width_of_a_write_changes_no_bit(width: int) -> None:
    whole, parts, values = make(), make(), drawn()
    whole.write(0, slots(range(NUM_TOKENS)), *values)
    for start in range(0, NUM_TOKENS, width):
        end = min(start + width, NUM_TOKENS)
        parts.write(0, slots(range(start, end)), *values[:, :, start:end])
    assert torch.equal(held(parts), held(whole))
    assert all(torch.equal(*pair) for pair in zip(parts.scales, whole.scales, strict=True))


def test_what_moves_takes_its_scale_along() -> None:
    kv, values = make(), drawn()
    kv.write(0, slots(range(NUM_TOKENS)), *values)
    before = held(kv)
    kv.move(slots(range(66, 68)).tolist(), slots(range(2)).tolist())
    after = held(kv)
    assert torch.equal(after[:, :, :2], before[:, :, 66:68])
    assert torch.equal(after[:, :, 2:], before[:, :, 2:])
    moved = kv.gather(0, torch.tensor(TABLE), (slots(range(66, 67)), torch.tensor([9])))
    assert torch.equal(moved[:, :, 9], before[:, :, 66])
    kv.repeat_first([4, 2])
    assert torch.equal(kv.gather(0, torch.tensor([2])), kv.gather(0, torch.tensor([4])))


def test_a_page_that_is_begun_anew_holds_numbers() -> None:
    kv, values = make(), drawn()
    values[0, 1, 5], values[1, 0, 6, 3] = torch.nan, torch.inf
    kv.write(0, slots(range(NUM_TOKENS)), *values)
    broken = held(kv)
    assert not broken[0, 1, 5].isfinite().any()
    assert not broken[1, 0, 6].isfinite().any()
    assert broken.isfinite().all(-1).sum() == 2 * 2 * NUM_TOKENS - 2
    kv.clear_begun(slots(range(1)).tolist())
    assert not held(kv)[:, :, :PAGE_SIZE].any()


def test_zeros_stay_zeros() -> None:
    kv = make()
    assert not held(kv).any()
    kv.write(0, slots(range(3)), *torch.zeros(2, 2, 3, 16))
    assert not held(kv).any()


def test_a_page_costs_what_its_numbers_and_scales_do() -> None:
    kv = make()
    taken = sum(part.nbytes for part in (*kv.pools, *kv.scales))
    assert taken == 6 * int8_page_bytes(SHAPES)
    wide: list[LayerShape] = [(8, 128)] * 4
    assert int8_page_bytes(wide) < 0.52 * page_bytes(wide, torch.bfloat16)
