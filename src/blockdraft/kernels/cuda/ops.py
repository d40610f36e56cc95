"""Launches of the kernels. Tensors are of one precision and on one device, or it is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.kernels.checks import check_like, check_sizes
from blockdraft.kernels.cuda.source import INTERPRETED, TritonError
from blockdraft.kernels.cuda.source.attention import attention_kernel, merge_kernel
from blockdraft.kernels.cuda.source.linear import linear_kernel
from blockdraft.kernels.cuda.source.rows import gate_kernel, norm_kernel, rotation_kernel
from blockdraft.kernels.cuda.tiles import ONE, Tile
from blockdraft.kernels.interface import TILE, PagedTables, Rotation, Scoring
from blockdraft.kernels.weights import Norm

LEAST = 16
"""The smallest side of a tile that tensor cores multiply."""
ALIGNMENT = 16
"""Bytes. Triton compiles another binary for tensors that begin elsewhere."""
GATE_VALUES = 1024
MAX_HEAD_DIM = 256
MAX_NORM_SIZE = 2**16
"""A program holds a whole row."""
LEAST_TILES = 4
"""Tiles of keys in a part of attention: a shorter one costs more than it saves."""
MAX_PARTS = 16
"""Parts of a row's keys."""
FEW_ROWS = 64
"""Up to so many rows each part of their keys has a program of its own: else most of a card would be
idle. These are the rows that are captured as graphs, so the grid is that of the longest keys."""
ATTENTION_OPTIONS = {"num_warps": 4, "num_stages": 2}
"""More stages take more of a processor's memory, and with it the place of other programs."""
FLOAT32_OPTIONS = (
    (64, ATTENTION_OPTIONS),
    (128, {"num_warps": 8, "num_stages": 2}),
    (MAX_HEAD_DIM, {"num_warps": 16, "num_stages": 1}),
)
"""For heads of up to so many values. Fewer threads have too few registers: with 4 warps heads of
256 kept up to 8 KB of each thread in memory, and took 25 s to compile. With two stages their tiles
would not fit a card with 99 KiB for a program."""

