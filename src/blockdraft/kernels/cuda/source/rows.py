"""Norms, rotations and gates of rows. Each value is rounded where torch's operations round it."""

import triton
import triton.language as tl

from blockdraft.kernels.cuda.source.rounding import rounded


@triton.jit
def _normed(
    x,
    weight,
    square_sum,
    eps,
    SIZE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """x over the root of the mean square, times weight; all in float32."""
    scaled = x * tl.rsqrt(square_sum / SIZE + eps)
    if ROUNDS_FIRST:
        scaled = rounded(scaled, DTYPE, INTERPRETED)
    return rounded(scaled * weight, DTYPE, INTERPRETED)


@triton.jit
def norm_kernel(
    output,
    total,
    x,
    residual,
    weight,
    eps,
    SIZE: tl.constexpr,
    FILLED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A row of [rows, SIZE]: its norm, or total = x + residual and the norm of that."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    places = tl.arange(0, FILLED)
    inside = places < SIZE
    values = tl.load(x + start + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + start + places, mask=inside, other=0.0).to(tl.float32)
        values = rounded(values, total.dtype.element_ty, INTERPRETED)
        tl.store(total + start + places, values, mask=inside)
    weights = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(
        values,
        weights,
        tl.sum(values * values, axis=0),
        eps,
        SIZE,
        ROUNDS_FIRST,
        output.dtype.element_ty,
        INTERPRETED,
    )
    tl.store(output + start + places, normed, mask=inside)


@triton.jit
def rotation_kernel(
    output,
    heads,
    cos,
    signed_sin,
    query_weight,
    key_weight,
    query_eps,
    key_eps,
    NUM_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_TURNED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FILLED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One head of a row: heads [rows, NUM_HEADS, HEAD_DIM] -> output [rows, NUM_TURNED, HEAD_DIM].

    cos, signed_sin: [rows, HEAD_DIM].
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, FILLED)
    inside = places < HEAD_DIM
    across = tl.where(places < HEAD_DIM // 2, places + HEAD_DIM // 2, places - HEAD_DIM // 2)
    source = heads + (row * NUM_HEADS + head) * HEAD_DIM
    values = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(source + across, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        weight, eps = key_weight, key_eps
        if head < NUM_QUERIES:
            weight, eps = query_weight, query_eps
        square_sum = tl.sum(values * values, axis=0)
        own = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
        theirs = tl.load(weight + across, mask=inside, other=0.0).to(tl.float32)
        dtype: tl.constexpr = output.dtype.element_ty
        values = _normed(values, own, square_sum, eps, HEAD_DIM, ROUNDS_FIRST, dtype, INTERPRETED)
        others = _normed(
            others, theirs, square_sum, eps, HEAD_DIM, ROUNDS_FIRST, dtype, INTERPRETED
        )
    cosines = tl.load(cos + row * HEAD_DIM + places, mask=inside, other=0.0).to(tl.float32)
    sines = tl.load(signed_sin + row * HEAD_DIM + places, mask=inside, other=0.0).to(tl.float32)
    straight = rounded(values * cosines, output.dtype.element_ty, INTERPRETED)
    crossed = rounded(others * sines, output.dtype.element_ty, INTERPRETED)
    turned = rounded(straight + crossed, output.dtype.element_ty, INTERPRETED)
    tl.store(output + (row * NUM_TURNED + head) * HEAD_DIM + places, turned, mask=inside)


@triton.jit
def gate_kernel(
    output,
    gate_up,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """VALUES values of a row: silu(gate) * up, gate_up [rows, 2 * SIZE] -> output [rows, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    inside = places < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + places, mask=inside, other=0.0).to(tl.float32)
    opened = rounded(gate / (1.0 + tl.exp(-gate)), output.dtype.element_ty, INTERPRETED)
    gated = rounded(opened * up, output.dtype.element_ty, INTERPRETED)
    tl.store(output + row * SIZE + places, gated, mask=inside)
