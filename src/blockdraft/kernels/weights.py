"""What layers are made of: norms, and weights in whole numbers.

Products with whole numbers are exact in any order, so all backends give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

MAX_INT8 = 127
"""The largest number of an int8 weight; the smallest is its opposite."""
GROUP = 32
"""Inputs that share a scale in a GroupWeight."""
GROUP_LEVELS = 2**15 - 1
"""The largest whole number of a row that is multiplied with one."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Over the root of the mean square, times weight [size].

    rounds_first: to the tensor's type before the weight is applied, and after it again, as Llama's.
    """

    weight: Tensor
    eps: float
    rounds_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A weight in whole numbers up to MAX_INT8, close to the one that it was made of.

    values: [outputs, inputs], int8. scales: [outputs], float32, what one of each output counts.
    dtype: of the rows that it is multiplied with.

    A product makes whole numbers of every row too: of the largest, `num_levels`. Their sums are
    exact in any order, so all backends have the same bits.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """The closest one, with the largest number of each output at its end of int8."""
        wide = weight.detach().float()
        scales = wide.abs().amax(1) / MAX_INT8
        values = (wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
        return cls(values.to(torch.int8), scales, weight.dtype)

    @property
    def num_levels(self) -> int:
        """The largest number of a row, such that no sum leaves int32, and no number int16."""
        most = torch.iinfo(torch.int32).max // (MAX_INT8 * self.values.shape[1])
        return min(most, torch.iinfo(torch.int16).max)


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeight:
    """A weight in whole numbers of 4 or 8 bits, those of GROUP inputs with a scale of their own.

    numbers: [outputs, groups, GROUP], int8; or of 4 bits [outputs, groups, GROUP / 2], uint8, where
    the first half of a group lies in the lower halves of the bytes and the second in the upper
    ones. scales: [outputs, groups], float16, what one counts. minimums: the same shape, added to
    each; None if they are all 0. dtype: of the rows that it is multiplied with.

    These are the blocks Q8_0 and Q4_1 of GGUF. A product makes whole numbers of GROUP inputs of a
    row too, of the largest GROUP_LEVELS. Sums over a group are exact in any order; those of the
    groups are added up in float32, in their order, each step rounded alone. So all backends have
    the same bits.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    dtype: torch.dtype

    @property
    def num_bits(self) -> int:
        """Of a number."""
        return 4 if self.numbers.dtype == torch.uint8 else 8

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        outputs, groups = self.scales.shape
        return torch.Size((outputs, groups * GROUP))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.numbers.device

    @property
    def num_bytes(self) -> int:
        """Of all that it holds."""
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> list[Tensor]:
        parts = self.numbers, self.scales, self.minimums
        return [part for part in parts if part is not None]

    def at(self, outputs: Tensor | slice) -> "GroupWeight":
        """Only some outputs, in the order and the shape asked for."""
        minimums = None if self.minimums is None else self.minimums[outputs]
        return replace(
            self,
            numbers=self.numbers[outputs],
            scales=self.scales[outputs],
            minimums=minimums,
        )

    def to(self, device: torch.device | str) -> "GroupWeight":
        """The same on a device."""
        minimums = None if self.minimums is None else self.minimums.to(device)
        return replace(
            self,
            numbers=self.numbers.to(device),
            scales=self.scales.to(device),
            minimums=minimums,
        )

    def unpacked(self) -> Tensor:
        """The whole numbers, [outputs, groups, GROUP], int8."""
        if self.num_bits == 8:
            return self.numbers
        return torch.cat((self.numbers & 15, self.numbers >> 4), dim=-1).to(torch.int8)

    def dequantized(self) -> Tensor:
        """What it stands for, [.., inputs], float32."""
        values = self.unpacked() * self.scales.float()[..., None]
        if self.minimums is not None:
            values += self.minimums.float()[..., None]
        return values.flatten(-2)


def joined_groups(weights: Sequence[GroupWeight]) -> GroupWeight:
    """The outputs of several weights, one after another.

    Raises:
        TypeError: they are not of one kind.
    """
    first = weights[0]
    kinds = {(one.num_bits, one.minimums is None, one.dtype, one.shape[1]) for one in weights}
    if len(kinds) > 1:
        raise TypeError("weights of several kinds do not lie side by side")
    minimums = [one.minimums for one in weights if one.minimums is not None]
    return replace(
        first,
        numbers=torch.cat([one.numbers for one in weights]),
        scales=torch.cat([one.scales for one in weights]),
        minimums=torch.cat(minimums) if minimums else None,
    )


AnyWeight = Tensor | Int8Weight | GroupWeight
"""What a linear layer is made of."""