_COMPILED = {"INTERPRETED": INTERPRETED, "enable_fp_fusion": False}
"""Products and sums that the kernels write apart stay apart: each rounds, whatever Triton does by
default."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """[..., inputs] times weight [outputs, inputs] -> [..., outputs]."""
    check_alike(x, weight, *(() if bias is None else (bias,)))
    num_outputs, num_inputs = weight.shape
    check_sizes(x.shape[-1] == num_inputs and (bias is None or bias.shape == (num_outputs,)))
    x = packed(x)
    num_rows = x.numel() // num_inputs
    output = x.new_empty((*x.shape[:-1], num_outputs))
    if not num_rows:
        return output
    # Programs of the same outputs follow each other, so that a weight is read from memory once.
    with launching(x):
        linear_kernel[tile.grid(num_rows, num_outputs)](
            output, x, weight, weight if bias is None else bias, num_rows,
            NUM_OUTPUTS=num_outputs, NUM_INPUTS=num_inputs, HAS_BIAS=bias is not None,
            ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            OUTPUTS_FIRST=tile.outputs_first,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **_COMPILED,
        )  # fmt: skip
    return output


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """See Backend.norm."""
    return _norm(x, None, norm)[1]


def add_rms_norm(x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """See Backend.add_norm."""
    check_sizes(x.shape == residual.shape)
    return _norm(x, residual, norm)


def _norm(x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """The sum, or x, and its norm."""
    size = norm.weight.numel()
    check_alike(x, norm.weight, *(() if residual is None else (residual,)))
    check_sizes(x.shape[-1] == size <= MAX_NORM_SIZE)
    x, weight = packed(x), packed(norm.weight)
    output, total = torch.empty_like(x), x
    if residual is not None:
        residual, total = packed(residual), torch.empty_like(x)
    if x.numel():
        with launching(x):
            norm_kernel[x.numel() // size,](
                output, total, x, x if residual is None else residual, weight, norm.eps,
                SIZE=size, FILLED=power_of_two(size), HAS_RESIDUAL=residual is not None,
                ROUNDS_FIRST=norm.rounds_first, **_COMPILED,
            )  # fmt: skip
    return total, output


def rotated_heads(
    heads: Tensor, num_turned: int, num_queries: int, rotation: Rotation,
    norms: tuple[Norm, Norm] | None,
) -> Tensor:  # fmt: skip
    """The first heads of [..., rows, heads, head_dim], rotated, in memory of their own.

    norms: of queries and keys, before; they round alike.
    """
    num_heads, head_dim = heads.shape[-2:]
    cos, signed_sin = (packed(part) for part in rotation)
    weights = () if norms is None else (norms[0].weight, norms[1].weight)
    check_alike(heads, cos, signed_sin, *weights)
    num_rows = heads.numel() // (num_heads * head_dim)
    check_sizes(head_dim % 2 == 0 and 0 <= num_queries <= num_turned <= num_heads)
    check_sizes(cos.numel() == signed_sin.numel() == num_rows * head_dim)
    check_sizes(all(weight.shape == (head_dim,) for weight in weights))
    heads = packed(heads)
    output = heads.new_empty((*heads.shape[:-2], num_turned, head_dim))
    if not output.numel():
        return output
    query_weight, key_weight = (packed(w) for w in weights) if weights else (heads, heads)
    query_eps, key_eps = (0.0, 0.0) if norms is None else (norms[0].eps, norms[1].eps)
    with launching(heads):
        rotation_kernel[num_rows, num_turned](
            output, heads, cos, signed_sin, query_weight, key_weight, query_eps, key_eps,
            NUM_HEADS=num_heads, NUM_QUERIES=num_queries, NUM_TURNED=num_turned, HEAD_DIM=head_dim,
            FILLED=power_of_two(head_dim), HAS_NORMS=norms is not None,
            ROUNDS_FIRST=norms is not None and norms[0].rounds_first, **_COMPILED,
        )  # fmt: skip
    return output


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 * size], gates first -> [..., size]."""
    check_alike(gate_up)
    gate_up, size = packed(gate_up), gate_up.shape[-1] // 2
    check_sizes(gate_up.shape[-1] == 2 * size > 0)
    output = gate_up.new_empty((*gate_up.shape[:-1], size))
    if output.numel():
        with launching(gate_up):
            gate_kernel[output.numel() // size, -(-size // GATE_VALUES)](
                output, gate_up, SIZE=size, VALUES=GATE_VALUES, **_COMPILED,
            )  # fmt: skip
    return output


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Which keys each row sees, and where they lie; all int64 but the bias.

    ranges: [rows, 2], the first position and the one behind the last. Without tables a position is
    its slot. bias: float32, added to the scores, [rows, positions].
    """

    ranges: Tensor
    tables: PagedTables | None = None
    bias: Tensor | None = None


def attention(query: Tensor, keys: Tensor, values: Tensor, seen: Seen, scoring: Scoring) -> Tensor:
    """query: [heads, rows, head_dim]; keys, values: [kv_heads, slots, head_dim], of one layout.

    Returns [rows, heads, head_dim]; zeros for a row that sees nothing.
    """
    check_alike(query, keys, values)
    num_heads, num_rows, head_dim = query.shape
    kv_heads, num_slots, _ = keys.shape
    check_sizes(keys.shape == values.shape and keys.shape[-1] == head_dim <= MAX_HEAD_DIM)
    check_sizes(num_heads % kv_heads == 0 and seen.ranges.shape == (num_rows, 2))
    tables = seen.tables
    check_sizes(tables is None or tables.rows.numel() == 3 * num_rows)
    keys, values = packed(keys), packed(values)
    if query.stride(2) != 1 or any(step % head_dim for step in query.stride()[:2]):
        query = query.contiguous()
    query = _aligned(query)
    output = query.new_empty((num_rows, num_heads, head_dim))
    if not num_rows:
        return output
    sinks = None if scoring.sinks is None else packed(scoring.sinks.to(torch.float32))
    check_sizes(sinks is None or (sinks.shape == (num_heads,) and sinks.device == query.device))
    nothing, group = seen.ranges, num_heads // kv_heads
    read = (nothing,) * 3 if tables is None else (tables.rows, tables.page_ids, tables.path_slots)
    # With a bias a program finds the row's range by itself, and others would not know its parts.
    is_split = num_rows <= FEW_ROWS and seen.bias is None
    # Else never looked at, but aligned: Triton compiles another binary for what is not.
    scratch = _scratch(output) if is_split else (output,) * 3
    parts = {"TILE": TILE, "LEAST_TILES": LEAST_TILES, "MAX_PARTS": MAX_PARTS}
    sizes = parts | {
        "GROUP": group, "FILLED_GROUP": power_of_two(group),
        "HEAD_DIM": head_dim, "FILLED_DIM": power_of_two(head_dim), "HAS_SINKS": sinks is not None,
    }  # fmt: skip
    options = attention_options(query.dtype, head_dim)
    with launching(query):
        attention_kernel[num_rows, kv_heads, MAX_PARTS if is_split else 1](
            output, *scratch, query, keys, values,
            seen.ranges, *read, _or(seen.bias, nothing), _or(sinks, nothing),
            query.stride(1) // head_dim, query.stride(0) // head_dim, num_slots,
            0 if seen.bias is None else seen.bias.stride(0), scoring.scale, scoring.softcap or 1.0,
            IS_SPLIT=is_split, HAS_PAGES=tables is not None, HAS_BIAS=seen.bias is not None,
            HAS_SOFTCAP=scoring.softcap is not None, **sizes, **options, **_COMPILED,
        )  # fmt: skip
        if is_split:
            merge_kernel[num_rows, kv_heads](
                output, *scratch, seen.ranges, _or(sinks, nothing), **sizes, **_COMPILED
            )
    return output


def attention_options(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Of `attention_kernel`. The number of rows has no say: sums would have other bits."""
    if dtype != torch.float32:
        return ATTENTION_OPTIONS
    return next(options for most, options in FLOAT32_OPTIONS if head_dim <= most)


def _scratch(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For what the parts of each row's keys come to; see `attention_kernel`."""
    num_rows, num_heads, head_dim = output.shape
    sums = output.new_empty((num_rows, num_heads, MAX_PARTS, head_dim), dtype=torch.float32)
    return sums.new_empty(sums.shape[:-1]), sums.new_empty(sums.shape[:-1]), sums


@contextmanager
def launching(tensor: Tensor) -> Iterator[None]:
    """Around a launch: Triton takes the current card, and this tensor may lie on another one.

    Raises:
        RuntimeError: the kernel cannot be compiled, or needs more than the card has. Triton's own
            errors are not of this type, which all who can do without the kernels expect.
    """
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        try:
            yield
        except TritonError as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def packed(tensor: Tensor) -> Tensor:
    """The same with its values one behind another, from an aligned address on."""
    return _aligned(tensor.contiguous())


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def power_of_two(number: int) -> int:
    """The next one, and no tile that is too small."""
    return max(LEAST, 1 << (number - 1).bit_length())


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def check_alike(tensor: Tensor, *others: Tensor) -> None:
    """Raises RuntimeError if there are no kernels for a tensor, or others are not like it."""
    if tensor.dtype not in ONE:
        raise RuntimeError(f"there are no Triton kernels for {tensor.dtype}")
    check_like(tensor, *others)
