"""What a drafter that reads features has still to project."""

import torch

from blockdraft.models.draft.context import ContextSpan
from blockdraft.models.draft.waiting_features import Waiting, WaitingFeatures
from blockdraft.speculate.drafters.lazy_context import LazyContext
from tests.allocation_sim import make_row

NUM_REUSED = 40


class Contexts:
    """Of one sequence, in holders of ten tokens."""

    together = True

    def __init__(self) -> None:
        self.waiting = WaitingFeatures(1000)

    def reused(self, key: int, num_tokens: int) -> None:
        """Nobody asks."""

    def may_draft(self, key: int, length: int) -> bool:
        return True

    def needed(self, span: ContextSpan) -> list[Waiting]:
        return self.waiting.of(range(span.start // 10, -(-span.end // 10)))


class Drafter(LazyContext):
    fresh_context = _draft_rows = _project = None

    def __init__(self) -> None:
        super().__init__()
        self.contexts = Contexts()


def test_only_what_waits_has_to_be_projected():
    drafter, row = Drafter(), make_row(0, 5, num_cached=NUM_REUSED)
    drafter.open(row, NUM_REUSED)
    assert drafter.lag(row) == 0  # whoever computed what is reused has drafted from it
    drafter.contexts.waiting.keep(3, 30, torch.zeros(10, 2))
    assert drafter.lag(row) == 10
    drafter.contexts.waiting.keep(4, 40, torch.zeros(2, 2))
    drafter._extend(row, 2)
    assert drafter.lag(row) == 12
