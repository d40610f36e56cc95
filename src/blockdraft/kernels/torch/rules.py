"""What torch's operations need so that a row's bits do not depend on its company.

Measured on CPUs (docs/experiments/row-invariance.md). A linear layer gives each row the same bits
for any number of rows that is a multiple of a small one; the rows left over from it run in another
kernel. So every forward is filled up to that multiple, and long prompts go in pieces, since large
products are blocked differently. A product over keys is blocked by their number, masked ones
included: a sum over keys changes its bits from 193 keys on in float32 and from 1,025 in bfloat16,
and the scores of 64 keys differ from those of more in float64. So attention goes in tiles of keys
with fixed borders.
"""

import hashlib
import warnings

import torch
import torch.nn.functional as F

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


def product_bits() -> str:
    """Names how torch multiplies rows in this process; its libraries may not say what they do.

    Where they choose by the number of rows, and where the environment was set after their first
    product, it is another name.
    """
    bits = hashlib.sha256()
    with warnings.catch_warnings():
        # On an Arm CPU without bfloat16 torch tells, once in a process, that it takes another path.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        for dtype in (torch.float32, torch.bfloat16):
            weight = _fractions(1536, 576).to(dtype)
            for num_rows in (1, 16, 64):
                product = F.linear(_fractions(num_rows, 576).to(dtype), weight)
                bits.update(product.float().numpy().tobytes())
    return bits.hexdigest()[:16]


def _fractions(*shape: int) -> torch.Tensor:
    """Between -1 and 1, the same on every machine."""
    numbers = torch.arange(torch.Size(shape).numel(), device="cpu") * 7919 % 2003
    return numbers.view(shape).float() / 1001.5 - 1
