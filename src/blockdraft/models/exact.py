"""The rule that makes a row's bits independent of its company, and the test of it.

Measured on CPUs (LOG.md). A linear layer gives each row the same bits for any number of rows that
is a multiple of a small one; the rows left over from it run in another kernel. So every forward is
filled up to that multiple, and long prompts go in pieces, since large products are blocked
differently. A product over keys is blocked by their number, masked ones included: a sum over keys
changes its bits from 193 keys on in float32 and from 1,025 in bfloat16, and the scores of 64 keys
differ from those of more in float64. So attention goes in tiles of keys with fixed borders. An
elementwise operation computes what is left over from whole vectors, at the end of a tensor or of a
thread's share, by other code with another exponential. So it gets whole vectors only
(`elementwise`), and a linear layer whose bits still change with the number of rows runs in blocks
(`row_blocks`). The rule for a precision is stated here and nowhere else, with the probes that check
a whole forward as deployed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdraft.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class RowRule:
    """Forwards run on a multiple of `row_multiple` rows, at most `max_rows`.

    Attention multiplies `key_tile` keys at a time.
    """

    row_multiple: int
    max_rows: int
    key_tile: int


ROW_RULES = {
    torch.bfloat16: RowRule(row_multiple=2, max_rows=512, key_tile=1024),
    torch.float32: RowRule(row_multiple=4, max_rows=64, key_tile=64),
    torch.float64: RowRule(row_multiple=4, max_rows=64, key_tile=64),
}
BFLOAT16_MIN_WORK = 16**3
"""torch computes bfloat16 products of up to so many multiplications in another kernel, which
matters to layers of toy size only."""
VECTOR_VALUES = 64
"""Elementwise operations on a multiple of so many values are whole vectors in every precision:
torch takes two of the widest registers at once, with 32 bfloat16 values each."""
SERIAL_VALUES = 2**14
"""No elementwise operation on so many values is shared among threads."""
THREAD_VALUES = 2**15
"""Of more than so many for each thread all threads have as many, whatever the operation."""
INEXACT_RULE = RowRule(row_multiple=1, max_rows=512, key_tile=2**31)

Split = tuple[int, ...]
PROBE_SPLITS: tuple[Split, ...] = (
    (33,),
    (1,) * 33,
    (7, 1, 16, 1, 5, 3),
    (20, 8, 5),
    (4, 4, 12, 12, 1),
    (28, 2, 3),
    (24, 9),
    (1, 32),
)
"""Ways to cut 33 tokens into forwards: a prompt at once, plain steps, drafted steps, chunks, and
forwards of every filled number of rows, many of them without a row that only fills up."""
TAIL_SPLIT: Split = (1, 5, 1, 1, 8)
"""How the last tokens of the probe at the border of a key tile are run again."""
MIN_BORDER = 256
"""No border before so many keys is probed: the blocking of smaller sums gives the same bits."""
NUM_COPIED = 8
"""Tokens of the context that the probe at the border computes, and then copies."""


def row_rule(dtype: torch.dtype) -> RowRule:
    """The rule for a precision.

    Raises:
        ModelError: no rule is known for `dtype`.
    """
    if dtype not in ROW_RULES:
        known = ", ".join(str(known).removeprefix("torch.") for known in ROW_RULES)
        raise ModelError(f"no rule of exactness is known for {dtype}; use one of {known}")
    return ROW_RULES[dtype]


def model_rule(dtype: torch.dtype, smallest_weight: int) -> RowRule:
    """The rule for a model whose smallest linear layer has so many weights."""
    rule = row_rule(dtype)
    multiple = rule.row_multiple
    while dtype == torch.bfloat16 and multiple * smallest_weight <= BFLOAT16_MIN_WORK:
        multiple *= 2
    return replace(rule, row_multiple=multiple)


def border_probe(rule: RowRule, max_context: int) -> tuple[int, int]:
    """(first position, number of tokens) of a probe: the widest forward that ends in the context.

    Its tail has half of its tokens before a border of the key tiles, and half behind it.
    """
    end = min(max(rule.key_tile, MIN_BORDER) + sum(TAIL_SPLIT) // 2, max_context)
    num_rows = min(rule.max_rows, end)
    return end - num_rows, num_rows


def supports_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 in hardware; without, float32 is the faster one."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def first_variant_split(
    logits_of: Callable[[Split], Tensor], splits: tuple[Split, ...]
) -> Split | None:
    """The first split whose logits [tokens, V] differ in any bit from those of `splits[0]`."""
    reference = logits_of(splits[0])
    for split in splits[1:]:
        if not torch.equal(logits_of(split), reference):
            return split
    return None
