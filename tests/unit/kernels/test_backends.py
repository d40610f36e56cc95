"""Every backend computes what the reference computes, and a row alone has its bits among others."""

import copy
import math
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.errors import ModelError
from blockdraft.kernels.backends import backend_for, first_largest, widened
from blockdraft.kernels.cpu.backend import NativeBackend
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.onednn import OneDnnBackend, supports_bfloat16
from blockdraft.kernels.interface import Backend, LayerParts, Scoring, Span
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.torch.vectors import in_whole_vectors
from blockdraft.kernels.weights import Norm
from blockdraft.models.attention.plan import AttentionPlan, LayerAttention
from blockdraft.models.attention.visibility import Visibility
from blockdraft.models.layers.layer import DecoderLayer
from blockdraft.models.layers.row_blocks import RowBlocks, largest_block
from tests.tensors import draw
from tests.triton_interpreter import triton_on_cpu

DTYPES = [torch.float32, *([torch.bfloat16] if supports_bfloat16() else [])]
HEADS, KV_HEADS, HEAD_DIM, SIZE, INNER = 4, 2, 16, 64, 96
NUM_ROWS, NUM_KEYS = 24, 150


class Silu(nn.SiLU):
    """As models have it where rows must not depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return in_whole_vectors(super().forward, x)


def native(dtype: torch.dtype) -> Backend:
    kernels = library()
    if kernels is None:
        pytest.skip("no C++ compiler here")
    return NativeBackend(kernels, dtype)


def native_products(dtype: torch.dtype) -> Backend:
    """Also on a machine whose products other libraries multiply better; so layers run whole."""
    kernels = copy.copy(library())
    if kernels is None:
        pytest.skip("no C++ compiler here")
    own = kernels.product_step
    kernels.product_step = lambda flag: own(flag) or 1
    return NativeBackend(kernels, dtype)


BACKENDS: dict[str, Callable[[torch.dtype], Backend]] = {
    "torch": TorchBackend,
    "oneDNN": OneDnnBackend,
    "native": native,
    "native products": native_products,
    "triton": triton_on_cpu,
}


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, dtype: torch.dtype) -> Backend:
    return BACKENDS[request.param](dtype)


def make_norm(size: int, dtype: torch.dtype, rounds_first: bool = True, seed: int = 5) -> Norm:
    return Norm(1 + 0.1 * draw(size, dtype=dtype, seed=seed), 1e-5, rounds_first)


def angles(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turned = draw(num_rows, 1, HEAD_DIM, dtype=torch.float32, seed=6)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def check(
    backend: Backend, dtype: torch.dtype, run: Callable[[Backend, slice], Tensor], units: float = 4
) -> None:
    """Rows of `run` against the reference, and against the same rows in smaller forwards."""
    found, expected = run(backend, slice(NUM_ROWS)), run(TorchBackend(dtype), slice(NUM_ROWS))
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max()
    assert error <= units * torch.finfo(dtype).eps * expected.double().abs().max()
    multiple = backend.rule.row_multiple
    for first, end in ((0, multiple), (multiple, 3 * multiple), (NUM_ROWS - multiple, NUM_ROWS)):
        assert torch.equal(run(backend, slice(first, end)), found[first:end]), (first, end)


@pytest.mark.parametrize("rounds_first", [True, False])
@torch.inference_mode()
def test_norms(backend: Backend, dtype: torch.dtype, rounds_first: bool) -> None:
    x, residual = (draw(NUM_ROWS, SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    norm = make_norm(SIZE, dtype, rounds_first)
    check(backend, dtype, lambda by, rows: by.norm(x[rows], norm))
    check(backend, dtype, lambda by, rows: by.add_norm(x[rows], residual[rows], norm)[1])
    total, normed = backend.add_norm(x, residual, norm)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, backend.norm(total, norm))


@pytest.mark.parametrize("has_norms", [True, False])
@torch.inference_mode()
def test_rotations(backend: Backend, dtype: torch.dtype, has_norms: bool) -> None:
    heads = draw(NUM_ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype)
    cos, sin = angles(NUM_ROWS, dtype)
    norms = (make_norm(HEAD_DIM, dtype), make_norm(HEAD_DIM, dtype, seed=7)) if has_norms else None

    def run(by: Backend, rows: slice) -> Tensor:
        rotation = cos[rows].contiguous(), sin[rows].contiguous()
        num_heads = HEADS, KV_HEADS, KV_HEADS
        return torch.cat(by.rotate_(heads[rows].clone(), num_heads, rotation, norms), dim=-2)

    check(backend, dtype, run)


@torch.inference_mode()
def test_gates(backend: Backend, dtype: torch.dtype) -> None:
    gate_up = 3 * draw(NUM_ROWS, 2 * INNER, dtype=dtype)
    check(backend, dtype, lambda by, rows: by.gate(gate_up[rows], Silu()))
    other = nn.Tanh()
    assert torch.equal(backend.gate(gate_up, other), TorchBackend(dtype).gate(gate_up, other))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [1, 5, 16, 63, 64, 65, 1000])
@torch.inference_mode()
def test_the_largest_scores(backend: Backend, dtype: torch.dtype, size: int) -> None:
    scores = 5 * draw(7, size, dtype=dtype)
    scores[0] = torch.arange(size)
    scores[1] = -torch.arange(size)
    scores[2] = 0.0
    scores[3, 0] = scores[3, -1] = -torch.inf
    num = min(6, size)
    found = backend.largest(scores, 6)
    whole = scores.float()
    assert found.values.tolist() == whole.topk(num).values.tolist()
    assert whole.gather(1, torch.from_numpy(found.places)).tolist() == found.values.tolist()
    assert all(len(set(places)) == num for places in found.places.tolist())
    if size > 1:
        totals = (whole.logsumexp(1) - whole.amax(1)).exp()
        assert torch.allclose(torch.from_numpy(found.totals), totals, rtol=1e-5)


@torch.inference_mode()
def test_what_is_no_number_is_not_among_the_largest(backend: Backend, dtype: torch.dtype) -> None:
    scores = draw(2, 100, dtype=dtype)
    scores[0, 7] = torch.nan
    scores[1] = torch.nan
    scores[1, 50], scores[1, 60] = 1.0, -2.0
    found = backend.largest(scores, 3)
    others = torch.cat((scores[0, :7], scores[0, 8:])).float().topk(3).values
    assert found.values[0].tolist() == others.tolist()
    assert found.places[1, :2].tolist() == [50, 60]
    assert found.values[1, 2] == -torch.inf
    assert found.totals[1] == pytest.approx(1 + math.exp(-3), rel=1e-5)


@pytest.mark.skipif(library() is None, reason="no kernels on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 5, 16, 63, 64, 65, 1000])
def test_the_first_of_the_largest_scores(dtype: torch.dtype, size: int) -> None:
    """Values on a coarse grid tie often; in some rows one is no number, or infinite."""
    scores = draw(200, size, dtype=dtype).mul(2).round()
    for row, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf), (4, torch.nan)):
        scores[row, (7 * row) % size] = value
    scores[5] = -torch.inf
    scores[6] = -torch.inf
    scores[6, size - 1] = -300.0
    found = first_largest(scores)
    expected = scores.float().numpy().argmax(1)
    assert found is not None
    for row, own, place in zip(scores, found, expected.tolist(), strict=True):
        has_choice = not row.isnan().any() and row.max() > -torch.inf
        assert own == (place if has_choice else -1)
    assert first_largest(scores[:0]) == []
    assert first_largest(scores[::2]) == found[::2]
    assert first_largest(scores.half()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 37), (2, 64), (0, 5)])
def test_values_are_widened(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = draw(*shape, dtype=torch.float32).to(dtype)
    values.view(-1)[-1:] = torch.nan
    values.view(-1)[:1] = -torch.inf
    assert np.array_equal(widened(values), values.float().numpy(), equal_nan=True)
    assert np.array_equal(widened(values[::2]), values[::2].float().numpy(), equal_nan=True)


@torch.inference_mode()
def test_the_context_of_all_layers_is_stored(backend: Backend, dtype: torch.dtype) -> None:
    num_tokens, num_layers = 20, 3
    projected = draw(num_tokens, num_layers, 2, KV_HEADS, HEAD_DIM, dtype=dtype)
    norms = Norm(1 + 0.1 * draw(num_layers, HEAD_DIM, dtype=dtype, seed=3), 1e-5, True)
    rotation = angles(num_tokens, dtype)
    slots = torch.randperm(3 * PAGE_SIZE, generator=torch.Generator().manual_seed(1))[:num_tokens]
    kv = PagedKV([(KV_HEADS, HEAD_DIM)] * num_layers, 3, dtype=dtype, device=torch.device("cpu"))
    for pool in kv.pools:
        pool.zero_()
    backend.store_context(kv, slots, projected.clone(), norms, rotation)
    free = torch.ones(3 * PAGE_SIZE, dtype=torch.bool)
    free[slots] = False
    for layer, pool in enumerate(kv.pools):
        # As the heads of a layer's block are, with no query heads beside them.
        own = Norm(norms.weight[layer], norms.eps, True)
        heads = projected[:, layer].flatten(1, 2).clone()
        counts = 0, KV_HEADS, KV_HEADS
        _, keys, values = backend.rotate_(heads, counts, rotation, (own, own))
        stored = pool.view(2, KV_HEADS, -1, HEAD_DIM)
        assert torch.equal(stored[1][:, slots], values.transpose(0, 1))
        error = (stored[0][:, slots].float() - keys.transpose(0, 1).float()).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * keys.abs().max()
        assert not stored[:, :, free].any()


@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_linear_layers(backend: Backend, dtype: torch.dtype, has_bias: bool) -> None:
    weight, x = draw(INNER, SIZE, dtype=dtype), draw(NUM_ROWS, SIZE, dtype=dtype, seed=1)
    bias = draw(INNER, dtype=dtype, seed=2) if has_bias else None

    def run(by: Backend, rows: slice) -> Tensor:
        linear: Any = by.linear(weight, bias)
        assert (linear.shape, linear.dtype) == (weight.shape, dtype)
        if not linear.keeps_rows:
            linear = RowBlocks(linear, largest_block(linear, weight.shape, dtype, by.rule))
        return linear(x[rows].clone())

    check(backend, dtype, run, units=16)


@pytest.mark.parametrize(
    "scoring", [Scoring(0.3), Scoring(0.25, softcap=3.0, sinks=torch.ones(HEADS))], ids=str
)
@torch.inference_mode()
def test_attention_of_one_sequence(backend: Backend, dtype: torch.dtype, scoring: Scoring) -> None:
    query = draw(HEADS, NUM_ROWS, HEAD_DIM, dtype=dtype)
    key, value = (draw(KV_HEADS, NUM_KEYS, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    hidden = torch.arange(NUM_KEYS) > NUM_KEYS - NUM_ROWS + torch.arange(NUM_ROWS)[:, None]
    bias = torch.zeros(1, NUM_ROWS, NUM_KEYS).masked_fill(hidden, -torch.inf)

    def run(by: Backend, rows: slice) -> Tensor:
        return by.attend(query[:, rows].contiguous(), key, value, bias[:, rows], scoring)

    check(backend, dtype, run, units=64)


def make_layer(backend: Backend, dtype: torch.dtype) -> DecoderLayer:
    num_qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = (num_qkv, SIZE), (SIZE, HEADS * HEAD_DIM), (2 * INNER, SIZE), (SIZE, INNER)
    linears = [
        backend.linear((draw(*shape, dtype=torch.float32, seed=seed) * shape[1] ** -0.5).to(dtype))
        for seed, shape in enumerate(shapes, start=10)
    ]
    parts = LayerParts(
        *linears,
        norm=make_norm(SIZE, dtype),
        mlp_norm=make_norm(SIZE, dtype, seed=8),
        head_norms=(make_norm(HEAD_DIM, dtype), make_norm(HEAD_DIM, dtype, seed=7)),
        num_heads=(HEADS, KV_HEADS, KV_HEADS),
        head_dim=HEAD_DIM,
        activation=Silu(),
    )
    return DecoderLayer(backend, parts)


@pytest.mark.parametrize("visibility", [Visibility(), Visibility(False, 20)], ids=str)
@torch.inference_mode()
def test_layers_over_pages(backend: Backend, dtype: torch.dtype, visibility: Visibility) -> None:
    """Of a sequence behind a context, whole where that is possible, and of parts of it.

    A row that looks ahead needs the keys there, so it is run with all rows only.
    """
    hidden = draw(NUM_ROWS, SIZE, dtype=dtype)
    cos, sin = angles(NUM_ROWS, dtype)
    start, page_ids = 2 * PAGE_SIZE - 10, [3, 1, 2]
    before = torch.arange(start)
    slots = torch.tensor(page_ids)[before // PAGE_SIZE] * PAGE_SIZE + before % PAGE_SIZE
    context = draw(2, KV_HEADS, start, HEAD_DIM, dtype=dtype, seed=3)
    attention = LayerAttention(Scoring(0.25), visibility)

    def run(by: Backend, rows: slice) -> Tensor:
        kv = PagedKV([(KV_HEADS, HEAD_DIM)], 4, dtype=dtype, device="cpu")
        kv.write(0, slots, *context)
        output = []
        for first, end in ((0, rows.start or 0), (rows.start or 0, rows.stop)):
            if first == end:
                continue
            positions = torch.arange(start + first, start + end)
            own = torch.tensor(page_ids)[positions // PAGE_SIZE] * PAGE_SIZE
            span = Span(0, end - first, start + first, start + end, page_ids)
            plan = AttentionPlan(by, kv, [span], own + positions % PAGE_SIZE, 1)
            rotation = cos[first:end].contiguous(), sin[first:end].contiguous()
            layer = make_layer(by, dtype)
            output.append(layer.over_pages(plan, 0, attention, hidden[first:end], rotation))
        return output[-1]

    if visibility.is_causal:
        check(backend, dtype, run, units=128)
    else:
        found, expected = (run(by, slice(NUM_ROWS)) for by in (backend, TorchBackend(dtype)))
        error = (found.double() - expected.double()).abs().max()
        assert error <= 128 * torch.finfo(dtype).eps * expected.double().abs().max()


def test_a_layer_runs_whole_where_all_of_it_is_native() -> None:
    assert make_layer(native_products(torch.float32), torch.float32).whole is not None
    assert make_layer(OneDnnBackend(torch.float32), torch.float32).whole is None


def test_a_layer_that_needs_more_memory_than_there_is_says_so() -> None:
    # More than any heap of malloc holds (64 MB), and in a thread of its own, since each keeps what
    # its layers needed before: what is free already would do for less.
    num_rows, dtype = 256 * PAGE_SIZE * 8, torch.float32
    backend, rows = native_products(dtype), torch.arange(num_rows)
    kv = PagedKV([(KV_HEADS, HEAD_DIM)], num_rows // PAGE_SIZE, dtype=dtype, device="cpu")
    span = Span(0, num_rows, 0, num_rows, list(range(num_rows // PAGE_SIZE)))
    plan = AttentionPlan(backend, kv, [span], rows, 1)
    layer, attention = make_layer(backend, dtype), LayerAttention(Scoring(0.25), Visibility())
    inputs = draw(num_rows, SIZE, dtype=dtype), angles(num_rows, dtype)

    @torch.inference_mode()
    def run() -> None:
        with mapped_at_most(2 * inputs[0].nbytes), pytest.raises(MemoryError, match="kernel"):
            layer.over_pages(plan, 0, attention, *inputs)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


@contextmanager
def mapped_at_most(more: int) -> Iterator[None]:
    """Bounds what this process may map, to what it has mapped and so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_the_rule_is_the_backends() -> None:
    assert backend_for(torch.float32, "cpu").rule.row_multiple == 4
    assert backend_for(torch.bfloat16, "cpu").rule.row_multiple == 2
    with pytest.raises(ModelError, match="float16"):
        _ = backend_for(torch.float16, "cpu").rule
