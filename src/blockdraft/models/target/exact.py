"""The test of the rule that makes a row's bits independent of its company, as deployed.

The rule of a device and a precision is the backend's (`kernels.interface.RowRule`): every forward
is filled up to a multiple of rows, long prompts go in pieces, attention goes in tiles of keys with
fixed borders. An elementwise operation computes what is left over from whole vectors, at the end
of a tensor or of a thread's share, by other code with another exponential. So it gets whole
vectors only (`elementwise`), and a linear layer whose bits still change with the number of rows
runs in blocks (`row_blocks`). Here is what checks a whole forward.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from blockdraft.core.errors import ModelError
from blockdraft.kernels.interface import RowRule

INEXACT_RULE = RowRule(row_multiple=1, max_rows=512, key_tile=2**31)

Split = tuple[int, ...]
CHECK_SPLITS: tuple[Split, ...] = (
    (33,),
    (1,) * 33,
    (7, 1, 16, 1, 5, 3),
    (20, 8, 5),
    (4, 4, 12, 12, 1),
    (28, 2, 3),
    (24, 9),
    (1, 32),
    (6, 10, 11, 6),
)
"""Ways to cut 33 tokens into forwards: a prompt at once, plain steps, drafted steps, chunks, and
forwards of every filled number of rows, many of them without a row that only fills up."""
TAIL_SPLIT: Split = (1, 5, 1, 1, 8)
"""How the last tokens of the check at the border of a key tile are run again."""
MIN_BORDER = 256
"""No border before so many keys is checked: the blocking of smaller sums gives the same bits."""
NUM_COPIED = 8
"""Tokens of the context that the check at the border computes, and then copies."""


class RowsDepend(ModelError):
    """A model did not pass the checks with the kernels that it has."""


def border_check(rule: RowRule, max_context: int) -> tuple[int, int]:
    """(first position, number of tokens) of a check: the widest forward that ends in the context.

    Its tail has half of its tokens before a border of the key tiles, and half behind it.
    """
    end = min(max(rule.key_tile, MIN_BORDER) + sum(TAIL_SPLIT) // 2, max_context)
    num_rows = min(rule.max_rows, end)
    return end - num_rows, num_rows


def first_variant_split(
    logits_of: Callable[[Split], Tensor], splits: tuple[Split, ...]
) -> Split | None:
    """The first split whose logits [tokens, V] differ in any bit from those of `splits[0]`."""
    reference = logits_of(splits[0])
    for split in splits[1:]:
        if not torch.equal(logits_of(split), reference):
            return split
    return None
