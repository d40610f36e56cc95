"""The kernels on tensors.

Every function gives a row the bits that it has alone. What is called [rows, size] may have more
dimensions in front.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.checks import check_like, check_sizes
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.structs import Layer, Plan, Pools
from blockdraft.kernels.heads import stored_size
from blockdraft.kernels.interface import Largest, Rotation, Scoring
from blockdraft.kernels.weights import Norm

MAX_HEAD_DIM = 512
"""Numbers of a head in whole steps (`kernels/heads.py`), at most."""

IS_BFLOAT16 = {torch.bfloat16: 1, torch.float32: 0}
"""The types that there are kernels for, and how these are told which."""

_UNDECIDED = -2
"""`kUndecided` of scores.cpp."""


def attends_over(head_dim: int) -> bool:
    """True if attention by kernels, and so a whole layer, knows heads of this size."""
    return head_dim == stored_size(head_dim) and 0 < head_dim <= MAX_HEAD_DIM


def rms_norm(kernels: Library, x: Tensor, norm: Norm) -> Tensor:
    """x [rows, size], normed."""
    return _normed(kernels, x, None, norm)[1]


def add_rms_norm(
    kernels: Library, x: Tensor, residual: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """x + residual, and the norm of that; see `rms_norm`."""
    check_sizes(residual.shape == x.shape)
    return _normed(kernels, x, residual.contiguous(), norm)


def _normed(
    kernels: Library, x: Tensor, residual: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor]:
    """What is normed, which without a residual is x, and its norm."""
    x, weight, size = x.contiguous(), norm.weight.contiguous(), x.shape[-1]
    check_alike(x, weight, *(() if residual is None else (residual,)))
    check_sizes(weight.numel() == size > 0)
    output = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    kernels.norm(
        IS_BFLOAT16[x.dtype], output.data_ptr(), total.data_ptr(), x.data_ptr(),
        _address(residual), weight.data_ptr(), x.numel() // size, size, norm.eps,
        norm.rounds_first, torch.get_num_threads(),
    )  # fmt: skip
    return total, output


def rotate_heads_(
    kernels: Library,
    heads: Tensor,
    num_queries: int,
    num_keys: int,
    rotation: Rotation,
    norms: tuple[Norm, Norm] | None = None,
) -> None:
    """Rotate the first heads of each row of [rows, heads, head_dim] in place.

    `norms`: of queries and of keys, before it, with the same eps. All tensors must be contiguous.
    """
    cos, signed_sin = rotation
    num_heads, head_dim = heads.shape[-2:]
    weights = () if norms is None else (norms[0].weight, norms[1].weight)
    eps, rounds_first = (0.0, True) if norms is None else (norms[0].eps, norms[0].rounds_first)
    tensors = heads, cos, signed_sin, *weights
    check_alike(*tensors)
    check_contiguous(*tensors)
    check_sizes(num_queries >= 0 and num_keys >= 0 and num_queries + num_keys <= num_heads)
    check_sizes(num_heads > 0 and head_dim > 0 and head_dim % 2 == 0)
    num_angles = heads.numel() // num_heads
    check_sizes(all(weight.numel() == head_dim for weight in weights))
    check_sizes(cos.numel() == signed_sin.numel() == num_angles)
    query_weight, key_weight = weights or (None, None)
    kernels.rotate(
        IS_BFLOAT16[heads.dtype], heads.data_ptr(), num_heads * head_dim, cos.data_ptr(),
        signed_sin.data_ptr(), _address(query_weight), _address(key_weight),
        heads.numel() // (num_heads * head_dim), num_queries, num_keys, head_dim, eps, rounds_first,
        torch.get_num_threads(),
    )  # fmt: skip


def gated_silu(kernels: Library, gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * size], gates first -> [rows, size]."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    check_alike(gate_up)
    check_sizes(gate_up.shape[-1] == 2 * size > 0)
    output = gate_up.new_empty((*gate_up.shape[:-1], size))
    kernels.gate(
        IS_BFLOAT16[gate_up.dtype], output.data_ptr(), gate_up.data_ptr(),
        gate_up.numel() // (2 * size), size, torch.get_num_threads(),
    )  # fmt: skip
    return output


def largest_scores(kernels: Library, scores: Tensor, num: int) -> Largest:
    """See Backend.largest; scores: [rows, n]."""
    scores = scores.contiguous()
    check_alike(scores)
    num_rows, size = scores.shape
    check_sizes(size > 0 and num > 0)
    num = min(num, size)
    found = Largest(
        np.empty((num_rows, num), np.float32),
        np.empty((num_rows, num), np.int64),
        np.empty(num_rows, np.float32),
    )
    kernels.largest(
        IS_BFLOAT16[scores.dtype], found.values.ctypes.data, found.places.ctypes.data,
        found.totals.ctypes.data, scores.data_ptr(), num_rows, size, num,
    )  # fmt: skip
    return found


def first_largest(kernels: Library, scores: Tensor) -> list[int]:
    """See `backends.first_largest`; scores: [rows, n] in float32 or bfloat16."""
    scores = scores.contiguous()
    check_alike(scores)
    num_rows, size = scores.shape
    places = (ctypes.c_int64 * num_rows)()
    kernels.first_largest(
        IS_BFLOAT16[scores.dtype], ctypes.addressof(places), scores.data_ptr(), num_rows, size
    )
    return list(places)


def sampled(
    kernels: Library,
    scores: Tensor,
    temperature: float,
    stream: NDArray[np.uint64],
    large: tuple[NDArray[np.int64], NDArray[np.float64], float],
    least_noise: float,
) -> int | None:
    """See `backends.sampled`; scores: [n] in float32 or bfloat16."""
    scores, (ids, noise, bound) = scores.contiguous(), large
    check_alike(scores)
    check_sizes(ids.shape == noise.shape and stream.shape == (3,))
    check_sizes(ids.dtype == np.int64 and noise.dtype == np.float64 and stream.dtype == np.uint64)
    check_sizes(not len(ids) or 0 <= ids[0] <= ids[-1] < scores.numel())
    place: int = kernels.sampled(
        IS_BFLOAT16[scores.dtype], scores.data_ptr(), scores.numel(), temperature,
        stream.ctypes.data, ids.ctypes.data, noise.ctypes.data, len(ids), bound, least_noise,
    )  # fmt: skip
    return None if place == _UNDECIDED else place


def widened(kernels: Library, values: Tensor) -> NDArray[np.float32]:
    """See `backends.widened`; values: any shape, in bfloat16."""
    values = values.contiguous()
    check_alike(values)
    found = np.empty(values.shape, np.float32)
    kernels.widen(found.ctypes.data, values.data_ptr(), values.numel())
    return found


def store_context(
    kernels: Library,
    pools: Sequence[Tensor],
    slots: Tensor,
    projected: Tensor,
    key_norms: Norm,
    rotation: Rotation,
) -> None:
    """See Backend.store_context.

    Raises:
        RuntimeError: sizes, types or layouts do not fit each other, or a slot lies outside.
    """
    cos, signed_sin = rotation
    weight = key_norms.weight
    num_tokens, num_layers, both, kv_heads, head_dim = projected.shape
    check_alike(projected, cos, signed_sin, weight, *pools)
    check_contiguous(projected, cos, signed_sin, weight, *pools)
    _check_numbers(slots)
    check_sizes(both == 2 and key_norms.rounds_first and slots.shape == (num_tokens,))
    check_sizes(weight.shape == (num_layers, head_dim) and head_dim > 0 and head_dim % 2 == 0)
    check_sizes(cos.numel() == signed_sin.numel() == num_tokens * head_dim)
    check_sizes(len(pools) == num_layers and all(pool.shape == pools[0].shape for pool in pools))
    keys, values = pools[0]
    layer = layer_of(kv_heads, keys, values, Scoring(1.0))
    check_sizes(keys.shape[0] == kv_heads and keys.shape[-1] == head_dim)
    addresses = ctypes.c_void_p * num_layers
    kernels.store_context(
        IS_BFLOAT16[projected.dtype], projected.data_ptr(), weight.data_ptr(), cos.data_ptr(),
        signed_sin.data_ptr(), slots.data_ptr(), num_tokens, num_layers, ctypes.addressof(layer),
        key_norms.eps, addresses(*(pool[0].data_ptr() for pool in pools)),
        addresses(*(pool[1].data_ptr() for pool in pools)),
    )  # fmt: skip


class TiledAttention:
    """What all layers of a forward share that look at keys alike.

    Whether slots, pages and keys lie within the buffers is checked in every call, by the kernels.

    Args:
        num_rows: of the forward.
        spans: first row, number of rows, and place of the first page in `pages`, of each sequence;
            they follow each other from row 0 on. Rows behind them get zeros.
        pages: for each span the tiles of its keys in their order; None: tile after tile.
        ranges: [rows of the spans, 2], the first key that a row sees and the one behind the last.
        bias: without ranges: float32, added to the scores, [num_rows, num_keys]; None: all keys.
        num_keys: of the longest span.
        slots: [num_rows], where `attend` stores new keys and values.
        paths: of spans whose last keys lie at slots of their own: [spans, 2], the first position of
            such a key and its entry in the second tensor, the slots of such keys.

    Raises:
        RuntimeError: a table has another type, size or layout than it says here.
    """

    def __init__(
        self,
        num_rows: int,
        spans: Sequence[tuple[int, int, int]],
        num_keys: int,
        *,
        pages: Tensor | None = None,
        ranges: Tensor | None = None,
        bias: Tensor | None = None,
        slots: Tensor | None = None,
        paths: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        # Whatever the default device is.
        span_table = torch.tensor(spans, device="cpu", dtype=torch.int64).view(len(spans), 3)
        starts, path_slots = paths or (None, None)
        for numbers in (pages, ranges, slots, starts, path_slots):
            _check_numbers(numbers)
        check_sizes(starts is None or starts.shape == (len(spans), 2))
        check_sizes(ranges is None or (ranges.ndim == 2 and ranges.shape[1] == 2))
        check_sizes(slots is None or slots.shape == (num_rows,))
        if bias is not None:
            _check_bias(bias, num_rows, num_keys)
        self._held = (span_table, pages, ranges, bias, slots, paths)
        self.num_rows = num_rows
        self._has_slots = slots is not None
        self._plan = Plan(
            num_rows, len(spans), span_table.data_ptr(),
            _address(pages), 0 if pages is None else pages.numel(),
            _address(ranges), 0 if ranges is None else ranges.shape[0],
            _address(bias), 0 if bias is None else bias.stride(0), num_keys, _address(slots),
            _address(starts), _address(path_slots), 0 if path_slots is None else path_slots.numel(),
            torch.get_num_threads(),
        )  # fmt: skip
        self.address = ctypes.addressof(self._plan)
        """Of what the kernels know of it."""

    def attend(
        self,
        kernels: Library,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scoring: Scoring,
        new: tuple[Tensor, Tensor] | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Store new keys and values [kv_heads, rows, head_dim], if there are slots, and attend.

        query: [heads, rows, head_dim]; keys, values: [kv_heads, .., head_dim], the slots of a K/V
        head one behind another; scales: see `pools_of`.
        Returns [rows, heads, head_dim].

        Raises:
            RuntimeError: sizes, types or layouts do not fit each other, or what the tables of this
                plan point to is outside of the buffers.
        """
        heads, _, head_dim = query.shape
        layer = layer_of(heads, keys, values, scoring)
        check_sizes(query.shape[1:] == (self.num_rows, keys.shape[-1]))
        check_sizes((new is not None) == self._has_slots)
        if new is not None:
            num_new = (keys.shape[0], self.num_rows, head_dim)
            check_sizes(new[0].shape == num_new and new[1].shape == num_new)
        output = query.new_empty((self.num_rows, heads, head_dim))
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        if sinks is not None:
            check_sizes(sinks.shape == (heads,) and sinks.device.type == "cpu")
            layer = Layer.from_buffer_copy(layer)
            layer.sinks = sinks.data_ptr()
        key, value = new if new is not None else (query, query)
        query, key, value = (
            _with_whole_heads(query),
            _with_whole_heads(key),
            _with_whole_heads(value),
        )
        check_alike(query, key, value)
        pools = pools_of(query.dtype, keys, values, scales)
        kernels.attend(
            IS_BFLOAT16[query.dtype], self.address, ctypes.addressof(layer), output.data_ptr(),
            query.data_ptr(), query.stride(1), query.stride(0),
            key.data_ptr(), key.stride(1), key.stride(0),
            value.data_ptr(), value.stride(1), value.stride(0),
            ctypes.addressof(pools),
        )  # fmt: skip
        return output


