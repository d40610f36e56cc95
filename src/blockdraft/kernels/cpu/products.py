"""Products with weights that lie in the order in which the kernels read them.

A step of a few rows reads every weight once and is bound by memory; what counts is that reading
never waits, and that a product costs little beside it. A row's sums run in the order of the inputs,
so its bits do not depend on the rows beside it.

A float32 weight whose values all fit bfloat16, as those of a checkpoint in bfloat16, is held in it:
a narrow weight. A product widens what it reads, so it has the same bits, and half as much is read.

An Int8Weight lies in the same order, and half as much again is read. Its sums are exact. A
GroupWeight lies in panels too, group after group, each with its scales.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.core.remembered import once
from blockdraft.kernels.checks import check_sizes
from blockdraft.kernels.cpu.huge_pages import in_huge_pages
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.onednn import own_bias
from blockdraft.kernels.cpu.ops import IS_BFLOAT16, check_alike
from blockdraft.kernels.cpu.structs import Product
from blockdraft.kernels.interface import Linear
from blockdraft.kernels.torch.groups import GroupLinear
from blockdraft.kernels.torch.int8 import Int8Linear
from blockdraft.kernels.weights import GROUP, GroupWeight, Int8Weight

LANES = 16
"""Outputs whose weights alternate in a narrow weight, as in products.h."""
LOWER_HALF = 0xFFFF
"""Bits of a float32 value that bfloat16 does not have."""
MAX_ERROR = 64 * torch.finfo(torch.float32).eps
"""A sum may differ from torch's by this share of its absolute values, before it is rounded."""
CHECKED_AT_ONCE = 4096
"""Outputs whose weights are held in float32 for that."""

logger = logging.getLogger(__name__)


class NativeProduct:
    """A linear layer of rows of `dtype` with a `bias` [outputs] by kernels; see Linear.

    shape: of the weight. weight: the same in panels. scales: of its outputs, if it is in int8.
    group_bits: of a number, if it is in groups, and has_minimums whether these have minimums.
    """

    keeps_rows = True
    """The order of its sums is in the source, or of no consequence."""

    def __init__(
        self,
        kernels: Library,
        shape: torch.Size,
        dtype: torch.dtype,
        weight: Tensor,
        bias: Tensor | None,
        *,
        is_narrow: bool = False,
        scales: Tensor | None = None,
        group_bits: int = 0,
        has_minimums: bool = False,
    ) -> None:
        self._kernels = kernels
        self.shape, self.dtype = shape, dtype
        weight = in_huge_pages(weight)
        self.weight, self._scales = weight, scales
        self.like = weight.new_empty(0, dtype=dtype)
        """Of the type of rows."""
        self._bias = own_bias(bias)
        if self._bias is not None:
            check_alike(self.like, self._bias)
            check_sizes(self._bias.numel() == shape[0])
        self._flag = IS_BFLOAT16[dtype]
        self.struct = Product(
            weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            shape[1],
            shape[0],
            is_narrow,
            None if scales is None else scales.data_ptr(),
            group_bits,
            has_minimums,
        )
        """As the kernels know it; valid as long as this object."""
        self._address = ctypes.addressof(self.struct)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs].

        Raises:
            RuntimeError: x has another type, device or size, or wants a gradient.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("packed weights have no gradients")
        x, inputs = x.contiguous(), self.struct.inputs
        check_alike(self.like, x)
        check_sizes(x.shape[-1] == inputs > 0)
        output = x.new_empty((*x.shape[:-1], self.struct.outputs))
        self._kernels.multiply(
            self._flag, self._address, output.data_ptr(), x.data_ptr(), x.numel() // inputs,
            torch.get_num_threads(),
        )  # fmt: skip
        return output


P = TypeVar("P", bound=NativeProduct)


