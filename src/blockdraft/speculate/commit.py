"""Commit: the only writer. Appends what the target decided, and cuts both caches to it."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from blockdraft.core.plan import NOTHING, ForwardPlan, PlannedRow, Proposal
from blockdraft.core.request import FinishReason
from blockdraft.core.sequence import Sequence
from blockdraft.models.target.interface import RowFeatures, Target, TargetOutput
from blockdraft.speculate.proposer import Proposer
from blockdraft.speculate.verify import TokenLogprobs, Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave one sequence: the target's verdict, and how much of it was committed.

    num_kept: of the verdict's tokens; fewer than all where the sequence ended before the bonus.
    proposal: the candidates that were verified; nothing where the row could not be committed.
    What the target agreed with behind a stop is in the verdict, and counts as not kept.
    """

    key: int
    verdict: Verdict = field(default_factory=Verdict)
    num_kept: int = 0
    proposal: Proposal = NOTHING
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        """Committed tokens."""
        return self.verdict.token_ids[: self.num_kept]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of the committed tokens, if they were asked for."""
        return self.verdict.logprobs[: self.num_kept]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of the next prompt tokens, if they were asked for."""
        return self.verdict.prompt_logprobs

    @property
    def num_drafted(self) -> int:
        """Candidates that were verified."""
        return len(self.proposal)

    @property
    def kept_nodes(self) -> list[int]:
        """The path of the proposal whose tokens were committed."""
        return self.verdict.nodes[: self.num_kept] if self.proposal else []

    @property
    def num_siblings_kept(self) -> int:
        """Kept nodes that were not the first child of their parent."""
        ranks = self.proposal.tree.ranks
        return sum(ranks[node] > 0 for node in self.kept_nodes)

    @property
    def sources(self) -> tuple[str, ...]:
        """Who proposed each candidate that was verified."""
        return self.proposal.sources

    @property
    def kept_sources(self) -> list[str]:
        """Of them those whose tokens were committed."""
        return [self.proposal.sources[node] for node in self.kept_nodes]

    @property
    def num_accepted(self) -> int:
        """The committed tokens that were drafted: all, or all but the bonus."""
        return len(self.kept_nodes)


def commit(
    plan: ForwardPlan,
    verdicts: list[Verdict],
    output: TargetOutput,
    target: Target,
    proposer: Proposer,
) -> Iterator[StepOutput]:
    """Write each row's verdict: tokens, target cache, draft context. A row is written when taken.

    A row that fails is half written; it ends with an error, and no other row does. An interrupt
    ends the row at hand in the same way, and is raised again behind that row's output.
    """
    for planned, verdict, features in zip(plan, verdicts, output.features, strict=True):
        num_before = len(planned.row.sequence.token_ids)
        try:
            result = _commit_row(planned, verdict, features, target, proposer)
        except Exception as error:
            logger.exception("a row could not be committed; its request ends with an error")
            result = _end_failed(planned, num_before, verdict, error, target, proposer)
        except BaseException as error:
            yield _end_failed(planned, num_before, verdict, error, target, proposer)
            raise
        yield result


def _end_failed(
    planned: PlannedRow,
    num_before: int,
    verdict: Verdict,
    error: BaseException,
    target: Target,
    proposer: Proposer,
) -> StepOutput:
    sequence = planned.row.sequence
    if sequence.finish_reason is None:
        sequence.fail(f"its tokens could not be committed: {error!r}")
    try:
        target.close(sequence.key)
    except Exception:
        logger.exception("the memory of a failed row could not be freed")
    proposer.close(sequence)
    num_kept = len(sequence.token_ids) - num_before
    return StepOutput(sequence.key, verdict, num_kept, finish_reason=sequence.finish_reason)


def _commit_row(
    planned: PlannedRow,
    verdict: Verdict,
    features: RowFeatures | None,
    target: Target,
    proposer: Proposer,
) -> StepOutput:
    sequence = planned.row.sequence
    num_kept = _append(sequence, verdict)
    # The last token of a complete row is the next anchor, and stays out of both caches.
    nodes = verdict.nodes[: max(0, num_kept - 1)]
    sequence.num_scored += len(verdict.prompt_logprobs)
    target.keep(planned, nodes)
    if sequence.finish_reason != "error":
        # Also where the sequence has ended: other requests may reuse what is published.
        _tell_proposer(planned, nodes, features, proposer)
    num_cached = sequence.num_cached + len(planned.row.new_ids) + len(nodes)
    sequence.num_cached = min(num_cached, len(sequence.token_ids) - 1)
    if num_kept and verdict.error is None and not sequence.has_lost_context:
        # Only once a token was chosen: keys of a prompt that are not numbers give no choice, and no
        # other request must take them over. Nor pages without the draft context that belongs there.
        target.memory.publish(sequence.key, sequence.token_ids, sequence.num_cached)
    if sequence.finish_reason is not None:
        target.close(sequence.key)
        proposer.close(sequence)
    sequence.check()
    return StepOutput(sequence.key, verdict, num_kept, planned.proposal, sequence.finish_reason)


def _append(sequence: Sequence, verdict: Verdict) -> int:
    """Append the verdict's tokens up to one that ends the sequence; returns how many."""
    num_kept = 0
    for token_id in verdict.token_ids:
        sequence.append(token_id)
        num_kept += 1
        if sequence.finish_reason:
            break
    if verdict.error is not None and sequence.finish_reason is None:
        sequence.fail(verdict.error)
    return num_kept


def _tell_proposer(
    planned: PlannedRow, nodes: list[int], features: RowFeatures | None, proposer: Proposer
) -> None:
    """The tokens that stay in the target's cache, with their features where they may be needed."""
    row = planned.row
    token_ids = [*row.new_ids, *(planned.tree.tokens[node] for node in nodes)]
    # A sequence that may never draft needs no draft context: plain decoding stays free of it.
    has_context = bool(proposer.drafter.feature_layers) and row.sequence.may_draft
    take = None
    if has_context and features is not None:
        take = partial(features.at, planned.kept_positions(nodes))
    proposer.committed(row, token_ids, take)
