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


@triton.jit
def _merged(top, total, sums, other_top, other_total, other_sums):
    """The sums over two sets of keys as those over both. One without keys changes no bit."""
    next_top = tl.maximum(top, other_top)
    # Without this a row that has seen nothing yet would subtract infinity from itself.
    base = tl.where(next_top == -float("inf"), 0.0, next_top)
    ours, theirs = tl.exp(top - base), tl.exp(other_top - base)
    total = total * ours + other_total * theirs
    sums = sums * ours[:, None] + other_sums * theirs[:, None]
    return next_top, total, sums


@triton.jit
def _parts(first, end, TILE: tl.constexpr, LEAST_TILES: tl.constexpr, MAX_PARTS: tl.constexpr):
    """Where the first part of the keys of a range begins, keys of a part, and number of parts.

    Nothing but the range decides: rows keep their sums in any company.
    """
    begin = first // TILE * TILE
    num_keys = tl.maximum(end - begin, 0)
    size = (num_keys + MAX_PARTS * TILE - 1) // (MAX_PARTS * TILE)
    size = tl.maximum(size, LEAST_TILES) * TILE
    return begin, size, (num_keys + size - 1) // size


@triton.jit
def _add_tile(
    top,
    total,
    sums,
    start,
    own,
    keys,
    values,
    first,
    end,
    pages,
    path_start,
    path,
    bias,
    scale,
    softcap,
    FILLED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FILLED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    HAS_PATH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The sums with TILE more keys, from position `start` on."""
    dims, in_tile = tl.arange(0, FILLED_DIM), tl.arange(0, TILE)
    is_dim = dims < HEAD_DIM
    positions = start + in_tile
    is_seen = (positions >= first) & (positions < end)
    slots = positions.to(tl.int64)
    if HAS_PAGES:
        slots = tl.load(pages + start // TILE) * TILE + in_tile
    if HAS_PATH:
        in_path = positions - path_start
        is_elsewhere = is_seen & (in_path >= 0)
        elsewhere = tl.load(path + in_path, mask=is_elsewhere, other=0)
        slots = tl.where(is_elsewhere, elsewhere, slots)
    added = tl.zeros((TILE,), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + positions, mask=is_seen, other=0.0)
        is_seen = is_seen & (added != -float("inf"))
    # What a row does not see is never read: 0 times what is no number would be none.
    offsets = slots * HEAD_DIM
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
    # As in _merged.
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
    return next_top, total, sums


@triton.jit
def _part(
    begin,
    part_end,
    own,
    keys,
    values,
    first,
    end,
    pages,
    path_start,
    path,
    bias,
    scale,
    softcap,
    FILLED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FILLED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The sums over the keys from `begin` to `part_end`: largest score, weights, and values."""
    top = tl.full((FILLED_GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((FILLED_GROUP,), tl.float32)
    sums = tl.zeros((FILLED_GROUP, FILLED_DIM), tl.float32)
    # First the tiles of which no key lies elsewhere: to ask for it takes as long as for the keys.
    middle = part_end
    if HAS_PAGES:
        middle = tl.maximum(begin, tl.minimum(part_end, path_start) // TILE * TILE)
    for start in range(begin, middle, TILE):
        top, total, sums = _add_tile(
            top, total, sums, start, own, keys, values, first, end,
            pages, path_start, path, bias, scale, softcap,
            FILLED_GROUP, HEAD_DIM, FILLED_DIM, TILE,
            HAS_PAGES, False, HAS_BIAS, HAS_SOFTCAP, INTERPRETED,
        )  # fmt: skip
    if HAS_PAGES:
        for start in range(middle, part_end, TILE):
            top, total, sums = _add_tile(
                top, total, sums, start, own, keys, values, first, end,
                pages, path_start, path, bias, scale, softcap,
                FILLED_GROUP, HEAD_DIM, FILLED_DIM, TILE,
                HAS_PAGES, True, HAS_BIAS, HAS_SOFTCAP, INTERPRETED,
            )  # fmt: skip
    return top, total, sums


@triton.jit
def _seen_through(bias, first, end, TILE: tl.constexpr):
    """The range of what a row sees through a bias: else its length would be that of the longest."""
    seen_first, seen_end = end, first
    for start in range(first // TILE * TILE, end, TILE):
        positions = start + tl.arange(0, TILE)
        is_inside = (positions >= first) & (positions < end)
        added = tl.load(bias + positions, mask=is_inside, other=-float("inf"))
        is_seen = added != -float("inf")
        seen_first = tl.minimum(seen_first, tl.min(tl.where(is_seen, positions, end), axis=0))
        seen_end = tl.maximum(seen_end, tl.max(tl.where(is_seen, positions + 1, first), axis=0))
    return seen_first, seen_end


@triton.jit
def _finish(
    output,
    places,
    top,
    total,
    sums,
    sinks,
    heads,
    is_member,
    HEAD_DIM: tl.constexpr,
    FILLED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the output of some heads, of the sums over all of their keys."""
    dims = tl.arange(0, FILLED_DIM)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_member, other=-float("inf"))
        base = tl.maximum(top, sink)
        base = tl.where(base == -float("inf"), 0.0, base)
        shrunk = tl.exp(top - base)
        total = total * shrunk + tl.exp(sink - base)
        sums *= shrunk[:, None]
    found = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        output + places[:, None] * HEAD_DIM + dims[None, :],
        rounded(found, output.dtype.element_ty, INTERPRETED),
        mask=is_member[:, None] & (dims < HEAD_DIM)[None, :],
    )


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
    tops,
    totals,
    part_sums,
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
    LEAST_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The query heads of one row that share a K/V head: they see the same keys.

    A row's keys are computed in parts, see `_parts`, and a part TILE keys at a time from a multiple
    of TILE on, with a running maximum. A tile of which a row sees nothing leaves the sums as they
    are, to the bit. IS_SPLIT: the program computes one part, and `merge_kernel` adds them up. Else
    it computes all of them, one after another, and adds them up as that kernel would, to the bit.

    output: [rows, heads, HEAD_DIM]. query: heads of HEAD_DIM values, its steps in heads.
    tops, totals: [rows, heads, MAX_PARTS], of each part the largest score and the sum of weights;
    part_sums: [rows, heads, MAX_PARTS, HEAD_DIM], of weighted values; all float32, if IS_SPLIT.
    keys, values: [kv_heads, num_slots, HEAD_DIM].
    rows: [rows, 3]: of each row the place of its table in page_ids, the first position whose key
    lies elsewhere, and the place of that key's slot in path_slots.
    ranges: [rows, 2]: the first position that the row sees, and the one behind the last.
    bias: [rows, positions], added to the scores; not if IS_SPLIT. sinks: [heads], float32.
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1) * GROUP
    members, dims = tl.arange(0, FILLED_GROUP), tl.arange(0, FILLED_DIM)
    heads = kv_head * GROUP + members
    is_member, is_dim = members < GROUP, dims < HEAD_DIM
    first = tl.load(ranges + 2 * row).to(tl.int32)
    end = tl.load(ranges + 2 * row + 1).to(tl.int32)
    if HAS_BIAS:
        bias += row * bias_row_step
        first, end = _seen_through(bias, first, end, TILE)
    begin, size, num_parts = _parts(first, end, TILE, LEAST_TILES, MAX_PARTS)
    part = tl.program_id(2)
    if IS_SPLIT:  # noqa: SIM102 - settled when it is compiled, the other one when it runs
        if part >= num_parts:
            return
    pages, path_start, path = page_ids, end, path_slots
    if HAS_PAGES:
        pages += tl.load(rows + 3 * row)
        # Also where no row of the forward has a path: else company would choose the binary.
        path_start = tl.load(rows + 3 * row + 1).to(tl.int32)
        path += tl.load(rows + 3 * row + 2)
    places = row * query_row_step + heads * query_head_step
    own = tl.load(
        query + places[:, None] * HEAD_DIM + dims[None, :],
        mask=is_member[:, None] & is_dim[None, :],
        other=0.0,
    )
    keys += kv_head * num_slots * HEAD_DIM
    values += kv_head * num_slots * HEAD_DIM
    places = row * num_heads + heads
    if IS_SPLIT:
        begin += part * size
        top, total, sums = _part(
            begin, tl.minimum(end, begin + size), own, keys, values, first, end,
            pages, path_start, path, bias, scale, softcap,
            FILLED_GROUP, HEAD_DIM, FILLED_DIM, TILE,
            HAS_PAGES, HAS_BIAS, HAS_SOFTCAP, INTERPRETED,
        )  # fmt: skip
        places = places * MAX_PARTS + part
        tl.store(tops + places, top, mask=is_member)
        tl.store(totals + places, total, mask=is_member)
        tl.store(
            part_sums + places[:, None] * HEAD_DIM + dims[None, :],
            sums,
            mask=is_member[:, None] & is_dim[None, :],
        )
    else:
        top = tl.full((FILLED_GROUP,), -float("inf"), tl.float32)
        total = tl.zeros((FILLED_GROUP,), tl.float32)
        sums = tl.zeros((FILLED_GROUP, FILLED_DIM), tl.float32)
        for part_begin in range(begin, end, size):
            part_top, part_total, own_sums = _part(
                part_begin, tl.minimum(end, part_begin + size), own, keys, values, first, end,
                pages, path_start, path, bias, scale, softcap,
                FILLED_GROUP, HEAD_DIM, FILLED_DIM, TILE,
                HAS_PAGES, HAS_BIAS, HAS_SOFTCAP, INTERPRETED,
            )  # fmt: skip
            top, total, sums = _merged(top, total, sums, part_top, part_total, own_sums)
        _finish(
            output, places, top, total, sums, sinks, heads, is_member,
            HEAD_DIM, FILLED_DIM, HAS_SINKS, INTERPRETED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ranges", "sinks"])
def merge_kernel(
    output,
    tops,
    totals,
    part_sums,
    ranges,
    sinks,
    GROUP: tl.constexpr,
    FILLED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FILLED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The parts of a row's keys that `attention_kernel` has written, added up in their order."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    members, dims = tl.arange(0, FILLED_GROUP), tl.arange(0, FILLED_DIM)
    heads = kv_head * GROUP + members
    is_member = members < GROUP
    is_value = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    first = tl.load(ranges + 2 * row).to(tl.int32)
    end = tl.load(ranges + 2 * row + 1).to(tl.int32)
    _, _, num_parts = _parts(first, end, TILE, LEAST_TILES, MAX_PARTS)
    places = row * tl.num_programs(1) * GROUP + heads
    top = tl.full((FILLED_GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((FILLED_GROUP,), tl.float32)
    sums = tl.zeros((FILLED_GROUP, FILLED_DIM), tl.float32)
    for part in range(num_parts):
        at = places * MAX_PARTS + part
        part_top = tl.load(tops + at, mask=is_member, other=-float("inf"))
        part_total = tl.load(totals + at, mask=is_member, other=0.0)
        own_sums = tl.load(
            part_sums + at[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0
        )
        top, total, sums = _merged(top, total, sums, part_top, part_total, own_sums)
    _finish(
        output, places, top, total, sums, sinks, heads, is_member,
        HEAD_DIM, FILLED_DIM, HAS_SINKS, INTERPRETED,
    )  # fmt: skip
