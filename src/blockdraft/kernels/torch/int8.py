"""Products with int8 weights by torch: what all other backends compute, to the bit."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.weights import Int8Weight

SMALLEST = 1e-30
"""Rows whose largest number is not above it count as zeros."""


class Int8Linear:
    """A linear layer with an int8 weight; see Linear."""

    keeps_rows = True
    """Sums of whole numbers are exact."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self.shape, self.dtype = weight.values.shape, weight.dtype
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        weight = self._weight
        values, scales = whole_rows(x.float(), weight.num_levels)
        sums = F.linear(values.double(), weight.values.double())  # float64 holds them exactly
        output = sums.float() * weight.scales * scales
        if self._bias is not None:
            output = output + self._bias.float()
        return output.to(self.dtype)


def whole_rows(x: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Rows [..., n] in whole numbers up to `num_levels`, and what one of each counts, [..., 1].

    A row with what is no finite number counts as NaN.
    """
    top = x.abs().amax(-1, keepdim=True)
    is_finite, is_something = top.isfinite(), top > SMALLEST
    usable = is_finite & is_something
    levels = torch.full_like(top, num_levels)  # torch divides numbers by reciprocals
    values = torch.where(usable, (x * (levels / top)).round(), 0.0)
    scales = torch.where(is_something, top / levels, 0.0)
    return values, torch.where(is_finite, scales, torch.nan)
