"""Plain decoding is a drafter of zero tokens."""

from torch import Tensor

from blockdraft.core.sequence import Batch, DraftBlock


class NoDrafter:
    """Drafts nothing."""

    max_draft_tokens = 0
    layer_ids: tuple[int, ...] = ()

    def prepare(self, batch: Batch) -> None:
        """Nothing waits."""

    def draft(self, batch: Batch) -> DraftBlock:
        """An empty guess for each row."""
        return [[] for _ in batch]

    def absorb(self, key: int, start: int, features: Tensor) -> None:
        """Nothing to keep."""

    def close(self, key: int) -> None:
        """Nothing to forget."""
