"""Kernels compute what they say, for each row alone, and do not see what a row must not see."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.ops import (
    MAX_HEAD_DIM,
    TiledAttention,
    add_rms_norm,
    gated_silu,
    rms_norm,
    rotate_heads_,
    store_context,
)
from blockdraft.kernels.interface import TILE, Scoring
from blockdraft.kernels.weights import Norm
from tests.tensors import draw
from tests.torch_threads import threads

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
Head = tuple[int, int, int]
HEADS: list[Head] = [
    (9, 3, 64),
    (4, 2, 16),
    (6, 1, 80),
    (4, 4, 128),
    (35, 1, 32),
    (3, 3, 256),
    (2, 1, 512),
]
"""Query heads, K/V heads, head_dim."""


@pytest.fixture
def kernels() -> Library:
    found = library()
    assert found is not None
    return found


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 576, 1000])
def test_norms_follow_their_definition(kernels: Library, size: int, dtype: torch.dtype) -> None:
    x, residual = draw(1, 7, size, dtype=dtype), draw(1, 7, size, dtype=dtype, seed=1)
    weight = draw(size, dtype=dtype, seed=2)
    total, normed = add_rms_norm(kernels, x, residual, Norm(weight, EPS, rounds_first=True))
    assert torch.equal(total, x + residual)
    exact = F.rms_norm(total.double(), (size,), weight.double(), EPS)
    torch.testing.assert_close(normed.double(), exact, rtol=2 * unit(dtype), atol=1e-7)
    assert torch.equal(normed, rms_norm(kernels, total, Norm(weight, EPS, rounds_first=True)))
    once = rms_norm(kernels, total, Norm(weight, EPS, rounds_first=False))
    # Half a unit, and what float32 itself is off.
    torch.testing.assert_close(once.double(), exact, rtol=0.51 * unit(dtype) + 1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3, 16, 200])
def test_the_gate_follows_its_definition(kernels: Library, size: int, dtype: torch.dtype) -> None:
    gate_up = 6 * draw(5, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(
        gated_silu(kernels, gate_up).double(), expected, rtol=1.1 * unit(dtype) + 1e-6, atol=0
    )


def test_the_gate_at_the_ends_of_the_numbers(kernels: Library) -> None:
    gate = torch.tensor([torch.inf, -torch.inf, torch.nan, 88.9, -87.5, -100.0, 1e30, -1e30, -0.0])
    found = gated_silu(kernels, torch.cat((gate, torch.ones_like(gate)))[None])[0]
    torch.testing.assert_close(found, F.silu(gate), rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotation_has_the_bits_of_torch(
    kernels: Library, with_norms: bool, head_dim: int, dtype: torch.dtype
) -> None:
    heads = draw(7, 12, head_dim, dtype=dtype)
    cos, sin = (draw(7, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    weights = [draw(head_dim, dtype=dtype, seed=seed) for seed in (3, 4)]
    norms = Norm(weights[0], EPS, rounds_first=True), Norm(weights[1], EPS, rounds_first=True)
    expected = heads.clone()
    turned = expected[:, :9]
    if with_norms:
        turned[:, :7] = rms_norm(kernels, turned[:, :7], norms[0])
        turned[:, 7:] = rms_norm(kernels, turned[:, 7:], norms[1])
    expected[:, :9] = turned * cos[:, None] + turned.roll(head_dim // 2, -1) * sin[:, None]
    rotate_heads_(kernels, heads, 7, 2, (cos, sin), norms if with_norms else None)
    assert torch.equal(heads, expected)


class Attention:
    """Random queries that see random ranges of keys; a key behind them is no number."""

    def __init__(self, head: Head, num_rows: int, num_keys: int, dtype: torch.dtype) -> None:
        heads, kv_heads, head_dim = head
        # As they come out of a product: heads of a row side by side.
        self.query = draw(num_rows, heads, head_dim, dtype=dtype).transpose(0, 1)
        self.keys, self.values = (
            F.pad(draw(kv_heads, num_keys, head_dim, dtype=dtype, seed=seed), (0, 0, 0, 1))
            for seed in (1, 2)
        )
        self.keys[:, num_keys] = self.values[:, num_keys] = torch.nan
        self.num_keys = num_keys
        generator = torch.Generator().manual_seed(3)
        ends = torch.randint(1, num_keys + 1, (num_rows,), generator=generator)
        firsts = (torch.rand(num_rows, generator=generator) * ends).long()
        self.ranges = torch.stack((firsts, ends), dim=1)
        self.sinks = draw(heads, dtype=dtype, seed=4)

    def run(
        self, kernels: Library, rows: slice = slice(None), softcap: float | None = None
    ) -> Tensor:
        query, ranges = self.query[:, rows], self.ranges[rows].contiguous()
        plan = TiledAttention(
            query.shape[1], [(0, query.shape[1], 0)], self.num_keys, ranges=ranges
        )
        sinks = None if softcap is None else self.sinks
        return plan.attend(kernels, query, self.keys, self.values, Scoring(0.2, softcap, sinks))

    def expected(self, softcap: float | None = None) -> Tensor:
        """[rows, heads, head_dim] in float64; with a soft cap sinks too."""
        heads, num_rows, head_dim = self.query.shape
        output = torch.empty(num_rows, heads, head_dim, dtype=torch.float64)
        for row, (first, end) in enumerate(self.ranges.tolist()):
            for head in range(heads):
                kv_head = head * self.keys.shape[0] // heads
                keys, values = (t[kv_head, first:end].double() for t in (self.keys, self.values))
                scores = 0.2 * keys @ self.query[head, row].double()
                sink = 0.0
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                    sink = self.sinks[head].double().exp()
                shares = scores.exp()
                output[row, head] = shares / (shares.sum() + sink) @ values
        return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_attention_follows_its_definition(
    kernels: Library, head: Head, softcap: float | None, dtype: torch.dtype
) -> None:
    for num_rows, num_keys in ((1, 1), (2, 64), (7, 300)):
        attention = Attention(head, num_rows, num_keys, dtype)
        found = attention.run(kernels, softcap=softcap).double()
        expected = attention.expected(softcap)
        torch.testing.assert_close(found, expected, rtol=0.51 * unit(dtype), atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", HEADS[:3], ids=str)
def test_a_row_alone_has_the_bits_it_has_among_others(
    kernels: Library, head: Head, dtype: torch.dtype
) -> None:
    """Whatever the blocks and the threads; and hidden by a bias as by a range."""
    attention = Attention(head, 45, 200, dtype)
    expected = attention.run(kernels)
    assert expected.isfinite().all()
    for first, end in ((0, 1), (17, 18), (3, 9), (20, 45)):
        assert torch.equal(attention.run(kernels, slice(first, end)), expected[first:end])
    for num in (1, 2, 3):
        with threads(num):
            assert torch.equal(attention.run(kernels), expected)
    places = torch.arange(200)
    hidden = (places < attention.ranges[:, :1]) | (places >= attention.ranges[:, 1:])
    bias = torch.zeros(45, 200).masked_fill(hidden, -torch.inf)
    plan = TiledAttention(45, [(0, 45, 0)], 200, bias=bias)
    found = plan.attend(kernels, attention.query, attention.keys, attention.values, Scoring(0.2))
    assert torch.equal(found, expected)


def check_rounding(kernels: Library, head: Head, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows alone and among others, of large terms that cancel: only rounding is left.

    Returns what is found where the terms of scores cancel, where weighted values do in tiles that
    all rows see, and where they do in tiles that rows see in part.
    """
    scores = Attention(head, 45, 200, dtype)
    half = head[2] // 2
    scores.query *= 300
    scores.query[..., half:] = scores.query[..., :half]
    scores.keys *= 300
    scores.keys[..., half:] = -scores.keys[..., :half]
    weighted = Attention(head, 45, 200, dtype)
    weighted.values[:, 100:200] = -weighted.values[:, :100]
    weighted.keys[:, 100:200] = weighted.keys[:, :100]
    weighted.ranges[:] = torch.tensor([0, 200])
    in_part = Attention(head, 45, 200, dtype)
    in_part.values[:, 1:200:2] = -in_part.values[:, 0:200:2]
    in_part.keys[:, 1:200:2] = in_part.keys[:, 0:200:2]
    in_part.ranges += in_part.ranges % 2 * torch.tensor([-1, 1])  # both of a pair or none
    return tuple(_alone_and_together(kernels, own) for own in (scores, weighted, in_part))


