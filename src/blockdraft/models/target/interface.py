"""What the engine needs of a target model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.cache.memory import Memory
from blockdraft.core.plan import ForwardPlan, PlannedRow


@dataclass(frozen=True, slots=True, eq=False)
class RowFeatures:
    """Features of one row: the outputs of the wanted layers side by side.

    values: [num_positions, num_features * hidden], as they were computed. places: where among them
    each position of the row is; None if they are in its order.
    """

    values: Tensor
    places: Sequence[int] | None = None

    def at(self, positions: Sequence[int]) -> Tensor:
        """[n, num_features * hidden] of n positions of the row, rising; a view where it can be."""
        if self.places is None and len(positions) == self.values.shape[0]:
            return self.values
        places = list(positions)
        if self.places is not None:
            places = [self.places[position] for position in places]
        first, num = places[0], len(places)
        if places == list(range(first, first + num)):
            return self.values[first : first + num]
        return self.values[torch.tensor(places, device=self.values.device)]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one pass over a plan computed.

    logits: [positions, V], row after row: the anchor's and those of the nodes in their order, none
    of an incomplete row; all positions of a prompt that is scored. See PlannedRow.num_logits.
    features: of every row, the layers in the order asked for; None if none are wanted. May be None
    for a row whose sequence never drafts.
    num_forwards: how often the model ran for it.
    """

    logits: Tensor
    features: list[RowFeatures | None]
    num_forwards: int = 1

    def features_of(self, index: int) -> Tensor | None:
        """[num_positions, num_features * hidden] of a row, in its order; None if it has none."""
        features = self.features[index]
        return None if features is None else features.at(range(len(features.values)))


class Target(Protocol):
    """A causal language model with a cache per sequence, addressed by the sequence's key.

    After `forward` the target holds keys and values of all positions of the plan; commit says by
    `keep` which of them stay, and the engine takes a failed step back by `truncate`. `memory` says
    what fits; the scheduler opens a sequence there and reserves its tokens before a forward.
    `takes_trees`: rows of a plan may have branches.
    """

    vocab_size: int
    max_context: int
    takes_trees: bool

    @property
    def memory(self) -> Memory:
        """Room for the K/V of sequences."""
        ...

    def forward(self, plan: ForwardPlan) -> TargetOutput:
        """Run the new tokens and candidates of every row through the model."""
        ...

    def keep(self, planned: PlannedRow, nodes: Sequence[int]) -> None:
        """Keep what the cache held before the last forward, the new tokens and a path of nodes.

        The path begins right under the anchor; the rest of the row is forgotten.
        """
        ...

    def truncate(self, key: int, length: int) -> None:
        """Keep the first `length` cached tokens of a sequence, also after a forward that failed.

        Unknown keys are fine, the sequence may never have run.
        """
        ...

    def close(self, key: int) -> None:
        """Forget a sequence."""
        ...
