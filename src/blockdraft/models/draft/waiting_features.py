"""Features of committed tokens that nobody has drafted from yet."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.cache.pages import PAGE_SIZE

_JOINED = PAGE_SIZE
"""Parts are copied together when they have so many tokens, or a page is full. Before, they are
views of their step's features, which copies nothing token by token, but keeps those of all its
sequences in memory; so parts of steps of more rows than this are copied at once."""


@dataclass(slots=True)
class Waiting:
    """Features of a holder's tokens from position `start` up to `end`, in parts in their order."""

    holder: int
    start: int
    end: int
    parts: list[Tensor] = field(default_factory=list)
    num_joined: int = 0
    """Parts that are copies."""
    num_viewed: int = 0
    """Tokens in the others."""
    is_shared: bool = False
    """Others have taken the holder over."""

    def __len__(self) -> int:
        return self.end - self.start

    def add(self, features: Tensor) -> None:
        """Take those of the next tokens, [new, num_features * hidden]."""
        num_new = features.shape[0]
        self.parts.append(held_alone(features))
        self.end += num_new
        self.num_viewed += num_new
        if self.num_viewed >= _JOINED or self.end % PAGE_SIZE == 0:
            self.parts[self.num_joined :] = [torch.cat(self.parts[self.num_joined :])]
            self.num_joined += 1
            self.num_viewed = 0


def features_and_positions(piece: Sequence[Waiting]) -> tuple[Tensor, list[int]]:
    """Features [c, num_features * hidden] of all that waits in a piece, and their c positions."""
    features = torch.cat([part for waiting in piece for part in waiting.parts])
    return features, [p for waiting in piece for p in range(waiting.start, waiting.end)]


class WaitingFeatures:
    """Features by holder: whatever their keys and values will belong to, a page or a sequence.

    They are projected when someone drafts from them, so what nobody drafts from costs no more than
    its memory. That is bounded: when more than `limit` tokens wait, the oldest holders' are in
    excess.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_tokens = 0
        self._of: OrderedDict[int, Waiting] = OrderedDict()

    def keep(self, holder: int, start: int, features: Tensor) -> None:
        """Add [new, num_features * hidden] of the tokens from `start` on, behind what waits."""
        waiting = self._of.get(holder)
        if waiting is None:
            waiting = self._of[holder] = Waiting(holder, start, start)
        assert waiting.end == start
        waiting.add(features)
        self.num_tokens += features.shape[0]

    def of(self, holders: Iterable[int]) -> list[Waiting]:
        """What waits of these holders."""
        return [self._of[holder] for holder in holders if holder in self._of]

    @property
    def is_over(self) -> bool:
        """True if more waits than the limit."""
        return self.num_tokens > self.limit

    def excess(self) -> list[Waiting]:
        """The oldest, as many as must go for the others to stay within the limit."""
        num_tokens, oldest = self.num_tokens, []
        for waiting in self._of.values():
            if num_tokens <= self.limit:
                break
            oldest.append(waiting)
            num_tokens -= len(waiting)
        return oldest

    def drop(self, holder: int) -> None:
        """Nothing of a holder waits any more; unknown ones are fine."""
        waiting = self._of.pop(holder, None)
        if waiting is not None:
            self.num_tokens -= len(waiting)


def held_alone(features: Tensor) -> Tensor:
    """[.., num_features * hidden], copied where a view would keep those of a large step."""
    most = _JOINED * features.shape[-1] * features.itemsize
    return features.clone() if features.untyped_storage().nbytes() > most else features
