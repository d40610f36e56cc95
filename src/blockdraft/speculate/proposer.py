"""Asks the drafter, and keeps what goes wrong with it away from the requests."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items

from torch import Tensor

from blockdraft.core.failures import FailureLog
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.sequence import Batch, Row, Sequence
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

    def propose(self, batch: Batch) -> list[Proposal]:
        """What to verify of each row; nothing where none may be drafted, or the drafter fails."""
        for row in batch:
            self._open_once(row)
        drafting = [row for row in batch if row.num_draft_tokens and row.sequence.may_draft]
        found = self._proposed(drafting)
        if found is None:
            alone = [self._proposed([row]) for row in drafting]
            found = [NOTHING if own is None else own[0] for own in alone]
        proposals = dict(zip((row.sequence.key for row in drafting), found, strict=True))
        return [proposals.get(row.sequence.key, NOTHING) for row in batch]

    def _open_once(self, row: Row) -> None:
        sequence = row.sequence
        if not sequence.is_open_to_drafter:
            has_opened = self._succeeds(lambda: self.drafter.open(row, sequence.num_cached))
            sequence.is_open_to_drafter = True  # not before: an interrupted step is made again
            if not has_opened:
                self._lose_context(row)

    def _proposed(self, rows: Items[Row]) -> list[Proposal] | None:
        try:
            proposals = self.drafter.propose(rows)
            for row, proposal in zip(rows, proposals, strict=True):
                self._check(row, proposal)
        except Exception as error:
            self.failures.note(error)
            return None
        return proposals

    def _check(self, row: Row, proposal: Proposal) -> None:
        """A forward of other tokens would fail for all rows, or write where nothing is reserved."""
        if len(proposal) > row.num_draft_tokens:
            raise ValueError(
                f"{len(proposal)} tokens drafted, at most {row.num_draft_tokens} allowed"
            )
        depth = max(proposal.tree.depths, default=0)
        if depth > row.max_depth:
            raise ValueError(f"a path of {depth} tokens drafted, at most {row.max_depth} allowed")
        for token_id in proposal.tree.tokens:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"drafted token id {token_id} is outside the vocabulary of {self._vocab_size}"
                )

    def committed(self, row: Row, token_ids: Items[int], features: Tensor | None) -> None:
        """See Drafter.committed. A sequence whose features are lost is not drafted for any more."""
        if not self._succeeds(lambda: self.drafter.committed(row, token_ids, features)):
            self._lose_context(row)

    def _lose_context(self, row: Row) -> None:
        row.sequence.has_lost_context = True
        self._succeeds(lambda: self.drafter.close(row.sequence.key))

    def close(self, sequence: Sequence) -> None:
        """See Drafter.close; the drafter may be told of the sequence again."""
        sequence.is_open_to_drafter = False
        self._succeeds(lambda: self.drafter.close(sequence.key))

    def _succeeds(self, run: Callable[[], None]) -> bool:
        try:
            run()
        except Exception as error:
            self.failures.note(error)
            return False
        return True
