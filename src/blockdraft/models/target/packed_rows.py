"""The rows of one forward over pages."""

from dataclasses import dataclass, field

from blockdraft.kernels.interface import Span


@dataclass(slots=True)
class PackedRows:
    """The rows of one forward: where they stand, where their K/V go, whose logits are wanted."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    """For each span its row of the ForwardPlan."""
    keys: list[int] = field(default_factory=list)
    """For each span its sequence."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def num_by_owner(self) -> dict[int, int]:
        """Rows of each owner, which follow each other."""
        found: dict[int, int] = {}
        for owner, span in zip(self.owners, self.spans, strict=True):
            found[owner] = found.get(owner, 0) + span.num_rows
        return found
