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
