"""Kernels over pages in int8: the numbers of the reference, and what they stand for."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.cache.paged_kv import Int8KV, PagedKV
from blockdraft.kernels.backends import backend_for, reference_for
from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.ops import TiledAttention
from blockdraft.kernels.interface import TILE, Backend, Scoring, Span
from tests.torch_threads import threads

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

DTYPES = [torch.float32, torch.bfloat16]
HEADS = 6
Shape = tuple[int, int]
SHAPES: list[Shape] = [(2, 16), (3, 64), (1, 80), (6, 128), (2, 512)]
"""K/V heads, and values of each."""
NUM_PAGES = 6
OWN_PAGE = 5
"""Of the branches of a tree."""
TABLE = [3, 1, 4]
CONTEXT = 2 * TILE - 3
SPANS = [
    Span(0, 7, CONTEXT, CONTEXT + 7, TABLE),
    # Two branches: behind two tokens of the first path, and behind none.
    Span(7, 3, CONTEXT + 2, CONTEXT + 5, TABLE, [TILE, TILE + 1, 330, 331, 332]),
    Span(10, 1, CONTEXT, CONTEXT + 1, TABLE, [333]),
    Span(11, 4, 9, 13, [2]),
]
NUM_ROWS = 16
"""The last one only fills up."""


@pytest.fixture
def kernels() -> Library:
    found = library()
    assert found is not None
    return found


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(*shape[:-1], 1, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


def slot(table: Sequence[int], position: int) -> int:
    return table[position // TILE] * TILE + position % TILE


def filled_pages(shape: Shape, dtype: torch.dtype) -> Int8KV:
    """With a key and a value at each slot, by the reference."""
    kv = Int8KV([shape], NUM_PAGES, dtype=dtype, device="cpu")
    num_slots = NUM_PAGES * TILE
    kv.write(0, torch.arange(num_slots), *draw(2, shape[0], num_slots, shape[1], dtype=dtype))
    return kv


def slots() -> Tensor:
    own = [slot(TABLE, p) for p in range(CONTEXT, CONTEXT + 7)]
    own += [330, 331, 332, 333, *(slot([2], p) for p in range(9, 13)), 0]
    return torch.tensor(own)


def ranges(window: int) -> Tensor:
    positions = [p for span in SPANS for p in range(span.start, span.start + span.num_rows)]
    return torch.tensor([[max(0, p + 1 - window), p + 1] for p in positions])


def attend(backend: Backend, kv: PagedKV, new: Tensor, window: int = 4 * TILE) -> Tensor:
    """With soft cap and sinks, [rows of spans, heads, head_dim]."""
    query = draw(HEADS, NUM_ROWS, new.shape[-1], dtype=new.dtype, seed=2)
    scoring = Scoring(0.2, 30.0, draw(HEADS, 1)[:, 0])
    rows = backend.paged_rows(SPANS, slots(), NUM_ROWS).seeing(ranges(window))
    return rows.attend(kv, 0, query, new[0], new[1], scoring)[: NUM_ROWS - 1]


def new_rows(shape: Shape, dtype: torch.dtype) -> Tensor:
    return draw(2, shape[0], NUM_ROWS, shape[1], dtype=dtype, seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_numbers_and_scales_of_the_reference(
    shape: Shape, dtype: torch.dtype
) -> None:
    """Also of what is no number, of zeros, of next to nothing, and of numbers halfway between."""
    new = new_rows(shape, dtype)
    keys = new[0, 0]
    keys[0] = 0.0
    keys[1, 3], keys[2, 5], keys[3, 15] = torch.nan, torch.inf, -torch.inf
    keys[4, 2], keys[4, 3] = torch.inf, torch.nan
    keys[5] *= 1e-38
    keys[6] = 1e-44
    keys[7] = torch.arange(keys.shape[1]) % 64 + 0.5
    keys[7, 9] = -127.0
    keys[8] = -3.0
    found, expected = filled_pages(shape, dtype), filled_pages(shape, dtype)
    attend(backend_for(dtype, "cpu"), found, new)
    expected.write(0, slots(), new[0], new[1])
    assert torch.equal(found.pools[0], expected.pools[0])
    close = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(found.scales[0], expected.scales[0], **close)
    assert found.scales[0].isnan().sum() == 2
    assert found.scales[0].isinf().sum() == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [4 * TILE, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_has_the_bits_that_it_has_over_what_the_numbers_stand_for(
    shape: Shape, dtype: torch.dtype, window: int, num_threads: int
) -> None:
    """And is close to the reference's."""
    new = new_rows(shape, dtype)
    kv, same = filled_pages(shape, dtype), filled_pages(shape, dtype)
    backend = backend_for(dtype, "cpu")
    with threads(num_threads):
        found = attend(backend, kv, new, window)
    plain = PagedKV([shape], NUM_PAGES, dtype=dtype, device="cpu")
    everything = kv.gather(0, torch.arange(NUM_PAGES))
    plain.pools[0].copy_(everything.view_as(plain.pools[0]))
    rounded = everything.index_select(2, slots())
    assert torch.equal(found, attend(backend, plain, rounded, window))
    expected = attend(reference_for(dtype, "cpu"), same, new, window)
    error = (found.double() - expected.double()).abs().max()
    assert error < 16 * torch.finfo(dtype).eps * expected.abs().max()


