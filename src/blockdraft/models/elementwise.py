"""Elementwise operations of a model on a CPU, so that each value comes out of the same code.

torch computes whole vectors by vector instructions, and what is left over at the end of a tensor,
or of a thread's share of it, by scalar ones, whose exponential rounds differently. What is left
over depends on the number of rows. Here every operation gets whole vectors and shares of whole
vectors only; the numbers are in `exact`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from blockdraft.models.exact import SERIAL_VALUES, THREAD_VALUES, VECTOR_VALUES
from blockdraft.models.packed import replace_forward

ACTIVATIONS = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
"""transformers' table: each computes a value from one value."""


def keep_vectors_whole(model: PreTrainedModel) -> ExitStack:
    """Let the activations and rotations of a model on a CPU compute in whole vectors.

    Returns:
        what gives the model back as it was when closed.
    """
    undo = ExitStack()
    for module in model.modules() if model.device.type == "cpu" else ():
        if "forward" in vars(module):
            continue
        if isinstance(module, ACTIVATIONS):
            replace_forward(module, partial(in_whole_vectors, module.forward), undo)
        elif any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            replace_forward(module, WholeRotation(module), undo)
    return undo


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


class WholeRotation:
    """Calls like a rotary embedding of transformers, with rows filled up to whole vectors.

    Cosines are computed for half of a head, or for both halves, which are equal.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = module.forward
        self._multiple = VECTOR_VALUES
        """Of rows; smaller where the size of a head allows it, which the first call shows."""

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward; position_ids [b, rows]."""
        num_rows = position_ids.shape[-1]
        num_fill = -num_rows % self._multiple
        last = position_ids[..., -1:].expand(*position_ids.shape[:-1], num_fill)
        rotation = self._own(x, torch.cat((position_ids, last), dim=-1), *args, **kwargs)
        if not isinstance(rotation, tuple):  # of another kind, such as complex numbers
            return self._own(x, position_ids, *args, **kwargs)
        half = rotation[0].shape[-1] // 2
        self._multiple = VECTOR_VALUES // gcd(VECTOR_VALUES, half)
        return tuple(part[..., :num_rows, :] for part in rotation)
