"""Who sees whom in attention: the one rule behind every mask, key range and tile list.

Keys stand at absolute positions of their sequence. A row sees the keys of its own span up to the
span's end, or, if it is causal, up to itself; a window hides what is too far away, in both
directions. Targets are causal. A block-diffusion drafter may see its whole block; its context ends
where the block begins, so it needs no rule of its own. Leaves of a tree are spans of their own,
so a branch never sees another.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class Visibility:
    """The rule of one kind of layer.

    window: positions that differ by so much or more do not see each other.
    """

    is_causal: bool = True
    window: int | None = None

    def sees(self, query: Position, key: Position) -> Position:
        """Whether the row at position `query` sees the key at `key`; of tensors, elementwise."""
        visible = key <= query if self.is_causal else key >= 0
        if self.window is not None:
            visible = visible & (abs(query - key) < self.window)
        return visible

    def key_range(self, query: int, end: int) -> tuple[int, int]:
        """The first key that the row at `query` sees, and the one behind the last.

        What `sees` says, for the keys of a span before its end.
        """
        first = 0
        if self.is_causal:
            end = min(end, query + 1)
        if self.window is not None:
            first = max(query - self.window + 1, 0)
            end = min(end, query + self.window)
        return first, end

    def key_ranges(self, queries: Tensor, ends: Tensor) -> Tensor:
        """[n, 2]: the same of rows at `queries` [n] before `ends` [n], on their device."""
        firsts = torch.zeros_like(queries)
        if self.is_causal:
            ends = torch.minimum(ends, queries + 1)
        if self.window is not None:
            firsts = (queries - self.window + 1).clamp_(min=0)
            ends = torch.minimum(ends, queries + self.window)
        return torch.stack((firsts, ends), dim=1)


CAUSAL = Visibility()
