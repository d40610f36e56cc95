"""Whether kernels compute what torch computes, and each row as if it were alone.

Small shapes, on the card itself, once a process. The check of a load is another one: it runs the
model as it is deployed.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from blockdraft.kernels.interface import TILE, Backend, Scoring, Span
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.weights import Norm

NUMS_ROWS = (1, 2, 5, 8, 16, 17, 32, 33, 64, 65, 200)
"""Around those that choose other tiles of a product, or another way to attend."""
SIZE, INNER, HEADS, KV_HEADS = 144, 80, 6, 2
PRODUCTS = ((200, 2048, 1), (200, 2064, 1), (200, 2048, 62), (200, 2064, 62))
"""Outputs, inputs, and how often the weight is repeated: sums are long, whole tiles of inputs or
not, and few outputs have other tiles than many."""
NUM_KEYS = 3 * TILE + 9
"""More than there are rows: each sees some, as torch's attention over no key is NaN on a card."""
NUM_PAGES = 67
"""Of the longest row: of its keys the parts are longer than the shortest ones."""
WINDOW = 21 * TILE
PLACES = (0, 13, 63)
"""Of the rows that are computed in company."""
MOST_UNITS = 64
"""Units in the last place of the largest value by which a kernel may differ from torch."""

Compute = Callable[[Backend, Tensor], Tensor]
"""A backend's operation on some of the rows, whose numbers it is given -> [rows, any]."""


@torch.inference_mode()
def first_fault(backend: Backend, dtype: torch.dtype, device: torch.device | str) -> str | None:
    """What is wrong with products, norms, rotations or gates; None if nothing is."""
    return _first(backend, dtype, device, _operations(dtype, device))


@torch.inference_mode()
def attention_fault(
    backend: Backend, dtype: torch.dtype, device: torch.device | str, head_dim: int
) -> str | None:
    """What is wrong with attention over heads of a size; None if nothing is."""
    return _first(backend, dtype, device, _attentions(dtype, device, head_dim))


def _first(
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device | str,
    operations: Iterator[tuple[str, Compute]],
) -> str | None:
    reference = TorchBackend(dtype)
    for name, compute in operations:
        everything = torch.arange(max(NUMS_ROWS), device=device)
        found, expected = compute(backend, everything), compute(reference, everything)
        error = (found.double() - expected.double()).abs().max()
        allowed = MOST_UNITS * torch.finfo(dtype).eps * expected.double().abs().max()
        if not error <= allowed:  # also if it is no number
            return f"{name} differs from torch's by {float(error):.2g}"
        for num_rows in NUMS_ROWS:
            for place in PLACES:
                rows = (everything[:num_rows] + place) % max(NUMS_ROWS)
                if not torch.equal(compute(backend, rows), found[rows]):
                    return f"{name}: {num_rows} rows have other bits than {max(NUMS_ROWS)}"
    return None


def _operations(dtype: torch.dtype, device: torch.device | str) -> Iterator[tuple[str, Compute]]:
    draw = _Draw(dtype, device)
    x, residual, gate_up = draw(SIZE), draw(SIZE), draw(2 * INNER)
    for num_outputs, num_inputs, repeated in PRODUCTS:
        rows, bias = draw(num_inputs), draw.weight(num_outputs * repeated)
        weight = draw.weight(num_outputs, num_inputs).repeat(repeated, 1)

        def multiplied(
            by: Backend, own: Tensor, x: Tensor = rows, weight: Tensor = weight, b: Tensor = bias
        ) -> Tensor:
            return by.linear(weight, b)(x[own])

        yield "a product", multiplied
    for rounds_first in (True, False):
        norm = Norm(draw.weight(SIZE), 1e-5, rounds_first)

        def normed(by: Backend, rows: Tensor, norm: Norm = norm) -> Tensor:
            return by.norm(x[rows], norm)

        def added(by: Backend, rows: Tensor, norm: Norm = norm) -> Tensor:
            return torch.cat(by.add_norm(x[rows], residual[rows], norm), dim=-1)

        yield "a norm", normed
        yield "a norm of a sum", added
    yield "a gate", lambda by, rows: by.gate(gate_up[rows], nn.SiLU())
    head_dim, num_heads = 32, (HEADS, KV_HEADS, KV_HEADS)
    heads = draw(sum(num_heads) * head_dim).view(-1, sum(num_heads), head_dim)
    angles = draw(head_dim).float()[:, None]
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = tuple(Norm(draw.weight(head_dim), 1e-5, True) for _ in range(2))

    def rotated(by: Backend, rows: Tensor) -> Tensor:
        own = heads[rows], num_heads, (rotation[0][rows], rotation[1][rows])
        return torch.cat(by.rotate_(*own, (norms[0], norms[1])), dim=1).flatten(1)

    yield "a rotation", rotated