def pools_of(dtype: torch.dtype, keys: Tensor, values: Tensor, scales: Tensor | None) -> Pools:
    """Where the kernels find the keys and values [kv_heads, .., head_dim] of a model of a type.

    scales: of keys and values in int8, [2, kv_heads, .., 1], float32. The pools must outlive it.

    Raises:
        RuntimeError: keys and values are of another type, or scales do not fit them.
    """
    held = dtype if scales is None else torch.int8
    for own in (keys, values):
        if own.dtype != held or own.device.type != "cpu":
            raise RuntimeError(f"expected keys in {held} on cpu, found {own.dtype} on {own.device}")
    if scales is None:
        return Pools(keys.data_ptr(), values.data_ptr(), None, None)
    if scales.dtype != torch.float32 or scales.device.type != "cpu":
        raise RuntimeError(f"expected float32 scales on cpu, found {scales.dtype}")
    check_contiguous(keys, values, scales)
    check_sizes(scales.shape == (2, *keys.shape[:-1], 1))
    return Pools(keys.data_ptr(), values.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr())


def layer_of(heads: int, keys: Tensor, values: Tensor, scoring: Scoring) -> Layer:
    """What the kernels know of a layer's attention; keys, values: [kv_heads, .., head_dim].

    Raises:
        RuntimeError: keys and values do not lie alike, or the slots of a head not side by side.
    """
    check_sizes(keys.shape == values.shape and keys.stride() == values.stride())
    return _layer(heads, keys.shape, keys.stride(), scoring.scale, scoring.softcap or 0.0)


