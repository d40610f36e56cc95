"""The kernels on tensors.

Every function gives a row the bits that it has alone. What is called [rows, size] may have more
dimensions in front.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from blockdraft.kernels.library import Layer, Library, Plan, library

TILE = 64
"""Keys a tile, as in tiles.h. Pages have this size."""
LANES, MAX_HEAD_DIM = 16, 512
"""Head sizes are multiples of the first, up to the second."""

IS_BFLOAT16 = {torch.bfloat16: 1, torch.float32: 0}
"""The types that there are kernels for, and how these are told which."""


def kernels_for(tensor: Tensor) -> Library | None:
    """The kernels, if they compute on tensors of this type and device."""
    is_fit = tensor.device.type == "cpu" and tensor.dtype in IS_BFLOAT16
    return library() if is_fit else None


def kernels_for_heads(head: Tensor) -> Library | None:
    """The same for attention with heads of this size, [..., head_dim]."""
    size = head.shape[-1]
    return kernels_for(head) if size % LANES == 0 and size <= MAX_HEAD_DIM else None


def rms_norm(
    kernels: Library, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool
) -> Tensor:
    """x [rows, size] over the root of its mean square, times weight [size].

    `rounds_first`: to the tensor's type before the weight is applied, and after it again.
    """
    x, size = x.contiguous(), x.shape[-1]
    check_alike(x, weight)
    check_sizes(weight.numel() == size)
    output = torch.empty_like(x)
    kernels.norm(
        IS_BFLOAT16[x.dtype], output.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(),
        x.numel() // size, size, eps, rounds_first, torch.get_num_threads(),
    )  # fmt: skip
    return output


def add_rms_norm(
    kernels: Library, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """x + residual, and the norm of that; see `rms_norm`."""
    x, residual, size = x.contiguous(), residual.contiguous(), x.shape[-1]
    check_alike(x, residual, weight)
    check_sizes(residual.shape == x.shape and weight.numel() == size)
    output, total = torch.empty_like(x), torch.empty_like(x)
    kernels.norm(
        IS_BFLOAT16[x.dtype], output.data_ptr(), total.data_ptr(), x.data_ptr(),
        residual.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, rounds_first,
        torch.get_num_threads(),
    )  # fmt: skip
    return total, output


def rotate_heads_(
    kernels: Library,
    heads: Tensor,
    num_queries: int,
    num_keys: int,
    cos: Tensor,
    signed_sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
    *,
    rounds_first: bool = True,
) -> None:
    """Rotate the first heads of each row of [rows, heads, head_dim] in place.

    cos, signed_sin: [rows, head_dim], halves paired, the sign of the rotated first half in the
    sine. `norms`: weights [head_dim] of the norm before it, of queries and of keys, and its eps.
    All tensors must be contiguous.
    """
    num_heads, head_dim = heads.shape[-2:]
    query_weight, key_weight, eps = norms if norms is not None else (None, None, 0.0)
    check_alike(heads, cos, signed_sin, *([] if norms is None else norms[:2]))
    num_angles = heads.numel() // num_heads
    check_sizes(norms is None or norms[0].numel() == norms[1].numel() == head_dim)
    check_sizes(cos.numel() == signed_sin.numel() == num_angles)
    kernels.rotate(
        IS_BFLOAT16[heads.dtype], heads.data_ptr(), num_heads * head_dim, cos.data_ptr(),
        signed_sin.data_ptr(), _address(query_weight), _address(key_weight),
        heads.numel() // (num_heads * head_dim), num_queries, num_keys, head_dim, eps, rounds_first,
        torch.get_num_threads(),
    )  # fmt: skip


def gated_silu(kernels: Library, gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * size], gates first -> [rows, size]."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    output = gate_up.new_empty((*gate_up.shape[:-1], size))
    kernels.gate(
        IS_BFLOAT16[gate_up.dtype], output.data_ptr(), gate_up.data_ptr(),
        gate_up.numel() // (2 * size), size, torch.get_num_threads(),
    )  # fmt: skip
    return output


class TiledAttention:
    """What all layers of a forward share that look at keys alike.

    Args:
        num_rows: of the forward.
        spans: first row, number of rows, and place of the first page in `pages`, of each sequence;
            they follow each other from row 0 on. Rows behind them get zeros.
        pages: for each span the tiles of its keys in their order; None: tile after tile.
        ranges: [num_rows, 2], the first key that a row sees and the one behind the last.
        bias: without ranges: float32, added to the scores, [num_rows, num_keys]; None: all keys.
        num_keys: of the longest span.
        slots: [num_rows], where `attend` stores new keys and values.
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
    ) -> None:
        span_table = torch.tensor(spans, device="cpu")  # whatever the default device is
        self._held = (span_table, pages, ranges, bias, slots)
        self.num_rows = num_rows
        self._plan = Plan(
            num_rows, len(spans), span_table.data_ptr(), _address(pages), _address(ranges),
            _address(bias), 0 if bias is None else bias.stride(0), num_keys, _address(slots),
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
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Store new keys and values [kv_heads, rows, head_dim], if there are slots, and attend.

        query: [heads, rows, head_dim]; keys, values: [kv_heads, .., head_dim], the slots of a K/V
        head one behind another; sinks: logits [heads].
        Returns [rows, heads, head_dim].
        """
        heads, _, head_dim = query.shape
        output = query.new_empty((self.num_rows, heads, head_dim))
        sinks = None if sinks is None else sinks.float()
        layer = layer_of(heads, keys, scale, softcap)
        if sinks is not None:
            layer = Layer.from_buffer_copy(layer)
            layer.sinks = sinks.data_ptr()
        key, value = new if new is not None else (query, query)
        query, key, value = (
            _with_whole_heads(query),
            _with_whole_heads(key),
            _with_whole_heads(value),
        )
        check_alike(query, key, value, keys, values)
        kernels.attend(
            IS_BFLOAT16[query.dtype], self.address, ctypes.addressof(layer), output.data_ptr(),
            query.data_ptr(), query.stride(1), query.stride(0),
            key.data_ptr(), key.stride(1), key.stride(0),
            value.data_ptr(), value.stride(1), value.stride(0),
            keys.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        return output


def layer_of(heads: int, keys: Tensor, scale: float, softcap: float | None = None) -> Layer:
    """What the kernels know of a layer's attention; keys: [kv_heads, .., head_dim]."""
    kv_heads, head_dim = keys.shape[0], keys.shape[-1]
    return _layer(kv_heads, heads // kv_heads, head_dim, keys.stride(0), scale, softcap or 0.0)


@lru_cache
def _layer(
    kv_heads: int, group: int, head_dim: int, head_stride: int, scale: float, softcap: float
) -> Layer:
    return Layer(kv_heads, group, head_dim, head_stride, scale, softcap, None)


def _with_whole_heads(heads: Tensor) -> Tensor:
    """The same with the values of a head side by side, as they nearly always are."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def check_alike(tensor: Tensor, *others: Tensor) -> None:
    """Refuse what the kernels would read as other numbers than it is.

    Raises:
        RuntimeError: types or devices differ, as torch's own operations would say.
    """
    for other in others:
        if other.dtype != tensor.dtype or other.device != tensor.device:
            raise RuntimeError(
                f"expected {tensor.dtype} on {tensor.device} throughout, "
                f"and found {other.dtype} on {other.device}"
            )


def check_sizes(are_right: bool) -> None:
    """Raises RuntimeError for tensors that do not fit each other."""
    if not are_right:
        raise RuntimeError("the sizes of the tensors do not fit each other")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