def _alone_and_together(kernels: Library, attention: Attention) -> Tensor:
    found = attention.run(kernels)
    assert found.isfinite().all()
    for row in range(45):
        alone = attention.run(kernels, slice(row, row + 1))
        assert torch.equal(bits_of(alone), bits_of(found[row : row + 1]))
    return found


def bits_of(values: Tensor) -> Tensor:
    """Two zeros of different sign are equal, and their bits are not."""
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_rounding_does_not_depend_on_the_rows_beside_it(
    kernels: Library, head: Head, dtype: torch.dtype
) -> None:
    check_rounding(kernels, head, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_sign_of_a_zero_does_not_depend_on_the_rows_beside_it(
    kernels: Library, head: Head, dtype: torch.dtype
) -> None:
    """In matrix registers a tile that only others see adds 0, which may turn a -0 into a 0."""
    attention = Attention(head, 45, 200, dtype)
    attention.values[:, :200] *= torch.finfo(dtype).tiny
    _alone_and_together(kernels, attention)


def test_zeros_that_attention_puts_out_are_positive(kernels: Library) -> None:
    attention = Attention((9, 3, 64), 45, 200, torch.float32)
    attention.values[:, :200] = -torch.finfo(torch.float32).smallest_normal * 2**-23
    found = attention.run(kernels)
    assert (found == 0).any()
    assert not found[found == 0].signbit().any()


def test_a_bias_may_hide_keys_in_between(kernels: Library) -> None:
    attention = Attention((4, 2, 16), 3, 200, torch.float32)
    bias = draw(3, 200)
    bias[:, 10:150] = -torch.inf  # the whole second tile too
    plan = TiledAttention(3, [(0, 3, 0)], 200, bias=bias)
    found = plan.attend(kernels, attention.query, attention.keys, attention.values, Scoring(0.2))
    keys, values = (t[:, :200].repeat_interleave(2, 0) for t in (attention.keys, attention.values))
    expected = F.scaled_dot_product_attention(
        attention.query, keys, values, attn_mask=bias, scale=0.2
    )
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_value_that_is_no_number_does_not_reach_who_does_not_see_it(
    kernels: Library, head: Head, dtype: torch.dtype, broken: float
) -> None:
    attention = Attention(head, 45, 200, dtype)
    expected = attention.run(kernels)
    attention.values[:, 70] = broken
    found = attention.run(kernels)
    sees = (attention.ranges[:, 0] <= 70) & (attention.ranges[:, 1] > 70)
    assert 5 < sees.sum() < 40
    assert not found[sees].isfinite().any()
    assert torch.equal(found[~sees], expected[~sees])


def test_what_is_no_number_stays_none_and_in_its_row(kernels: Library) -> None:
    attention = Attention((4, 2, 16), 6, 100, torch.float32)
    expected = attention.run(kernels)
    attention.query[:, 2] = torch.nan
    found = attention.run(kernels)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], expected[others])


