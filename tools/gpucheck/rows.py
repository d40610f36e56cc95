"""Which operations give a row the same bits for any number of rows beside it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.interface import Scoring
from blockdraft.kernels.torch.attention import grouped_attention
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.weights import Norm
from blockdraft.models.target.loading import DTYPES
from gpucheck.clock import seconds_of
from gpucheck.notes import Notes, first_line
from gpucheck.row_classes import (
    Product,
    RowClasses,
    classes_of,
    in_batches,
    in_tiles,
    row_classes,
)
from gpucheck.rules import key_tile, ruled
from gpucheck.settings import ModelSize, Settings

TIMED_ROWS = (1, 32, 512)
SOFTMAX_KEYS = (64, 256, 1024, 1088, 4096)
KEY_TILES = (64, 128, 1024, 2**31)
SEEN_PAGES = 2
"""Pages that the row sees; the ones behind are hidden."""
PAGE = 64
ATTENTION_ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
ALL_DTYPES = {**DTYPES, "float16": torch.float16}


@torch.inference_mode()
def run(settings: Settings, notes: Notes) -> None:
    """Linear layers first, then the rest, all in one precision before the next one."""
    for name in settings.dtypes:
        for model, size in settings.models.items():
            for measure in (_operations, _attention, _linears):
                try:
                    measure(settings, notes, name, model, size)
                except RuntimeError as error:  # out of memory, too; the others may do with less
                    what = measure.__name__.strip("_")
                    notes.note("failed", f"{what}, {name}, {model}", value=first_line(error))


def _linears(settings: Settings, notes: Notes, name: str, model: str, size: ModelSize) -> None:
    counts: Counter[str] = Counter()
    for layer, shape in size.linears.items():
        try:
            found = _linear(settings, ALL_DTYPES[name], shape)
        except RuntimeError as error:  # out of memory, too
            found = {"error": first_line(error)}
        notes.note("linear", name, model, f"{layer} {shape[0]}x{shape[1]}", value=found)
        counts.update(way for way, classes in found.items() if classes == "same bits")
        notes.note("linear that hold", name, model, value=dict(counts))
    notes.note("number of linear", model, value=len(size.linears))


def _linear(settings: Settings, dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, object]:
    """Classes of each way to multiply, and milliseconds where a GPU makes them worth knowing."""
    weight = _random(settings, shape, dtype, shape[1] ** -0.5)
    company, row = _rows(settings, shape[1], dtype)

    def plain(rows: Tensor) -> Tensor:
        return F.linear(rows, weight)

    def classes(product: Product, tried: tuple[int, ...]) -> str:
        return str(classes_of(product, company, row, tried))

    found: dict[str, object] = {"plain": classes(plain, settings.rows)}
    if settings.device == "cuda" and dtype != torch.float32:
        with _whole_sums():
            found["plain, whole sums"] = classes(plain, settings.rows)
    for tile in settings.tiles:
        found[f"tiles of {tile}"] = classes(in_tiles(plain, tile), settings.tiled_rows)
    batched = in_batches(weight, settings.tiles[0])
    found[f"batched tiles of {settings.tiles[0]}"] = classes(batched, settings.tiled_rows)
    if settings.device == "cuda":
        found["ms"] = _milliseconds(settings, weight, company)
    return found


def _milliseconds(settings: Settings, weight: Tensor, company: Tensor) -> dict[str, float]:
    ways: dict[str, Product] = {"plain": lambda rows: F.linear(rows, weight)}
    for tile in settings.tiles:
        ways[f"tiles of {tile}"] = in_tiles(ways["plain"], tile)
    found = {}
    for name, way in ways.items():
        for number in TIMED_ROWS:
            seconds = seconds_of(partial(way, company[:number]), settings.device)
            found[f"{name}, {number} rows"] = round(1e3 * seconds, 4)
    return found


@contextmanager
def _whole_sums() -> Iterator[None]:
    """Sums of parts of a product in float32."""
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        ) = before


def _operations(settings: Settings, notes: Notes, name: str, model: str, size: ModelSize) -> None:
    """Norms and elementwise operations as a layer has them, and softmax over keys."""
    dtype = ALL_DTYPES[name]
    backend = TorchBackend(dtype)
    weight = _random(settings, (size.hidden,), dtype)
    products: dict[str, tuple[Product, int]] = {
        "norm by parts": (lambda x: backend.norm(x, Norm(weight, 1e-5, True)), size.hidden),
        "norm by torch": (lambda x: backend.norm(x, Norm(weight, 1e-5, False)), size.hidden),
        "gate": (lambda x: backend.gate(x, F.silu), 2 * size.intermediate),
        "rotation": (_rotated, size.head_dim * size.heads),
    }
    company, row = _rows(settings, max(width for _, width in products.values()), dtype)
    for what, (product, width) in products.items():
        found = classes_of(product, company[:, :width], row[:width], settings.rows)
        notes.note("operations", name, model, what, value=str(found))
    if name != settings.dtypes[0]:
        return
    company, row = _rows(settings, max(SOFTMAX_KEYS), torch.float32)
    for keys in SOFTMAX_KEYS:
        found = classes_of(_softmax, company[:, :keys], row[:keys], settings.rows)
        notes.note("softmax in float32", f"{keys} keys", value=str(found))
    notes.note("softmax in float32", "keys hidden behind 64", value=str(_hidden_keys(settings)))


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def _rotated(heads: Tensor) -> Tensor:
    """Sizes of the numbers do not matter, nor what turns by which angle."""
    return heads * 0.7 + heads.roll(heads.shape[-1] // 2, dims=-1) * 0.3


def _hidden_keys(settings: Settings) -> RowClasses:
    """Of a softmax over 64 keys, with ever more hidden ones behind them."""
    scores = _random(settings, (8, PAGE), torch.float32)

    def run(pages: int) -> list[Tensor]:
        hidden = scores.new_full((8, (pages - 1) * PAGE), -torch.inf)
        return [torch.cat((scores, hidden), dim=1).softmax(dim=-1)[0, :PAGE]]

    return row_classes(run, (1, *settings.pages))


def _attention(settings: Settings, notes: Notes, name: str, model: str, size: ModelSize) -> None:
    """One row of one sequence: rows of its own beside it, other sequences, pages it cannot see."""
    dtype = ALL_DTYPES[name]
    for tile in KEY_TILES:
        shown = f"keys by {tile}" if tile < 2**31 else "all keys at once"
        with ruled(dtype, key_tile(dtype, tile)):
            attention = _Attention(settings, dtype, size)
            for way, tried in {
                "rows": ATTENTION_ROWS,
                "batch": settings.batches,
                "pages": settings.pages,
            }.items():
                notes.note(
                    *("attention", name, model, SHOWN[way], shown),
                    value=_classes(partial(_varied, attention, way), tried),
                )


SHOWN = {"rows": "rows beside", "batch": "sequences beside", "pages": "pages behind"}


def _classes(run: Callable[[int], list[Tensor]], tried: Sequence[int]) -> str:
    try:
        return str(row_classes(run, tried))
    except RuntimeError as error:  # out of memory, too
        return f"error: {first_line(error)}"


def _varied(attention: "_Attention", way: str, number: int) -> list[Tensor]:
    return attention(**{way: number})


class _Attention:
    """A row that sees the first pages of its keys, in products of several sizes."""

    def __init__(self, settings: Settings, dtype: torch.dtype, size: ModelSize) -> None:
        self._size, self._pages = size, settings.pages[0]
        most_rows, most_batch, most_keys = 64, max(settings.batches), PAGE * max(settings.pages)
        group = size.heads // size.kv_heads
        head = (size.kv_heads, 1, group, most_rows, size.head_dim)
        self._query = _random(settings, head, dtype)
        self._others = _random(
            settings, (size.kv_heads, most_batch, group, 1, size.head_dim), dtype
        )
        self._key, self._value = (
            _random(settings, (size.kv_heads, most_keys, size.head_dim), dtype) for _ in range(2)
        )

    def __call__(self, rows: int = 4, batch: int = 1, pages: int | None = None) -> list[Tensor]:
        """What the first row of the first sequence attends to, of [kv_heads, group, head_dim]."""
        size, keys = self._size, PAGE * (pages or self._pages)
        query = self._query[:, :, :, :rows].expand(-1, batch, -1, -1, -1).contiguous()
        query[:, 1:] += self._others[:, : batch - 1]
        key, value = (
            kept[:, None, :keys].expand(-1, batch, -1, -1).reshape(-1, keys, size.head_dim)
            for kept in (self._key, self._value)
        )
        bias = torch.zeros(batch, rows, keys, dtype=torch.float32, device=key.device)
        bias[:, :, SEEN_PAGES * PAGE - 7 :] = -torch.inf
        scoring = Scoring(size.head_dim**-0.5)
        return [grouped_attention(query, key, value, bias, scoring)[:, 0, :, 0]]


def _rows(settings: Settings, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Company for a row, and the row."""
    rows = _random(settings, (max((*settings.rows, *TIMED_ROWS)) + 1, width), dtype)
    return rows[1:], rows[0]


def _random(
    settings: Settings, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator(settings.device).manual_seed(len(shape) + shape[0])
    return (torch.randn(shape, generator=generator, device=settings.device) * scale).to(dtype)
