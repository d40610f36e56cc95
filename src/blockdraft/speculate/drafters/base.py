"""What the engine needs of a drafter."""

from typing import Protocol

from torch import Tensor

from blockdraft.core.sequence import Batch, DraftBlock


class Drafter(Protocol):
    """Guesses the tokens that the target will choose. Whatever it guesses, the output is the same.

    `max_draft_tokens` bounds a block; `layer_ids` are the target layers whose outputs it wants.
    """

    max_draft_tokens: int
    layer_ids: tuple[int, ...]

    def draft(self, batch: Batch) -> DraftBlock:
        """At most `row.num_draft_tokens` guesses for each row."""
        ...

    def absorb(self, key: int, features: Tensor | None) -> None:
        """Take the features [new, num_features * hidden] of newly cached tokens of a sequence."""
        ...

    def close(self, key: int) -> None:
        """Forget a sequence."""
        ...