CACHE = (2, 3, TILE, 16)
"""K/V heads, pages, slots of a page, head_dim."""


def attend_over_pages(
    kernels: Library, *, head_dim: int = 16, cache: Tensor | None = None, **changes: Any
) -> Tensor:
    """Two sequences of 2 and 3 rows in 3 pages, and what is to be changed of that."""
    tables: dict[str, Any] = {
        "num_rows": 6,
        "spans": [(0, 2, 0), (2, 3, 1)],
        "num_keys": 70,
        "pages": torch.tensor([1, 2, 0]),
        "ranges": torch.tensor([[0, 9], [0, 10], [0, 68], [5, 69], [5, 70]]),
        "slots": torch.tensor([72, 73, 67, 68, 69, 0]),
    }
    plan = TiledAttention(**{**tables, **changes})
    keys, values = cache if cache is not None else torch.zeros(2, *CACHE[:3], head_dim)
    query, key, value = draw(4, 6, head_dim), draw(2, 6, head_dim), draw(2, 6, head_dim)
    return plan.attend(kernels, query, keys, values, Scoring(0.2), new=(key, value))


def paths(starts: list[list[int]], slots: list[int]) -> dict[str, Any]:
    return {"paths": (torch.tensor(starts), torch.tensor(slots))}


BAD_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "path behind the buffer": ("path", paths([[10, 0], [68, 0]], [70, 3 * TILE])),
    "path before the buffer": ("path", paths([[10, 0], [68, 0]], [70, -1])),
    "fewer slots than a path has keys": ("path", paths([[10, 0], [66, 0]], [70, 71])),
    "path before its table": ("path", paths([[10, 0], [68, -1]], [70, 71])),
    "path from a position before the first": ("path", paths([[-1, 0], [70, 0]], [70, 71])),
    "paths of other spans": ("sizes", paths([[10, 0]], [70, 71])),
    "slot behind the buffer": ("slot", {"slots": torch.tensor([72, 73, 67, 68, 69, 3 * TILE])}),
    "slot before the buffer": ("slot", {"slots": torch.tensor([72, 73, 67, 68, 69, -1])}),
    "page behind the buffer": ("page", {"pages": torch.tensor([1, 2, 3])}),
    "page before the buffer": ("page", {"pages": torch.tensor([1, -1, 0])}),
    "place behind the table": ("page", {"spans": [(0, 2, 0), (2, 3, 4)]}),
    "fewer pages than keys": ("keys", {"pages": torch.tensor([1, 2])}),
    "keys behind the buffer": (
        "keys",
        {"pages": None, "ranges": torch.tensor([[0, 3 * TILE + 1]] * 5)},
    ),
    "key before the buffer": ("keys", {"ranges": torch.tensor([[-1, 9]] * 5)}),
    "range that ends before it begins": ("keys", {"ranges": torch.tensor([[9, 8]] * 5)}),
    "fewer ranges than rows": ("keys", {"ranges": torch.tensor([[0, 9]] * 4)}),
    "span behind the rows": ("spans", {"spans": [(0, 2, 0), (2, 5, 1)]}),
    "spans with a gap": ("spans", {"spans": [(0, 2, 0), (3, 3, 1)]}),
    "span of less than no rows": ("spans", {"spans": [(0, 2, 0), (2, -1, 1)]}),
    "head size": ("head size", {"head_dim": 24}),
    "large head size": ("head size", {"head_dim": MAX_HEAD_DIM + 16}),
    "slots for other rows": ("sizes", {"slots": torch.tensor([72, 73])}),
    "no slots for new keys": ("sizes", {"slots": None}),
    "slots of another type": ("int64", {"slots": torch.zeros(6)}),
    "pages with gaps": ("contiguous", {"pages": torch.tensor([1, 1, 2, 2, 0, 0])[::2]}),
    "bias of other keys": ("sizes", {"ranges": None, "bias": torch.zeros(6, 69)}),
    "bias of another type": ("float32", {"ranges": None, "bias": torch.zeros(6, 70).double()}),
    "keys with gaps": ("sizes", {"cache": torch.zeros(2, 2, 3, TILE, 32)[..., :16]}),
    "keys of another type": ("bfloat16", {"cache": torch.zeros(2, *CACHE).bfloat16()}),
    "more K/V heads than heads": ("sizes", {"cache": torch.zeros(2, 5, *CACHE[1:])}),
}


