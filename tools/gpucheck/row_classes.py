"""Whether a row's result depends on the rows beside it, found out by trying."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_KINDS = 24
"""More different results of one row are not told apart."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RowClasses:
    """Numbers of rows, by the bits that they give one row.

    kinds: for each number that was tried, which result. any_place: the row has the same bits
    wherever it stands among others.
    """

    tried: tuple[int, ...]
    kinds: tuple[int, ...]
    any_place: bool

    @property
    def holds(self) -> bool:
        """True if the row always has the same bits."""
        return self.any_place and len(set(self.kinds)) == 1

    def __str__(self) -> str:
        """Runs of tried numbers with equal bits, such as "1, then 2-16, then 17-512 (as 1)"."""
        if self.holds:
            return "same bits"
        parts, firsts = [], dict[int, str]()
        for kind, group in groupby(zip(self.tried, self.kinds, strict=True), lambda pair: pair[1]):
            numbers = [number for number, _ in group]
            name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
            parts.append(f"{name} (as {firsts[kind]})" if kind in firsts else name)
            firsts.setdefault(kind, str(numbers[0]))
        shown = ", then ".join(parts if len(parts) <= 8 else [*parts[:7], f"{len(parts) - 7} more"])
        return shown if self.any_place else f"{shown}; depends on the place"


def row_classes(run: Callable[[int], list[Tensor]], tried: Sequence[int]) -> RowClasses:
    """Classes of what `run(number)` gives for one row: it is computed at several places."""
    representatives: list[Tensor] = []
    kinds: list[int] = []
    any_place = True
    for number in tried:
        first, *others = run(number)
        any_place = any_place and all(torch.equal(first, other) for other in others)
        equal = (k for k, known in enumerate(representatives) if torch.equal(first, known))
        kinds.append(next(equal, len(representatives)))
        if kinds[-1] == len(representatives) < MAX_KINDS:
            representatives.append(first.clone())
    return RowClasses(tuple(tried), tuple(kinds), any_place)


def classes_of(product: Product, company: Tensor, row: Tensor, tried: Sequence[int]) -> RowClasses:
    """Of a function of rows: `row` [width] stands among so many of `company` [most, width]."""

    def run(number: int) -> list[Tensor]:
        rows, places = company[:number].clone(), sorted({0, number // 2, number - 1})
        rows[places] = row
        output = product(rows)
        return [output[place] for place in places]

    return row_classes(run, tried)


def in_tiles(product: Product, size: int) -> Product:
    """The same product on `size` rows at a time, always as many."""

    def tiled(rows: Tensor) -> Tensor:
        filled = F.pad(rows, (0, 0, 0, -len(rows) % size))
        return torch.cat([product(part) for part in torch.split(filled, size)])[: len(rows)]

    return tiled


def in_batches(weight: Tensor, size: int) -> Product:
    """The product with a weight [outputs, inputs], tiles of `size` rows in one batched call."""

    def batched(rows: Tensor) -> Tensor:
        filled = F.pad(rows, (0, 0, 0, -len(rows) % size)).view(-1, size, rows.shape[1])
        many = weight.T.expand(len(filled), -1, -1)
        return torch.bmm(filled, many).flatten(0, 1)[: len(rows)]

    return batched
