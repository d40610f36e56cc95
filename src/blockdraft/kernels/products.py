"""Products with weights that lie in the order in which the kernels read them.

A step of a few rows reads every weight once and is bound by memory; what counts is that reading
never waits, and that a product costs little beside it. A row's sums run in the order of the inputs,
so its bits do not depend on the rows beside it.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.library import Library, Product
from blockdraft.kernels.ops import IS_BFLOAT16, check_alike, check_sizes, kernels_for

PANEL = 48
"""Outputs that lie together, as in products.h."""


class PackedProduct:
    """Calls like the linear layer of `weight` [outputs, inputs] and `bias` [outputs].

    `step`: how many inputs lie side by side for these kernels.
    """

    def __init__(self, kernels: Library, step: int, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._weight = _in_panels(weight.detach(), step)
        self._bias = None if bias is None else bias.detach().contiguous()
        if self._bias is not None:
            check_alike(self._weight, self._bias)
            check_sizes(self._bias.numel() == weight.shape[0])
        self._flag = IS_BFLOAT16[weight.dtype]
        self.struct = Product(
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            weight.shape[1],
            weight.shape[0],
        )
        """As the kernels know it; valid as long as this object."""
        self._address = ctypes.addressof(self.struct)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        x, inputs = x.contiguous(), self.struct.inputs
        check_alike(self._weight, x)
        check_sizes(x.shape[-1] == inputs)
        output = x.new_empty((*x.shape[:-1], self.struct.outputs))
        self._kernels.multiply(
            self._flag, self._address, output.data_ptr(), x.data_ptr(), x.numel() // inputs,
            torch.get_num_threads(),
        )  # fmt: skip
        return output


def packed_product(weight: Tensor, bias: Tensor | None = None) -> PackedProduct | None:
    """The layer by kernels; None where there are none, or others multiply better."""
    kernels = kernels_for(weight)
    if kernels is None:
        return None
    step: int = kernels.product_step(IS_BFLOAT16[weight.dtype])
    if not step or weight.shape[1] % step:
        return None
    return PackedProduct(kernels, step, weight, bias)


def _in_panels(weight: Tensor, step: int) -> Tensor:
    """[outputs, inputs] -> [panels, inputs / step, PANEL, step], filled up with zeros."""
    outputs, inputs = weight.shape
    filled = F.pad(weight, (0, 0, 0, -outputs % PANEL))
    return filled.view(-1, PANEL, inputs // step, step).transpose(1, 2).contiguous()
