"""Attention of rows over keys in pages, or side by side."""

import triton
import triton.language as tl

from blockdraft.kernels.cuda.source.rounding import dot, rounded


@triton.jit
def _bent(scores, softcap):
    """softcap * tanh(scores / softcap)."""
    shrunk = tl.exp(-2.0 * tl.abs(scores) / softcap)
    size = softcap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scores < 0, -size, size)


@triton.jit(
    do_not_specialize=[
        # Tables lie side by side in one tensor, so where they begin depends on the number of rows.
        "rows",
        "ranges",
        "page_ids",
        "path_slots",
        "bias",
        "sinks",
        "query_row_step",
        "query_head_step",
        "num_slots",
        "bias_row_step",
    ]
)
def attention_kernel(
    output,
    query,
    keys,
    values,
    ranges,
    rows,
    page_ids,
    path_slots,
    bias,
    sinks,
    query_row_step,
    query_head_step,
    num_slots,
    bias_row_step,
    scale,
    softcap,
    GROUP: tl.constexpr,
    FILLED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FILLED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The query heads of one row that share a K/V head: they see the same keys.

    Keys go TILE at a time from a multiple of TILE on, with a running maximum. A tile of which a row
    sees nothing leaves its sums as they are, to the bit.

    output: [rows, heads, HEAD_DIM]. query: heads of HEAD_DIM values, its steps in heads.
    keys, values: [kv_heads, num_slots, HEAD_DIM].
    rows: [rows, 3]: of each row the place of its table in page_ids, the first position whose key
    lies elsewhere, and the place of that key's slot in path_slots.
    ranges: [rows, 2]: the first position that the row sees, and the one behind the last.
    bias: [rows, positions], added to the scores. sinks: [heads], float32.
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1) * GROUP
    members, dims = tl.arange(0, FILLED_GROUP), tl.arange(0, FILLED_DIM)
    heads = kv_head * GROUP + members
    is_member, is_dim = members < GROUP, dims < HEAD_DIM
    is_value = is_member[:, None] & is_dim[None, :]
    places = row * query_row_step + heads * query_head_step
    own = tl.load(query + places[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0)
    first = tl.load(ranges + 2 * row).to(tl.int32)
    end = tl.load(ranges + 2 * row + 1).to(tl.int32)
    top = tl.full((FILLED_GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((FILLED_GROUP,), tl.float32)
    sums = tl.zeros((FILLED_GROUP, FILLED_DIM), tl.float32)
    for start in range(first // TILE * TILE, end, TILE):
        positions = start + tl.arange(0, TILE)
        is_seen = (positions >= first) & (positions < end)
        slots = positions.to(tl.int64)
        if HAS_PAGES:
            table = tl.load(rows + 3 * row)
            page_id = tl.load(page_ids + table + start // TILE)
            slots = page_id * TILE + tl.arange(0, TILE)
            # Also where no row of the forward has a path: else company would choose the binary.
            in_path = positions - tl.load(rows + 3 * row + 1)
            path = path_slots + tl.load(rows + 3 * row + 2)
            is_elsewhere = is_seen & (in_path >= 0)
            elsewhere = tl.load(path + in_path, mask=is_elsewhere, other=0)
            slots = tl.where(is_elsewhere, elsewhere, slots)
        added = tl.zeros((TILE,), tl.float32)
        if HAS_BIAS:
            added = tl.load(bias + row * bias_row_step + positions, mask=is_seen, other=0.0)
            is_seen = is_seen & (added != -float("inf"))
        # What a row does not see is never read: 0 times what is no number would be none.
        offsets = (kv_head * num_slots + slots) * HEAD_DIM
        key_tile = tl.load(
            keys + offsets[None, :] + dims[:, None],
            mask=is_seen[None, :] & is_dim[:, None],
            other=0.0,
        )
        scores = dot(own, key_tile, tl.zeros((FILLED_GROUP, TILE), tl.float32), INTERPRETED)
        scores *= scale
        if HAS_SOFTCAP:
            scores = _bent(scores, softcap)
        scores = tl.where(is_seen[None, :], scores + added[None, :], -float("inf"))
        next_top = tl.maximum(top, tl.max(scores, axis=1))
        # Without this a row that has seen nothing yet would subtract infinity from itself.
        base = tl.where(next_top == -float("inf"), 0.0, next_top)
        shrunk = tl.exp(top - base)
        weights = tl.exp(scores - base[:, None])
        total = total * shrunk + tl.sum(weights, axis=1)
        value_tile = tl.load(
            values + offsets[:, None] + dims[None, :],
            mask=is_seen[:, None] & is_dim[None, :],
            other=0.0,
        )
        weights = rounded(weights, value_tile.dtype, INTERPRETED)
        weights = weights.to(value_tile.dtype)
        sums = dot(weights, value_tile, sums * shrunk[:, None], INTERPRETED)
        top = next_top
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_member, other=-float("inf"))
        base = tl.maximum(top, sink)
        base = tl.where(base == -float("inf"), 0.0, base)
        shrunk = tl.exp(top - base)
        total = total * shrunk + tl.exp(sink - base)
        sums *= shrunk[:, None]
    found = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    places = row * num_heads + heads
    tl.store(
        output + places[:, None] * HEAD_DIM + dims[None, :],
        rounded(found, output.dtype.element_ty, INTERPRETED),
        mask=is_value,
    )
