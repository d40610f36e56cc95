"""A CPU without compiled kernels: torch's operations, and products with weights packed by oneDNN.

A forward of a few rows reads every weight once and is bound by memory. `torch.nn.functional.linear`
reads the rows of the matrix as they lie, at half the bandwidth or less; a packed weight is read
front to back (docs/experiments/step-time.md). Sums run in another order than torch's, so bits
differ from an unpacked model, for all rows alike; in bfloat16 they are torch's.
"""

from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.kernels.interface import Linear, RowRule
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.weights import AnyWeight


class OneDnnLinear:
    """A linear layer packed by oneDNN; see Linear."""

    keeps_rows = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = own_bias(bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._weight, self._bias, "none", [], ""
        )
        return result


class OneDnnBackend(TorchBackend):
    """See the module."""

    @property
    def in_hardware(self) -> bool:
        """See Backend.in_hardware."""
        return self.dtype != torch.bfloat16 or supports_bfloat16()

    @property
    def packs(self) -> bool:
        """See Backend.packs: what oneDNN packs and multiplies well on this machine."""
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        is_known = self.dtype in (torch.bfloat16, torch.float32)
        return has_onednn and is_known and self.in_hardware

    @property
    def rule(self) -> RowRule:
        """See Backend.rule."""
        return replace(super().rule, runs_on_vectors=True)

    def linear(self, weight: AnyWeight, bias: Tensor | None = None) -> Linear:
        """See Backend.linear."""
        if not isinstance(weight, Tensor) or not self.packs:
            return super().linear(weight, bias)
        return OneDnnLinear(weight, bias)


def own_bias(bias: Tensor | None) -> Tensor | None:
    """A copy side by side in memory: libraries take strides for what they are not."""
    return None if bias is None else bias.detach().clone(memory_format=torch.contiguous_format)


def supports_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 in hardware; without, float32 is the faster one."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