def _attentions(
    dtype: torch.dtype, device: torch.device | str, head_dim: int
) -> Iterator[tuple[str, Compute]]:
    draw = _Draw(dtype, device)
    query = draw(HEADS * head_dim).view(-1, HEADS, head_dim).transpose(0, 1)
    key, value = (draw.weight(KV_HEADS, NUM_KEYS, head_dim) * 3 for _ in range(2))
    positions = torch.arange(NUM_KEYS, device=device)
    ends = NUM_KEYS - max(NUMS_ROWS) + 1 + torch.arange(max(NUMS_ROWS), device=device)
    bias = torch.zeros(1, max(NUMS_ROWS), NUM_KEYS, device=device)
    bias.masked_fill_(positions >= ends[:, None], -torch.inf)
    sinks = draw.weight(HEADS)
    for scoring in (Scoring(head_dim**-0.5), Scoring(0.3, softcap=5.0, sinks=sinks)):

        def attended(by: Backend, rows: Tensor, scoring: Scoring = scoring) -> Tensor:
            return by.attend(query[:, rows], key, value, bias[:, rows], scoring).flatten(1)

        yield f"attention over heads of {head_dim}", attended
    pages = _OnePool(draw.weight(2, KV_HEADS, NUM_PAGES, TILE, head_dim))
    for window in (None, WINDOW):

        def over_pages(by: Backend, rows: Tensor, window: int | None = window) -> Tensor:
            return _over_pages(by, pages, query[:, rows], rows, Scoring(head_dim**-0.5), window)

        yield f"attention over pages, heads of {head_dim}", over_pages


class _OnePool:
    """Pages of one layer that hold what they should already; see KVPages."""

    def __init__(self, pool: Tensor) -> None:
        self.pools, self.scales = (pool,), (None,)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Nothing: it is there."""

    def gather(
        self, layer: int, page_ids: Tensor, moves: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Nobody asks."""
        raise NotImplementedError


def _over_pages(
    by: Backend, pages: _OnePool, query: Tensor, rows: Tensor, scoring: Scoring, window: int | None
) -> Tensor:
    """Rows at positions far from each other, each a sequence of its own in the same pages.

    An odd number of them find their last keys by the slots of a path, which are the same keys: so
    a branch of a tree has the bits of a plain row.
    """
    pool, num_keys = pages.pools[0], NUM_PAGES * TILE
    ends = num_keys - (rows * 61) % num_keys
    firsts = torch.zeros_like(ends) if window is None else (ends - window).clamp_min(0)
    if not by.reads_pages:
        keys, values = pool.flatten(2, 3)
        positions = torch.arange(num_keys, device=pool.device)
        is_seen = (positions >= firsts[:, None]) & (positions < ends[:, None])
        bias = torch.zeros(is_seen.shape, device=pool.device).masked_fill_(~is_seen, -torch.inf)
        return by.attend(query, keys, values, bias[None], scoring).flatten(1)
    path = len(rows) % 2 * (TILE + 5)
    spans = [
        Span(row, 1, end - 1, end, range(NUM_PAGES), range(max(0, end - path), end))
        for row, end in enumerate(ends.tolist())
    ]
    own = by.paged_rows(spans, ends - 1, 1).seeing(torch.stack((firsts, ends), dim=1))
    key, value = pool.flatten(2, 3)[:, :, ends - 1]
    return own.attend(pages, 0, query, key, value, scoring).flatten(1)


class _Draw:
    """Random numbers, the same on every device."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, size: int) -> Tensor:
        """As many rows as are computed, [rows, size]."""
        return self.weight(max(NUMS_ROWS), size)

    def weight(self, *shape: int) -> Tensor:
        """Of any shape."""
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self._device, self._dtype)