class PackedProduct(NativeProduct):
    """Calls like the linear layer of `weight` [outputs, inputs] and `bias` [outputs].

    `step`: how many inputs lie side by side for these kernels.
    """

    def __init__(self, kernels: Library, step: int, weight: Tensor, bias: Tensor | None) -> None:
        narrow = _narrow(weight.detach()) if kernels.reads_narrow() else None
        self.is_narrow = narrow is not None
        held = weight.detach() if narrow is None else narrow
        panels = _in_panels(held, step, kernels.product_panel())
        if self.is_narrow:
            panels = _alternating(panels)
        shape, dtype = weight.shape, weight.dtype
        super().__init__(kernels, shape, dtype, panels, bias, is_narrow=self.is_narrow)


class Int8Product(NativeProduct):
    """The same of an int8 weight, with the bits of Int8Linear."""

    def __init__(
        self, kernels: Library, step: int, weight: Int8Weight, bias: Tensor | None
    ) -> None:
        panels = _in_panels(weight.values, step, kernels.product_panel())
        scales = _in_panels(weight.scales[:, None], 1, kernels.product_panel())
        shape, dtype = weight.values.shape, weight.dtype
        super().__init__(kernels, shape, dtype, panels, bias, scales=scales)


class GroupProduct(NativeProduct):
    """The same of a weight in groups, with the bits of GroupLinear."""

    def __init__(self, kernels: Library, weight: GroupWeight, bias: Tensor | None) -> None:
        super().__init__(
            kernels,
            weight.shape,
            weight.dtype,
            _group_panels(weight, kernels.group_panel()),
            bias,
            group_bits=weight.num_bits,
            has_minimums=weight.minimums is not None,
        )


def packed_product(
    kernels: Library, weight: Tensor, bias: Tensor | None = None
) -> PackedProduct | None:
    """The layer by kernels; None where others multiply better."""
    step: int = kernels.product_step(IS_BFLOAT16[weight.dtype])
    if not step or weight.shape[1] % step:
        return None
    product = PackedProduct(kernels, step, weight, bias)
    return _if_right(product, "a matrix product", lambda: _is_right(product, weight, bias))


def int8_product(
    kernels: Library, weight: Int8Weight, bias: Tensor | None = None
) -> Int8Product | None:
    """The layer by kernels; None where these do not multiply such weights."""
    step: int = kernels.int8_step()
    if not step or weight.values.shape[1] % step:
        return None
    product = Int8Product(kernels, step, weight, bias)
    expected = Int8Linear(weight, bias)
    return _if_right(product, "an int8 matrix product", lambda: _is_exact(product, expected))


def group_product(
    kernels: Library, weight: GroupWeight, bias: Tensor | None = None
) -> GroupProduct | None:
    """The layer by kernels; None where these do not multiply such weights."""
    if not kernels.group_panel():
        return None
    product, expected = GroupProduct(kernels, weight, bias), GroupLinear(weight, bias)
    kind = f"a matrix product with int{weight.num_bits} in groups"
    return _if_right(product, kind, lambda: _is_exact(product, expected))


def _if_right(product: P, kind: str, is_right: Callable[[], bool]) -> P | None:
    """The product; None if one row of it is wrong, tried once for each kind and shape."""
    if once(f"{kind} {tuple(product.shape)} right", is_right):
        return product
    logger.warning("%s by kernels is wrong on this machine: torch computes it", kind)
    return None


@torch.inference_mode()
def _is_exact(product: NativeProduct, expected: Linear) -> bool:
    """True if one row has the bits that torch gives it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, product.shape[1], generator=generator).to(product.dtype)
    return bool(_equal(product(x), expected(x)).all())


@torch.inference_mode()
def _is_right(product: PackedProduct, weight: Tensor, bias: Tensor | None) -> bool:
    """True if one row gives what torch gives, which reads the weight itself; sums may round."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, weight.shape[1], generator=generator).to(weight.dtype)
    found = product(x)[0].float()
    for start in range(0, weight.shape[0], CHECKED_AT_ONCE):
        part = slice(start, start + CHECKED_AT_ONCE)
        rows = weight[part].float()
        added = 0.0 if bias is None else bias[part].float()
        expected, sizes = (
            F.linear(x.float(), rows)[0] + added,
            F.linear(x.float().abs(), rows.abs()),
        )
        allowed = torch.finfo(weight.dtype).eps * expected.abs() + MAX_ERROR * sizes[0]
        is_close = (found[part] - expected).abs() <= allowed
        if not bool((is_close | _equal(found[part], expected)).all()):
            return False
    return True


