"""Elementwise operations of a model on a CPU, so that each value comes out of the same code.

See `kernels.torch.vectors`: what they compute beside whole vectors would have other bits.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from blockdraft.kernels.torch.vectors import VECTOR_VALUES, in_whole_vectors
from blockdraft.models.layers.packed import replace_forward

ACTIVATIONS = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
"""transformers' table: each computes a value from one value."""


def keep_vectors_whole(model: PreTrainedModel, row_multiple: int = 1) -> ExitStack:
    """Let the activations and rotations of a model compute in whole vectors, its gates one by one.

    row_multiple: of the rows of its forwards.

    Returns:
        what gives the model back as it was when closed.
    """
    undo, gates = ExitStack(), _gates_of_heads(model, row_multiple)
    for module in model.modules():
        if type(module) is nn.Linear and (module.out_features == 1 or module in gates):
            replace_forward(module, partial(_apart, module.forward), undo)
        if "forward" in vars(module):
            continue
        if isinstance(module, ACTIVATIONS):
            replace_forward(module, partial(in_whole_vectors, module.forward), undo)
        elif any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            replace_forward(module, WholeRotation(module), undo)
    return undo


def _gates_of_heads(model: PreTrainedModel, row_multiple: int) -> set[nn.Module]:
    """Linear layers within an attention that give each head one value (LFM3, Laguna).

    Not those whose values fill whole vectors whatever the number of rows.
    """
    found: set[nn.Module] = set()
    for attention in model.modules():
        output, head_dim = getattr(attention, "o_proj", None), getattr(attention, "head_dim", None)
        if isinstance(output, nn.Linear) and isinstance(head_dim, int):
            found |= {
                child
                for child in attention.children()
                if isinstance(child, nn.Linear)
                and child.out_features * head_dim == output.in_features
                and child.out_features * row_multiple % VECTOR_VALUES
            }
    return found


def _apart(gate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A gate of one value a row or a head, [..., inputs] -> [..., n], as `Apart`."""
    return Apart.of(gate(x))


class Apart(Tensor):
    """Values with gaps between them in memory, for what no module computes elementwise from them.

    Of values that do not lie side by side torch computes each by the code for one. A result with as
    many values has gaps again, since a change of precision closes them; that of `contiguous` has
    none, since native code asks for it.
    """

    @classmethod
    def of(cls, values: Tensor) -> "Apart":
        """The same values."""
        spread = values.new_empty(*values.shape, 2)[..., 0]
        return spread.copy_(values).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run any function of torch; see the class."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            given = [own for own in (*args, *(kwargs or {}).values()) if isinstance(own, cls)]
            if not isinstance(result, Tensor) or not given:
                return result
            num_values = max(own.numel() for own in given)
            plain = result.as_subclass(Tensor)
            keeps_gaps = plain.numel() == num_values and func is not Tensor.contiguous
            return cls.of(plain) if keeps_gaps else plain


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