def test_attention_over_pages_as_it_should_be_called(kernels: Library) -> None:
    assert attend_over_pages(kernels).isfinite().all()
    assert attend_over_pages(kernels, **paths([[10, 0], [68, 0]], [70, 71])).isfinite().all()


@pytest.mark.parametrize("name", BAD_TABLES)
def test_what_lies_outside_of_the_buffers_is_refused(kernels: Library, name: str) -> None:
    """Nothing has been written then."""
    message, changes = BAD_TABLES[name]
    cache = torch.zeros(2, *CACHE[:3], changes.get("head_dim", CACHE[3]))
    with pytest.raises(RuntimeError, match=message):
        attend_over_pages(kernels, **{"cache": cache, **changes})
    assert not cache.any()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("slot", {"slots": torch.tensor([0, 5, 3 * TILE])}),
        ("slot", {"slots": torch.tensor([0, -1, 5])}),
        ("sizes", {"slots": torch.tensor([0, 5])}),
        ("int64", {"slots": torch.zeros(3)}),
        ("sizes", {"layers": 3}),
        ("sizes", {"kv_heads": 3}),
        ("sizes", {"weight": draw(1, 16)}),
        ("sizes", {"angles": draw(2, 1, 16)}),
        ("bfloat16", {"angles": draw(3, 1, 16).bfloat16()}),
        ("contiguous", {"weight": draw(16, 2).T}),
    ],
)
def test_a_context_that_does_not_fit_its_pages_is_refused(
    kernels: Library, message: str, changes: dict[str, Any]
) -> None:
    """Nothing has been written then."""
    pools = [torch.zeros(2, *CACHE) for _ in range(2)]
    angles = changes.get("angles", draw(3, 1, 16))
    norms = Norm(changes.get("weight", draw(2, 16)), EPS, rounds_first=True)
    projected = draw(3, changes.get("layers", 2), 2, changes.get("kv_heads", CACHE[0]), 16)
    slots = changes.get("slots", torch.tensor([0, 5, 3 * TILE - 1]))
    with pytest.raises(RuntimeError, match=message):
        store_context(kernels, pools, slots, projected, norms, (angles, angles))
    assert not any(pool.any() for pool in pools)


