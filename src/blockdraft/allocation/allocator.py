"""Who drafts how much, and what of it the target verifies."""

import logging
from collections.abc import Mapping, Sequence

from blockdraft.allocation.controller import Candidate, Controller
from blockdraft.core.failures import FailureLog
from blockdraft.core.plan import ForwardPlan, PlannedRow, Proposal
from blockdraft.core.recorder import Phase
from blockdraft.core.sequence import Batch
from blockdraft.speculate.merge import kinds_of

logger = logging.getLogger(__name__)

_FORWARD: tuple[Phase, ...] = ("forward", "capture", "choose", "commit")
_DRAFT: tuple[Phase, ...] = ("draft", "draft_head", "guess")


class Allocator:
    """Sets limits before anything is drafted, and plans a pass with everything that was proposed.

    The controller limits what drafters with a model propose, and is told of their steps alone.

    `takes_trees`: of the target; where it does not, the first path of a tree is verified. An
    exception in the controller is counted, and nothing is drafted in that step.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        takes_trees: bool,
        free_kinds: frozenset[str] = frozenset(),
    ) -> None:
        self.controller = controller
        self.failures = FailureLog("the controller failed; nothing is drafted", logger)
        self._takes_trees = takes_trees
        self._free_kinds = free_kinds

    def limit(self, batch: Batch) -> Batch:
        """The batch, whose rows have room for drafts, with as many as each of them is worth."""
        decoding = [row for row in batch if not row.is_prompt]
        candidates = [
            Candidate(row.sequence.key, row.for_model().num_draft_tokens) for row in decoding
        ]
        num_prompt_rows = sum(len(row.new_ids) for row in batch if row.is_prompt)
        found = [0] * len(candidates)
        with self.failures.caught():
            found = self.controller.limits(candidates, num_prompt_rows)
        limits = iter(found)
        return [row if row.is_prompt else row.limited(next(limits)) for row in batch]

    def plan(self, batch: Batch, proposals: Sequence[Proposal]) -> ForwardPlan:
        """The pass over a batch that verifies all that was proposed."""
        rows = []
        for row, proposal in zip(batch, proposals, strict=True):
            if not (self._takes_trees or proposal.tree.is_chain):
                proposal = proposal.first_chain()
            rows.append(PlannedRow(row, proposal))
        return ForwardPlan(rows)

    def record(
        self, plan: ForwardPlan, num_accepted: Sequence[int], seconds: Mapping[Phase, float]
    ) -> None:
        """Take the outcome of a step: the depth kept in each row, and where its time went."""
        with self.failures.caught():
            if any(self._free_kinds & kinds_of(planned.proposal) for planned in plan):
                return
            for planned, accepted in zip(plan, num_accepted, strict=True):
                if not planned.row.is_prompt:
                    key = planned.row.sequence.key
                    self.controller.record(key, len(planned.tree), accepted)
            self.controller.record_times(
                limits=seconds.get("controller", 0.0),
                project=seconds.get("project", 0.0),
                draft=sum(seconds.get(phase, 0.0) for phase in _DRAFT),
                forward=sum(seconds.get(phase, 0.0) for phase in _FORWARD),
            )

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""
        with self.failures.caught():
            self.controller.close(key)
