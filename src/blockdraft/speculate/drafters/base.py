"""What the engine needs of a drafter."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample

Watch = Callable[[list[Row], Tensor], None]
"""Is shown the rows that draft and the logits [rows, slots, V] behind their guesses; tokens that
the drafter cannot guess have -inf. A row may use fewer slots than there are."""

DraftCost = Literal["none", "block", "level"]
"""Forwards of the drafter's model for a proposal: none, one ("block"), or one for each depth."""


class Drafter(Protocol):
    """Proposes the tokens that the target will choose; whatever it proposes, output is the same.

    kind: its name in the table of kinds. feature_layers: of the target, whose outputs it wants; ()
    if none. max_nodes: of its longest path. cost: how often it runs a model for a proposal.
    """

    kind: str
    cost: DraftCost
    feature_layers: tuple[int, ...]
    max_nodes: int

    def open(self, row: Row, num_reused: int) -> None:
        """A sequence begins, or begins again, behind `num_reused` tokens of the prefix cache.

        Their features were committed by an earlier sequence.
        """
        ...

    def lag(self, row: Row) -> int | None:
        """Cached tokens that a proposal for this row would have to catch up with first.

        None: there can be no proposal for it now.
        """
        ...

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """At most `row.num_draft_tokens` nodes for each row, which is more than 0 in all of them.

        No path may be longer than `row.max_depth`.

        Called in every step, without rows where nothing is drafted: what must not wait any longer
        is caught up with then.
        """
        ...

    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """Take the tokens that entered the target's cache: the row's new ones and the kept nodes.

        The first stands at position `row.sequence.num_cached`. The new anchor is not among them.
        features: [tokens, num_features * hidden]; None for a drafter that wants none, and for a
        sequence that never drafts.
        """
        ...

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine."""
        ...


class FreeDrafter(Drafter, Protocol):
    """A drafter that runs no model, so that it proposes before the drafter that does.

    It is not asked in steps in which no row may draft.
    """

    def serves(self, sample: Sample) -> bool:
        """False if there can be no proposal for a sequence, and no room is needed for one."""
        ...


class ModelFree:
    """What drafters that run no model have in common: they read the sequence itself.

    A subclass adds `_propose`, for one row.
    """

    cost: DraftCost = "none"
    feature_layers: tuple[int, ...] = ()

    def serves(self, sample: Sample) -> bool:
        """See FreeDrafter.serves: everyone."""
        return True

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open. Nothing is prepared."""

    def lag(self, row: Row) -> int:
        """See Drafter.lag: nothing that would take a forward."""
        return 0

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """See Drafter.propose: row by row."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: Row) -> Proposal:
        return NOTHING

    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """See Drafter.committed. Nothing is kept."""

    def close(self, key: int) -> None:
        """See Drafter.close. Nothing is kept."""


@runtime_checkable
class Watchable(Protocol):
    """A drafter that shows what it thought of each token, to those who ask."""

    watch: Watch | None
