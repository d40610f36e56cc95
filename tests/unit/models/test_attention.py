"""The row-invariant attention computes attention, and a row's bits do not depend on its company."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.kernels.interface import Scoring
from blockdraft.kernels.torch import attention as torch_attention
from blockdraft.kernels.torch.rules import ROW_RULES, row_rule
from blockdraft.models.attention.exact import exact_attention, stock_attention

pytestmark = pytest.mark.usefixtures("either_way")

MODULE: Any = SimpleNamespace()


def make_inputs(
    heads: int, kv_heads: int, q_len: int, num_keys: int, dtype: torch.dtype, head_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, q_len), (kv_heads, num_keys), (kv_heads, num_keys))
    query, key, value = (
        torch.randn(1, *shape, head_dim, generator=generator).to(dtype) for shape in shapes
    )
    return query, key, value


def causal_mask(q_len: int, num_keys: int, start: int, dtype: torch.dtype) -> Tensor:
    """Additive [1, 1, q, keys]; query i stands at position start + i."""
    hidden = torch.arange(num_keys) > start + torch.arange(q_len)[:, None]
    return torch.zeros(1, 1, q_len, num_keys, dtype=dtype).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("num_keys", [64, 192])
def test_it_equals_stock_attention(heads: int, kv_heads: int, num_keys: int) -> None:
    query, key, value = make_inputs(heads, kv_heads, 5, num_keys, torch.float64)
    mask = causal_mask(5, num_keys, num_keys - 20, torch.float64)
    found, weights = exact_attention(MODULE, query, key, value, mask, scaling=0.3)
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    assert weights is None
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_is_no_number_counts_only_where_it_is_seen(
    part: str, dtype: torch.dtype, broken: float
) -> None:
    """A rejected token leaves it behind; rows before it have the bits that they have without it."""
    query, key, value = make_inputs(4, 2, 6, 128, dtype)
    mask = causal_mask(6, 128, 90, dtype if dtype == torch.float64 else torch.float32)
    expected, _ = exact_attention(MODULE, query, key, value, mask)
    damaged = key if part == "keys" else value
    damaged[:, 1, 93] = broken
    damaged[:, 0, 120:] = broken
    found, _ = exact_attention(MODULE, query, key, value, mask)
    assert torch.equal(found[:, :3], expected[:, :3])
    assert torch.equal(found[:, :, :2], expected[:, :, :2])
    if part == "values":
        assert not found[:, 3:, 2:].isfinite().any()


def test_the_scale_is_that_of_the_head_by_default() -> None:
    query, key, value = make_inputs(2, 2, 3, 64, torch.float64)
    found, _ = exact_attention(MODULE, query, key, value, None)
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-12)


def test_soft_cap_and_sinks_follow_their_definitions() -> None:
    query, key, value = make_inputs(4, 2, 3, 128, torch.float64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    mask = causal_mask(3, 128, 90, torch.float64)
    found, _ = exact_attention(
        MODULE, query, key, value, mask, scaling=1.0, softcap=2.0, s_aux=sinks
    )
    for head in range(4):
        scores = query[0, head] @ key[0, head // 2].T
        scores = 2.0 * torch.tanh(scores / 2.0) + mask[0, 0]
        shares = scores.exp()
        shares /= shares.sum(-1, keepdim=True) + sinks[head].exp()
        torch.testing.assert_close(
            found[0, :, head], shares @ value[0, head // 2], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("q_len", [1, 3])
def test_stock_attention_leaves_out_neither_soft_cap_nor_sinks(q_len: int) -> None:
    query, key, value = make_inputs(4, 2, q_len, 128, torch.float64)
    bias = causal_mask(q_len, 128, 90, torch.float64)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    for options in ({}, {"softcap": 2.0}, {"s_aux": sinks}):
        found, _ = stock_attention(module, query, key, value, bias == 0.0, scaling=1.0, **options)
        expected, _ = exact_attention(MODULE, query, key, value, bias, scaling=1.0, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_keys", [64, 192, 448, 960, 1024, 2048])
@pytest.mark.parametrize("dtype", ROW_RULES, ids=str)
def test_a_rows_bits_do_not_depend_on_its_company(dtype: torch.dtype, num_keys: int) -> None:
    """Neither on the rows beside it nor on masked keys behind it, up to 2,048 keys."""
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value = make_inputs(6, 2, 64, num_keys + 128, dtype, head_dim=64)
    start = num_keys - 64
    mask = causal_mask(64, num_keys + 128, start, softmax_dtype)

    def run(first: int, last: int, keys: int) -> Tensor:
        end = num_keys + keys
        return exact_attention(
            MODULE,
            query[:, :, first:last],
            key[:, :, :end].contiguous(),
            value[:, :, :end].contiguous(),
            mask[:, :, first:last, :end],
        )[0]

    expected = run(0, 64, 0)
    step = row_rule(dtype).row_multiple
    for first, num_rows in [(0, step), (8, step), (60, 4), (16, 16), (4, 20), (0, 64)]:
        for more_keys in (0, 64, 128):
            found = run(first, first + num_rows, more_keys)
            assert torch.equal(found, expected[:, first : first + num_rows])


@pytest.mark.parametrize("q_len", [500, 64])
@pytest.mark.parametrize("dtype", ROW_RULES, ids=str)
def test_rows_of_a_long_prompt_go_in_parts_with_the_same_bits(
    dtype: torch.dtype, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all rows would take tens of GiB with many heads."""
    num_keys, softmax_dtype = 2048, torch_attention.softmax_dtype(dtype)
    query, key, value = make_inputs(4, 2, q_len, num_keys, dtype)
    mask = causal_mask(q_len, num_keys, num_keys - q_len, softmax_dtype)
    key[:, 1, -3], value[:, 0, -2] = torch.nan, torch.inf
    scoring = Scoring(0.3, 5.0, draw_sinks(4, dtype))
    inputs = query[0].view(2, 1, 2, q_len, -1), key[0], value[0], mask[0], scoring
    whole = torch_attention.grouped_attention(*inputs)
    most, sizes, real = 4 * 96 * num_keys * softmax_dtype.itemsize, [], torch_attention._scores

    def scores(*args: Tensor) -> Tensor:
        found = real(*args)
        sizes.append(found.numel() * softmax_dtype.itemsize)
        return found

    monkeypatch.setattr(torch_attention, "SCORES_BYTES", most)
    monkeypatch.setattr(torch_attention, "_scores", scores)
    found = torch_attention.grouped_attention(*inputs)
    assert torch.equal(found.nan_to_num(7.0), whole.nan_to_num(7.0))
    assert torch.equal(found.isnan(), whole.isnan())
    assert len(sizes) == -(-q_len // 96)
    assert max(sizes) <= most


def draw_sinks(num_heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_heads, generator=torch.Generator().manual_seed(1)).to(dtype)
