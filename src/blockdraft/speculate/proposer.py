"""Asks the drafter, and keeps what goes wrong with it away from the requests."""

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from blockdraft.core.failures import FailureLog
from blockdraft.core.sequence import Batch, DraftBlock, Row, Sequence
from blockdraft.speculate.drafters.base import Drafter

logger = logging.getLogger(__name__)


class Proposer:
    """Runs a drafter; an exception in it drops proposals, is counted, and ends no request.

    What fails for a batch is done again row by row, so that only the row at fault goes without.
    `vocab_size` is the target's: no other token may reach it.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.failures = FailureLog("the drafter failed; its proposals are dropped", logger)
        self._vocab_size = vocab_size

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """See Drafter."""
        return self.drafter.layer_ids

    def prepare(self, batch: Batch) -> Batch:
        """Let the drafter write its context. Rows for which it cannot draft nothing in this step.

        See Drafter.prepare.
        """
        if self._prepares(batch):
            return batch
        return [
            row
            if not row.num_draft_tokens or self._prepares([row])
            # What could not be written waits on, and is written when it is asked for again.
            else replace(row, num_draft_tokens=0)
            for row in batch
        ]

    def _prepares(self, batch: Batch) -> bool:
        return self._succeeds(lambda: self.drafter.prepare(batch))

    def draft(self, batch: Batch) -> DraftBlock:
        """At most `row.num_draft_tokens` guesses for each row, none where the drafter fails."""
        block = self._drafted(batch)
        if block is not None:
            return block
        drafts: DraftBlock = []
        for row in batch:
            alone = self._drafted([row]) if row.num_draft_tokens else None
            drafts.append([] if alone is None else alone[0])
        return drafts

    def _drafted(self, batch: Batch) -> DraftBlock | None:
        try:
            block = self.drafter.draft(batch)
            for row, draft in zip(batch, block, strict=True):
                self._check(row, draft)
        except Exception as error:
            self.failures.note(error)
            return None
        return block

    def _check(self, row: Row, draft: list[int]) -> None:
        """A forward of other tokens would fail for all rows, or write where nothing is reserved."""
        if len(draft) > row.num_draft_tokens:
            raise ValueError(f"{len(draft)} tokens drafted, at most {row.num_draft_tokens} allowed")
        for token_id in draft:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"drafted token id {token_id} is outside the vocabulary of {self._vocab_size}"
                )

    def absorb(self, sequence: Sequence, start: int, features: Tensor) -> None:
        """See Drafter.absorb. A sequence whose features are lost is not drafted for any more."""
        if not self._succeeds(lambda: self.drafter.absorb(sequence.key, start, features)):
            sequence.has_lost_context = True
            self.close(sequence.key)

    def close(self, key: int) -> None:
        """See Drafter.close."""
        self._succeeds(lambda: self.drafter.close(key))

    def _succeeds(self, run: Callable[[], None]) -> bool:
        try:
            run()
        except Exception as error:
            self.failures.note(error)
            return False
        return True
