"""Elementwise operations on a CPU in whole vectors, so that each value comes out of the same code.

torch computes whole vectors by vector instructions, and what is left over at the end of a tensor,
or of a thread's share of it, by scalar ones, whose exponential rounds differently. What is left
over depends on the number of rows. Here every operation gets whole vectors and shares of whole
vectors only.
"""

from collections.abc import Callable
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

VECTOR_VALUES = 64
"""Elementwise operations on a multiple of so many values are whole vectors in every precision:
torch takes two of the widest registers at once, with 32 bfloat16 values each."""
SERIAL_VALUES = 2**14
"""No elementwise operation on so many values is shared among threads."""
THREAD_VALUES = 2**15
"""Of more than so many for each thread all threads have as many, whatever the operation."""


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x, with bits that depend on each value alone."""
    values, num_values = x.reshape(-1), x.numel()
    if is_whole(num_values):
        return function(values).view(x.shape)
    starts = [0, num_together(num_values)]
    while starts[-1] < num_values:
        starts.append(min(starts[-1] + SERIAL_VALUES, num_values))
    parts = [values[start:end] for start, end in pairwise(starts) if start < end]
    num_fill = -parts[-1].shape[0] % VECTOR_VALUES
    parts[-1] = torch.cat((parts[-1], parts[-1].new_zeros(num_fill)))
    return torch.cat([function(part) for part in parts])[:num_values].view(x.shape)


def is_whole(num_values: int) -> bool:
    """True if torch computes a tensor of this size in whole vectors, on each thread."""
    if num_values <= SERIAL_VALUES:
        return num_values % VECTOR_VALUES == 0
    return num_together(num_values) == num_values


def num_together(num_values: int) -> int:
    """How many of these values all threads can share in whole vectors; 0 if there are too few.

    Where there are enough for all, each thread gets the same number of them.
    """
    num_threads = torch.get_num_threads()
    most = num_values - num_values % (VECTOR_VALUES * num_threads)
    return most if most > (num_threads - 1) * THREAD_VALUES else 0


def rows_in_whole_vectors(function: Callable[[Tensor], Tensor], rows: Tensor, width: int) -> Tensor:
    """A function of each row [rows, any] -> [rows, width], elementwise in tensors of that width."""
    num_rows = rows.shape[0]
    if is_whole(num_rows * width):
        return function(rows)
    multiple = VECTOR_VALUES // gcd(VECTOR_VALUES, width)
    num_piece = max(SERIAL_VALUES // (multiple * width), 1) * multiple
    num_fill = -num_rows % multiple
    filled = torch.cat((rows, rows[-1:].expand(num_fill, -1)))
    return torch.cat([function(piece) for piece in torch.split(filled, num_piece)])[:num_rows]
