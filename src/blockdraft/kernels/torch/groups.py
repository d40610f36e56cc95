"""Products with weights in groups by torch: what all other backends compute, to the bit."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.torch.int8 import whole_rows
from blockdraft.kernels.weights import GROUP, GROUP_LEVELS, GroupWeight

AT_ONCE = 2048
"""Outputs whose numbers are unpacked together."""


class GroupLinear:
    """A linear layer with a weight in groups; see Linear. Unpacks the weight in every call."""

    keeps_rows = True
    """Sums of whole numbers are exact, and those of the groups have one order."""

    def __init__(self, weight: GroupWeight, bias: Tensor | None) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        groups = x.reshape(-1, self.shape[1] // GROUP, GROUP).float()
        values, scales = whole_rows(groups, GROUP_LEVELS)
        starts = range(0, self.shape[0], AT_ONCE)
        parts = [
            _product(values, scales, self._weight.at(slice(start, start + AT_ONCE)))
            for start in starts
        ]
        output = torch.cat(parts, dim=-1)
        if self._bias is not None:
            output = output + self._bias.float()
        return output.to(self.dtype).view(*x.shape[:-1], -1)


def _product(values: Tensor, scales: Tensor, weight: GroupWeight) -> Tensor:
    """values: [rows, groups, GROUP], whole; scales: [rows, groups, 1]. Returns [rows, outputs]."""
    totals = values.sum(-1, keepdim=True) * scales
    numbers = weight.unpacked().double()  # float64 holds their sums exactly
    weight_scales = weight.scales.float()
    minimums = None if weight.minimums is None else weight.minimums.float()
    output = values.new_zeros(values.shape[0], weight.shape[0])
    for group in range(values.shape[1]):
        sums = F.linear(values[:, group].double(), numbers[:, group]).float()
        output = output + sums * weight_scales[:, group] * scales[:, group]
        if minimums is not None:
            output = output + minimums[:, group] * totals[:, group]
    return output
