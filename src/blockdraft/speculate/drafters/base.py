"""What the engine needs of a drafter."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from blockdraft.core.sequence import Batch, DraftBlock, Row

Watch = Callable[[list[Row], Tensor], None]
"""Is shown the rows that draft and the logits [rows, slots, V] behind their guesses; tokens that
the drafter cannot guess have -inf. A row may use fewer slots than there are."""


class Drafter(Protocol):
    """Guesses the tokens that the target will choose. Whatever it guesses, the output is the same.

    `max_draft_tokens` bounds a block; `layer_ids` are the target layers whose outputs it wants.
    """

    max_draft_tokens: int
    layer_ids: tuple[int, ...]

    def prepare(self, batch: Batch) -> None:
        """Turn features that wait into draft context, as far as this step needs it."""
        ...

    def draft(self, batch: Batch) -> DraftBlock:
        """At most `row.num_draft_tokens` guesses for each row."""
        ...

    def absorb(self, key: int, start: int, features: Tensor) -> None:
        """Take the features [new, num_features * hidden] of newly cached tokens of a sequence.

        `start` is the position of the first. A sequence may begin behind tokens that an earlier
        one has absorbed, see Memory.open.
        """
        ...

    def close(self, key: int) -> None:
        """Forget a sequence."""
        ...


@runtime_checkable
class Watchable(Protocol):
    """A drafter that shows what it thought of each token, to those who ask."""

    watch: Watch | None
