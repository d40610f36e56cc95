"""What torch's operations need so that a row's bits do not depend on its company.

Measured on CPUs (docs/experiments/row-invariance.md). A linear layer gives each row the same bits
for any number of rows that is a multiple of a small one; the rows left over from it run in another
kernel. So every forward is filled up to that multiple, and long prompts go in pieces, since large
products are blocked differently. A product over keys is blocked by their number, masked ones
included: a sum over keys changes its bits from 193 keys on in float32 and from 1,025 in bfloat16,
and the scores of 64 keys differ from those of more in float64. So attention goes in tiles of keys
with fixed borders.
"""

import torch

from blockdraft.core.errors import ModelError
from blockdraft.kernels.interface import RowRule

ROW_RULES = {
    torch.bfloat16: RowRule(row_multiple=2, max_rows=512, key_tile=1024, small_work=16**3),
    torch.float32: RowRule(row_multiple=4, max_rows=64, key_tile=64),
    torch.float64: RowRule(row_multiple=4, max_rows=64, key_tile=64),
}
"""torch computes small bfloat16 products in another kernel, which matters to layers of toy size."""


def row_rule(dtype: torch.dtype) -> RowRule:
    """The rule for a precision.

    Raises:
        ModelError: no rule is known for `dtype`.
    """
    if dtype not in ROW_RULES:
        known = ", ".join(str(known).removeprefix("torch.") for known in ROW_RULES)
        raise ModelError(f"no rule of exactness is known for {dtype}; use one of {known}")
    return ROW_RULES[dtype]
