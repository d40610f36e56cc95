"""The Triton kernels against torch's operations: the same values, the same bits for rows, times."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.kernels.backends import backend_for, card_kernels
from blockdraft.kernels.interface import Backend, Scoring, Span
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.weights import Norm
from blockdraft.models.attention.plan import AttentionPlan, LayerAttention
from gpucheck.clock import seconds_of
from gpucheck.notes import Notes, first_line
from gpucheck.row_classes import Product, classes_of
from gpucheck.rows import ALL_DTYPES, TIMED_ROWS
from gpucheck.settings import ModelSize, Settings

TILE_ROWS = (16, 32, 64, 128)
"""Rows of a product's tile, of precisions that have one tile for any number of rows."""
CONTEXTS = ((1, 1, 512), (1, 8, 2048), (1, 1, 8192), (32, 1, 512), (32, 8, 512))
"""Sequences, rows of each, and keys before them."""
SKIPPED = "there is no card; the kernels' tests run in Triton's interpreter (make test-all)"


@torch.inference_mode()
def run(settings: Settings, notes: Notes) -> None:
    """Each precision that there are kernels for, at the shapes of each model."""
    if settings.device == "cpu":
        notes.note("skipped", value=SKIPPED)
        return
    for name in ("bfloat16", "float32"):
        dtype = ALL_DTYPES[name]
        are_used, reason = card_kernels(dtype, settings.device)
        notes.note("their own check", name, value="passed" if are_used else reason)
        if not are_used:
            continue
        for model, size in settings.models.items():
            backend = backend_for(dtype, settings.device, [size.head_dim])
            attends = type(backend) is not TorchBackend
            notes.note("attention is theirs", name, model, value=attends)
            _operations(settings, notes, name, model, size)
            if attends:
                _attention(settings, notes, name, model, size)


def _operations(settings: Settings, notes: Notes, name: str, model: str, size: ModelSize) -> None:
    """Linear layers and what lies between them."""
    dtype = ALL_DTYPES[name]
    kernels, reference = backend_for(dtype, settings.device), TorchBackend(dtype)
    company = _random(settings, (max(settings.rows) + 1, max(_widths(size))), dtype)

    def compare(what: str, width: int, make: Callable[[Backend], Product]) -> None:
        with _noted(notes, name, model, what):
            measure(what, width, make)

    def measure(what: str, width: int, make: Callable[[Backend], Product]) -> None:
        rows, row = company[1:, :width], company[0, :width]
        theirs, ours = make(reference), make(kernels)
        expected, found = theirs(rows[:64]), ours(rows[:64])
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        notes.note("bits", name, model, what, value=str(classes_of(ours, rows, row, settings.rows)))
        notes.note("largest error", name, model, what, value=f"{float(error):.2g}")
        for way, product in (("torch", theirs), ("Triton", ours)):
            for number in TIMED_ROWS:
                seconds = seconds_of(partial(product, rows[:number]), settings.device)
                times = f"{way}, {number} rows"
                notes.note("ms", name, model, what, times, value=round(1e3 * seconds, 4))

    norm = Norm(_random(settings, (size.hidden,), dtype), 1e-5, True)
    compare("norm", size.hidden, lambda by: partial(by.norm, norm=norm))
    silu = torch.nn.SiLU()
    compare("gate", 2 * size.intermediate, lambda by: partial(by.gate, activation=silu))
    for layer, (outputs, inputs) in size.linears.items():
        with _noted(notes, name, model, layer):
            weight = _random(settings, (outputs, inputs), dtype) * inputs**-0.5
            compare(layer, inputs, lambda by, weight=weight: by.linear(weight))  # type: ignore[misc]
            _tiles(settings, notes, (name, model, layer), weight, company[1:, :inputs])


@contextmanager
def _noted(notes: Notes, name: str, model: str, what: str) -> Iterator[None]:
    """An operation that fails, for want of memory for instance, leaves the others."""
    try:
        yield
    except RuntimeError as error:
        notes.note("failed", name, model, what, value=first_line(error))


def _tiles(
    settings: Settings, notes: Notes, place: tuple[str, str, str], weight: Tensor, rows: Tensor
) -> None:
    """Milliseconds of a product with other tiles than those that the kernels have."""
    from blockdraft.kernels.cuda.ops import product
    from blockdraft.kernels.cuda.tiles import BY_ROWS, ONE

    one = ONE[weight.dtype]
    tiles = {f"tile of {num_rows}": replace(one, rows=num_rows) for num_rows in TILE_ROWS}
    if weight.dtype in BY_ROWS:
        tiles = {"one tile": one}
    for named, tile in tiles.items():
        for number in TIMED_ROWS:
            way = f"{named}, {number} rows"
            try:
                own = partial(product, rows[:number].contiguous(), weight, None, tile)
                found: object = round(1e3 * seconds_of(own, settings.device), 4)
            except RuntimeError as error:  # too large for a processor of the card
                found = first_line(error)
            notes.note("ms", *place, way, value=found)


def _attention(settings: Settings, notes: Notes, name: str, model: str, size: ModelSize) -> None:
    """Over pages: sequences of some rows behind a context."""
    for sequences, num_rows, context in CONTEXTS:
        what = f"attention, {sequences} x {num_rows} rows, {context} keys"
        with _noted(notes, name, model, what):
            _attention_over(settings, notes, (name, model), size, (sequences, num_rows, context))


def _attention_over(
    settings: Settings,
    notes: Notes,
    place: tuple[str, str],
    size: ModelSize,
    shape: tuple[int, int, int],
) -> None:
    (name, _), (sequences, num_rows, context) = place, shape
    dtype = ALL_DTYPES[name]
    num_pages = -(-(context + num_rows) // PAGE_SIZE)
    kv = PagedKV(
        [(size.kv_heads, size.head_dim)],
        sequences * num_pages + 1,
        dtype=dtype,
        device=settings.device,
    )
    kv.pools[0].normal_()
    tables = [range(1 + own * num_pages, 1 + (own + 1) * num_pages) for own in range(sequences)]
    positions = range(context, context + num_rows)
    spans = [
        Span(own * num_rows, num_rows, context, context + num_rows, table)
        for own, table in enumerate(tables)
    ]
    slots = torch.tensor(
        [table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for table in tables for p in positions],
        device=settings.device,
    )
    query, key, value = (
        _random(settings, (heads, sequences * num_rows, size.head_dim), dtype)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    )
    layer, found = LayerAttention(Scoring(size.head_dim**-0.5)), []
    for way, backend in (
        ("torch", TorchBackend(dtype)),
        ("Triton", backend_for(dtype, settings.device, [size.head_dim])),
    ):
        plan = AttentionPlan(backend, kv, spans, slots)
        attend = partial(plan.attend, 0, layer, query, key, value)
        found.append(attend().double())
        what = f"{sequences} x {num_rows} rows, {context} keys, {way}"
        seconds = seconds_of(attend, settings.device)
        notes.note("attention ms", *place, what, value=round(1e3 * seconds, 4))
    error = (found[1] - found[0]).abs().max() / found[0].abs().max()
    what = f"attention, {sequences} x {num_rows} rows, {context} keys"
    notes.note("largest error", *place, what, value=f"{float(error):.2g}")


def _widths(size: ModelSize) -> list[int]:
    return [2 * size.intermediate, *(inputs for _, inputs in size.linears.values())]


def _random(settings: Settings, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(settings.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=settings.device).to(dtype)