def test_tensors_that_do_not_fit_each_other_are_refused(kernels: Library) -> None:
    row, heads, angles = draw(4, 16), draw(2, 3, 16), draw(2, 16)
    with pytest.raises(RuntimeError, match="sizes"):
        rms_norm(kernels, row, Norm(row[0, :8], EPS, rounds_first=True))
    with pytest.raises(RuntimeError, match=r"no kernels for torch\.float64"):
        rms_norm(kernels, row.double(), Norm(row[0].double(), EPS, rounds_first=True))
    with pytest.raises(RuntimeError, match=r"no kernels for .* on meta"):
        gated_silu(kernels, row.to("meta"))
    with pytest.raises(RuntimeError, match="sizes"):
        gated_silu(kernels, draw(4, 15))
    with pytest.raises(RuntimeError, match="sizes"):
        rotate_heads_(kernels, heads, 3, 1, (angles, angles))
    with pytest.raises(RuntimeError, match="sizes"):
        rotate_heads_(kernels, heads, 2, 1, (angles[:1], angles[:1]))
    with pytest.raises(RuntimeError, match="contiguous"):
        rotate_heads_(kernels, heads, 2, 1, (draw(16, 2).T, angles))


def test_norms_read_weights_with_gaps(kernels: Library) -> None:
    row, weight = draw(4, 16), draw(16, 2)[:, 0]
    expected = rms_norm(kernels, row, Norm(weight.clone(), EPS, rounds_first=True))
    assert torch.equal(rms_norm(kernels, row, Norm(weight, EPS, rounds_first=True)), expected)


