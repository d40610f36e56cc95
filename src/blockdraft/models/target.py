"""What the engine needs of a target model."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockdraft.cache.memory import Memory
from blockdraft.core.sequence import Batch, DraftBlock


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one pass over a batch computed.

    logits: [positions, V], row after row: the 1 + num_drafted positions that get a choice, none of
    an incomplete row; all positions of a prompt that is scored. See Row.num_logits.
    features: [num_new + num_drafted, num_features * hidden] of every token of a row: the outputs
    of the wanted layers side by side, in the order asked for; None if none are wanted. May be None
    for a row whose sequence never drafts.
    num_forwards: how often the model ran for it.
    """

    logits: Tensor
    features: list[Tensor | None]
    num_forwards: int = 1


class Target(Protocol):
    """A causal language model with a cache per sequence, addressed by the sequence's key.

    After `forward` a sequence's cache holds its cached, new and drafted tokens; `truncate` takes
    back what was not kept. Commit truncates, and the engine after a failed step. `memory` says what
    fits; the scheduler opens a sequence there and reserves its tokens before a forward.
    """

    vocab_size: int
    max_context: int

    @property
    def memory(self) -> Memory:
        """Room for the K/V of sequences."""
        ...

    def forward(self, batch: Batch, block: DraftBlock) -> TargetOutput:
        """Run the new and drafted tokens of every row through the model."""
        ...

    def truncate(self, key: int, length: int) -> None:
        """Keep the first `length` cached tokens of a sequence, also after a forward that failed.

        Unknown keys are fine, the sequence may never have run.
        """
        ...

    def close(self, key: int) -> None:
        """Forget a sequence."""
        ...