def test_a_key_that_is_no_number_is_seen_by_those_who_see_it() -> None:
    kv, new = filled_pages((2, 16), torch.float32), new_rows((2, 16), torch.float32)
    backend = backend_for(torch.float32, "cpu")
    expected = attend(backend, kv, new)
    new[0, :, 5, 3] = torch.nan
    found = attend(backend, kv, new)
    # Rows 5 and 6 of the first path; the branches leave it before.
    assert found[5:7].isnan().all()
    others = [row for row in range(NUM_ROWS - 1) if row not in (5, 6)]
    assert torch.equal(found[others], expected[others])


BAD_SCALES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("float32 on cpu", {"scales": None}),
    "of keys in float32": ("int8 on cpu", {"pool": torch.zeros(2, 2, 3, TILE, 16)}),
    "of another type": ("float32 scales", {"scales": torch.zeros(2, 2, 3, TILE, 1).double()}),
    "of fewer slots": ("sizes", {"scales": torch.zeros(2, 2, 2, TILE, 1)}),
    "of fewer heads": ("sizes", {"scales": torch.zeros(2, 1, 3, TILE, 1)}),
    "of every value": ("sizes", {"scales": torch.zeros(2, 2, 3, TILE, 16)}),
    "with gaps": ("contiguous", {"scales": torch.zeros(2, 2, 3, TILE, 2)[..., :1]}),
    "of keys with gaps": (
        "sizes",
        {"pool": torch.zeros(2, 2, 3, TILE, 32, dtype=torch.int8)[..., :16]},
    ),
    "of heads apart": (
        "contiguous",
        {"pool": torch.zeros(2, 4, 3, TILE, 16, dtype=torch.int8)[:, ::2]},
    ),
}


@pytest.mark.parametrize("name", BAD_SCALES)
def test_scales_that_do_not_fit_are_refused(kernels: Library, name: str) -> None:
    """Nothing has been written then."""
    message, changes = BAD_SCALES[name]
    pool, scales = torch.zeros(2, 2, 3, TILE, 16, dtype=torch.int8), torch.zeros(2, 2, 3, TILE, 1)
    given: dict[str, Any] = {"pool": pool, "scales": scales} | changes
    plan = TiledAttention(
        1, [(0, 1, 0)], 1, pages=torch.tensor([1]), ranges=torch.tensor([[0, 1]]),
        slots=torch.tensor([TILE]),
    )  # fmt: skip
    query, key = draw(4, 1, 16), draw(2, 1, 16)
    with pytest.raises(RuntimeError, match=message):
        plan.attend(
            kernels, query, *given["pool"], Scoring(0.2), new=(key, key), scales=given["scales"]
        )
    assert not given["pool"].any()
    plan.attend(kernels, query, *pool, Scoring(0.2), new=(key, key), scales=scales)
    assert pool.any()
    assert scales.any()