def test_other_types_devices_and_sizes_are_left_to_torch() -> None:
    assert backend_for(torch.float32, "cpu").reads_pages
    assert not backend_for(torch.float64, "cpu").reads_pages
    assert not backend_for(torch.float16, "cpu").reads_pages
    assert not backend_for(torch.float32, "meta").reads_pages
    assert backend_for(torch.float32, "cpu", [64]).reads_pages
    assert not backend_for(torch.float32, "cpu", [64, 24]).reads_pages
    assert not backend_for(torch.float32, "cpu", [2 * MAX_HEAD_DIM]).reads_pages


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("window", [TILE * 4, 20])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spans_that_share_a_table_have_the_bits_of_spans_that_do_not(
    kernels: Library, dtype: torch.dtype, head_dim: int, window: int, num_threads: int
) -> None:
    """A path in its places and three that are not, before, at and behind the border of a page."""
    num_rows, num_path = [9, 3, 1, 2], [0, 4, 1, 5]
    pages, own_page = torch.tensor([2, 0, 1, 3]), 4 * TILE
    first = [sum(num_rows[:span]) for span in range(4)]
    query, key, value = (draw(n, sum(num_rows), head_dim, dtype=dtype) for n in (6, 2, 2))
    for context in (5, TILE - 3, TILE, 2 * TILE + 30):
        in_place = range(context, context + num_rows[0])
        slots = [place_of(pages, p) for p in in_place]
        slots += [own_page + row for row in range(first[1], sum(num_rows))]
        ends = [context + (num_path[span] or num_rows[span]) for span in range(4)]
        positions = [p for span in range(4) for p in range(ends[span] - num_rows[span], ends[span])]
        starts, path_slots = [], []
        for span in range(4):
            starts.append([ends[span] - num_path[span], len(path_slots)])
            own = slots[first[span] : first[span] + num_rows[span]]
            above = [own_page + 40 + i for i in range(num_path[span] - num_rows[span])]
            path_slots += (above + own) * (num_path[span] > 0)
        found = []
        for is_shared in (True, False):
            places = [0, 0, 0, 0] if is_shared else [0, 4, 8, 12]
            with threads(num_threads):
                plan = TiledAttention(
                    sum(num_rows),
                    list(zip(first, num_rows, places, strict=True)),
                    max(ends),
                    pages=pages if is_shared else pages.repeat(4),
                    ranges=torch.tensor([[max(0, p + 1 - window), p + 1] for p in positions]),
                    slots=torch.tensor(slots),
                    paths=(torch.tensor(starts), torch.tensor(path_slots)),
                )
                keys, values = draw(2, 2, 5, TILE, head_dim, dtype=dtype, seed=3)
                new = key, value
                found.append(plan.attend(kernels, query, keys, values, Scoring(0.2), new))
        assert torch.equal(*found), context
        flat = [pool.flatten(1, 2) for pool in (keys, values)]
        for row, (position, span) in enumerate(zip(positions, spans_of(num_rows), strict=True)):
            start, place = starts[span]
            seen = [
                path_slots[place + p - start] if p >= start else place_of(pages, p)
                for p in range(max(0, position + 1 - window), position + 1)
            ]
            k, v = (pool[:, seen].repeat_interleave(3, 0).double() for pool in flat)
            weights = (0.2 * k @ query[:, row, :, None].double()).softmax(1)
            expected = (weights * v).sum(1)
            assert (found[0][row] - expected).abs().max() < 16 * unit(dtype), (context, row)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_in_one_path_does_not_reach_another(
    kernels: Library, dtype: torch.dtype, head_dim: int, broken: float
) -> None:
    query, key, value = (draw(n, 4, head_dim, dtype=dtype) for n in (6, 2, 2))
    context, own_page = TILE + 6, 3 * TILE
    slots = [own_page + row for row in range(4)]
    found = []
    for first_value in (1.0, broken):
        value[:, 2] = first_value
        plan = TiledAttention(
            4,
            [(0, 2, 0), (2, 2, 0)],
            context + 2,
            pages=torch.tensor([2, 0]),
            ranges=torch.tensor([[0, context + 1], [0, context + 2]] * 2),
            slots=torch.tensor(slots),
            paths=(torch.tensor([[context, 0], [context, 2]]), torch.tensor(slots)),
        )
        keys, values = draw(2, 2, 4, TILE, head_dim, dtype=dtype, seed=3)
        found.append(plan.attend(kernels, query, keys, values, Scoring(0.2), (key, value)))
    assert torch.equal(bits_of(found[0][:2]), bits_of(found[1][:2]))
    assert found[0].isfinite().all()
    assert not found[1][2:].isfinite().any()


def spans_of(num_rows: list[int]) -> list[int]:
    return [span for span, num in enumerate(num_rows) for _ in range(num)]


def place_of(pages: Tensor, position: int) -> int:
    return int(pages[position // TILE]) * TILE + position % TILE