def _equal(found: Tensor, expected: Tensor) -> Tensor:
    """Damaged weights give what is no number, which is no fault of the kernels."""
    return torch.isclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def _in_panels(weight: Tensor, step: int, panel: int) -> Tensor:
    """[outputs, inputs] -> [panels, inputs / step, panel, step], filled up with zeros."""
    outputs, inputs = weight.shape
    panels = weight.new_zeros(-(-outputs // panel), inputs // step, panel, step)
    num_whole = outputs // panel
    whole = weight[: num_whole * panel].reshape(num_whole, panel, inputs // step, step)
    panels[:num_whole] = whole.transpose(1, 2)
    if rest := outputs % panel:
        last = weight[num_whole * panel :].reshape(rest, inputs // step, step)
        panels[num_whole, :, :rest] = last.transpose(0, 1)
    return panels


def _group_panels(weight: GroupWeight, panel: int) -> Tensor:
    """[panels, groups, bytes], uint8: of each group the panel's scales, minimums and numbers.

    Filled up with zeros. The order of the numbers is that of add_group in groups.h.
    """
    outputs, num_groups = weight.scales.shape
    num_panels, step = -(-outputs // panel), panel * CHECKED_AT_ONCE // GROUP
    halves = [part for part in (weight.scales, weight.minimums) if part is not None]
    head = 2 * panel * len(halves)
    panels = torch.zeros(
        num_panels, num_groups, head + GROUP * panel * weight.num_bits // 8, dtype=torch.uint8
    )
    for start in range(0, outputs, step):
        part = slice(start, min(start + step, outputs))
        own = panels[start // panel : -(-part.stop // panel)]
        for index, half in enumerate(halves):
            place = slice(2 * panel * index, 2 * panel * (index + 1))
            in_panels = _filled(half[part], panel).view(-1, panel, num_groups).transpose(1, 2)
            own[..., place] = in_panels.contiguous().view(torch.uint8)
        numbers = _filled(weight.at(part).unpacked(), panel)
        own[..., head:] = _numbers_in_panels(numbers, panel, weight.num_bits)
    return panels


def _numbers_in_panels(numbers: Tensor, panel: int, num_bits: int) -> Tensor:
    """[panels * panel, groups, GROUP] -> [panels, groups, bytes]."""
    num_groups = numbers.shape[1]
    if num_bits == 8:
        pairs = numbers.view(-1, panel, num_groups, GROUP // 2, 2)
        return pairs.permute(0, 2, 3, 1, 4).flatten(2).view(torch.uint8)
    # A word has outputs i and i + panel / 2 of one input, and the same of the second one behind it.
    words = numbers.view(-1, 2, panel // 2, num_groups, GROUP // 4, 2, 2)
    words = words.permute(0, 3, 4, 2, 6, 5, 1).to(torch.uint8)
    return (words[..., 0] | words[..., 1] << 4).flatten(2)


def _filled(tensor: Tensor, panel: int) -> Tensor:
    """With zeros behind it, so that there are whole panels of outputs."""
    rest = -tensor.shape[0] % panel
    return torch.cat((tensor, tensor.new_zeros(rest, *tensor.shape[1:]))) if rest else tensor


def _narrow(weight: Tensor) -> Tensor | None:
    """The upper halves of float32 values, int16; None if any has bits in the lower one."""
    if weight.dtype != torch.float32:
        return None
    narrow = torch.empty(weight.shape, dtype=torch.int16)
    for start in range(0, weight.shape[0], CHECKED_AT_ONCE):
        part = slice(start, start + CHECKED_AT_ONCE)
        bits = weight[part].contiguous().view(torch.int32)
        if (bits & LOWER_HALF).any():
            return None
        narrow[part] = bits >> 16
    return narrow


def _alternating(panels: Tensor) -> Tensor:
    """[.., panel, 1], of each LANES outputs the first half in turns with the second."""
    halves = panels.view(*panels.shape[:-2], -1, 2, LANES // 2)
    return halves.transpose(-1, -2).contiguous().view(panels.shape)
