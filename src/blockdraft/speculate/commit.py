"""Commit: the only writer. Appends what the target decided, and cuts both caches to it."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from blockdraft.core.request import FinishReason
from blockdraft.core.sequence import Batch, Row, Sequence
from blockdraft.models.target import Target
from blockdraft.speculate.proposer import Proposer
from blockdraft.speculate.verify import TokenLogprobs, Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave one sequence.

    `token_ids` ends with the bonus unless the sequence ended before it. `num_drafted` and
    `num_accepted` count drafts before any cut at a stop. `prompt_logprobs` are those of the next
    prompt tokens, if they were asked for.
    """

    key: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_drafted: int
    num_accepted: int
    finish_reason: FinishReason | None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def commit(
    batch: Batch,
    block: list[list[int]],
    verdicts: list[Verdict],
    features: list[Tensor | None],
    target: Target,
    proposer: Proposer,
) -> Iterator[StepOutput]:
    """Write each row's verdict when its output is taken: tokens, target cache, draft context.

    A row that fails is half written and ends with an error, and no other row does. An interrupt
    ends the row that it meets too, whose output comes before it is raised again.
    """
    for row, draft, verdict, row_features in zip(batch, block, verdicts, features, strict=True):
        num_before = len(row.sequence.token_ids)
        try:
            output = _commit_row(row, draft, verdict, row_features, target, proposer)
        except Exception as error:
            logger.exception("a row could not be committed; its request ends with an error")
            output = _end_failed(row.sequence, num_before, verdict, error, target, proposer)
        except BaseException as error:
            yield _end_failed(row.sequence, num_before, verdict, error, target, proposer)
            raise
        yield output


def _end_failed(
    sequence: Sequence,
    num_before: int,
    verdict: Verdict,
    error: BaseException,
    target: Target,
    proposer: Proposer,
) -> StepOutput:
    if sequence.finish_reason is None:
        sequence.fail(f"its tokens could not be committed: {error!r}")
    try:
        target.close(sequence.key)
    except Exception:
        logger.exception("the memory of a row that failed could not be given back")
    proposer.close(sequence.key)
    token_ids = sequence.token_ids[num_before:]
    return StepOutput(
        key=sequence.key,
        token_ids=token_ids,
        logprobs=verdict.logprobs[: len(token_ids)],
        num_drafted=0,
        num_accepted=0,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        prompt_logprobs=verdict.prompt_logprobs,
    )


def _commit_row(
    row: Row,
    draft: list[int],
    verdict: Verdict,
    features: Tensor | None,
    target: Target,
    proposer: Proposer,
) -> StepOutput:
    sequence = row.sequence
    num_kept = 0
    for token_id in verdict.token_ids:
        sequence.append(token_id)
        num_kept += 1
        if sequence.finish_reason:
            break
    if verdict.error is not None and sequence.finish_reason is None:
        sequence.fail(verdict.error)
    output = StepOutput(
        key=sequence.key,
        token_ids=verdict.token_ids[:num_kept],
        logprobs=verdict.logprobs[:num_kept],
        num_drafted=len(draft),
        num_accepted=verdict.num_accepted,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        prompt_logprobs=verdict.prompt_logprobs,
    )
    sequence.num_scored += len(verdict.prompt_logprobs)
    # The last token of a complete row is the next anchor, and stays out of both caches.
    num_cached = sequence.num_cached + len(row.new_ids) + max(0, num_kept - 1)
    if sequence.finish_reason is None:
        target.truncate(sequence.key, num_cached)
    if sequence.finish_reason != "error" and _has_context(sequence, proposer):
        # The last ones too: others may reuse what is published.
        assert features is not None
        num_new = num_cached - sequence.num_cached
        if num_new < features.shape[0]:
            features = features[:num_new]
        proposer.absorb(sequence, sequence.num_cached, features)
    sequence.num_cached = min(num_cached, len(sequence.token_ids) - 1)
    if num_kept and verdict.error is None and not sequence.has_lost_context:
        # Not before there is a choice: keys of a prompt may be no numbers, which none would follow.
        # And whoever takes a page over expects the draft context in it.
        target.memory.publish(sequence.key, sequence.token_ids, sequence.num_cached)
    if sequence.finish_reason is not None:
        target.close(sequence.key)
        proposer.close(sequence.key)
    sequence.check()
    return output


def _has_context(sequence: Sequence, proposer: Proposer) -> bool:
    """A sequence that may never draft needs no draft context: plain decoding stays free of it."""
    return bool(proposer.layer_ids) and sequence.may_draft
