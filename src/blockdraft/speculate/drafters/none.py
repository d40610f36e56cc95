"""Plain decoding is a drafter of zero tokens."""

from torch import Tensor

from blockdraft.core.sequence import Batch, DraftBlock


class NoDrafter:
    """Drafts nothing."""

    max_draft_tokens = 0
    layer_ids: tuple[int, ...] = ()

    def draft(self, batch: Batch) -> DraftBlock:
        """An empty guess for each row."""
        return [[] for _ in batch]

    def absorb(self, key: int, features: Tensor | None) -> None:
        """Nothing to keep."""

    def close(self, key: int) -> None:
        """Nothing to forget."""
