"""Who drafts how much, and what of it the target verifies."""

import logging
from collections.abc import Mapping, Sequence

from blockdraft.allocation.policy import Asked, Outcome, Policy
from blockdraft.core.failures import FailureLog
from blockdraft.core.plan import NOTHING, ForwardPlan, PlannedRow, Proposal
from blockdraft.core.recorder import Phase
from blockdraft.core.sequence import Batch, Row

logger = logging.getLogger(__name__)


class Allocator:
    """Asks a policy about the decoding rows of a step; its failures end no request.

    `policy` may be replaced between steps. takes_trees: whether the target verifies trees; if not,
    the policy sees the first path of each. An exception in the policy is counted, and that step
    drafts or verifies nothing.
    """

    def __init__(self, policy: Policy, *, takes_trees: bool) -> None:
        self.policy = policy
        self.failures = FailureLog("the allocation failed; nothing is drafted", logger)
        self._takes_trees = takes_trees
        self._asked = Asked()

    def ask(self, batch: Batch) -> Asked:
        """Who may propose in the step of this batch; asked first."""
        num_decoding = sum(not row.is_prompt for row in batch)
        self._asked = Asked()
        with self.failures.caught():
            self._asked = self.policy.ask(num_decoding)
        return self._asked if num_decoding else Asked()

    def limit(self, batch: Batch, free: Sequence[Proposal]) -> Batch:
        """The batch, with limits for what a model may propose for each row; see Policy.limit.

        free: what is proposed for each row already, without a model.
        """
        if not self._asked.is_watched:
            return batch
        decoding, usable = self._decoding(batch, free)
        num_prompt_tokens = sum(len(row.new_ids) for row in batch if row.is_prompt)
        limited: list[Row] | None = None
        with self.failures.caught():
            limited = self.policy.limit(decoding, num_prompt_tokens, usable)
        rest = iter([row.limited(0) for row in decoding] if limited is None else limited)
        return [row if row.is_prompt else next(rest) for row in batch]

    def plan(self, batch: Batch, proposals: Sequence[Proposal]) -> ForwardPlan:
        """The pass over a batch that verifies those candidates that are worth it."""
        if not self._asked.is_watched:
            return ForwardPlan([PlannedRow(row) for row in batch])
        decoding, usable = self._decoding(batch, proposals)
        chosen = [NOTHING] * len(decoding)
        with self.failures.caught():
            chosen = self.policy.choose(decoding, usable)
        rest = iter(chosen)
        return ForwardPlan(
            [PlannedRow(row, NOTHING if row.is_prompt else next(rest)) for row in batch]
        )

    def _decoding(
        self, batch: Batch, proposals: Sequence[Proposal]
    ) -> tuple[list[Row], list[Proposal]]:
        """The rows that decode, and what of their proposals the target can verify."""
        decoding, usable = list[Row](), list[Proposal]()
        for row, own in zip(batch, proposals, strict=True):
            if not row.is_prompt:
                decoding.append(row)
                is_usable = self._takes_trees or own.tree.is_chain
                usable.append(own if is_usable else own.first_chain())
        return decoding, usable

    def record(
        self,
        plan: ForwardPlan,
        kept_nodes: Sequence[Sequence[int]],
        seconds: Mapping[Phase, float],
    ) -> None:
        """Take the outcome of a step: the path kept in each row, and the seconds of each phase."""
        if not self._asked.is_watched:
            return
        with self.failures.caught():
            outcomes = [
                Outcome(planned.row, planned.proposal, nodes)
                for planned, nodes in zip(plan, kept_nodes, strict=True)
                if not planned.row.is_prompt
            ]
            self.policy.record(outcomes, seconds)

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""
        with self.failures.caught():
            self.policy.close(key)
