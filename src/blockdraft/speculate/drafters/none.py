"""Plain decoding is a drafter that proposes nothing."""

from collections.abc import Sequence

from torch import Tensor

from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.sequence import Row


class NoDrafter:
    """Proposes nothing."""

    kind = "none"
    feature_layers: tuple[int, ...] = ()
    max_nodes = 0

    def open(self, row: Row, num_reused: int) -> None:
        """Nothing to prepare."""

    def lag(self, row: Row) -> int:
        """Nothing to catch up with."""
        return 0

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """An empty proposal for each row."""
        return [NOTHING for _ in rows]

    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """Nothing to keep."""

    def close(self, key: int) -> None:
        """Nothing to forget."""