@lru_cache
def _layer(
    heads: int, shape: torch.Size, stride: tuple[int, ...], scale: float, softcap: float
) -> Layer:
    kv_heads, head_dim = shape[0], shape[-1]
    check_sizes(kv_heads > 0 and head_dim > 0 and heads % kv_heads == 0)
    num_values = 1  # of a head, from its end to its beginning
    for size, step in zip(reversed(shape[1:]), reversed(stride[1:]), strict=True):
        check_sizes(size == 1 or step == num_values)
        num_values *= size
    num_slots = num_values // head_dim
    return Layer(kv_heads, heads // kv_heads, head_dim, stride[0], num_slots, scale, softcap, None)


def _with_whole_heads(heads: Tensor) -> Tensor:
    """The same with the values of a head side by side, as they nearly always are."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def check_alike(tensor: Tensor, *others: Tensor) -> None:
    """Refuse what the kernels would read as other numbers than it is.

    Raises:
        RuntimeError: types or devices differ, as torch's own operations would say; or there are no
            kernels for them.
    """
    if tensor.dtype not in IS_BFLOAT16 or tensor.device.type != "cpu":
        raise RuntimeError(f"there are no kernels for {tensor.dtype} on {tensor.device}")
    check_like(tensor, *others)


def check_contiguous(*tensors: Tensor) -> None:
    """Raises RuntimeError for tensors whose values do not lie one behind another."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise RuntimeError("the kernels read contiguous tensors only")


def _check_numbers(numbers: Tensor | None) -> None:
    """Raises RuntimeError for a table that the kernels would read as other numbers than it has."""
    if numbers is None:
        return
    if numbers.dtype != torch.int64 or numbers.device.type != "cpu":
        raise RuntimeError(f"expected int64 on cpu, found {numbers.dtype} on {numbers.device}")
    check_contiguous(numbers)


def _check_bias(bias: Tensor, num_rows: int, num_keys: int) -> None:
    if bias.dtype != torch.float32 or bias.device.type != "cpu":
        raise RuntimeError(f"expected a float32 bias on cpu, found {bias.dtype} on {bias.device}")
    check_sizes(bias.shape == (num_rows, num_keys) and (num_keys <= 1 or bias.stride(1) == 1))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
