"""Commit: the only writer. Appends what the target decided, and cuts both caches to it."""

from dataclasses import dataclass

from torch import Tensor

from blockdraft.core.request import FinishReason
from blockdraft.core.sequence import Batch, Row
from blockdraft.models.target import Target
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.verify import TokenLogprobs, Verdict


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave one sequence.

    `token_ids` ends with the bonus unless the sequence ended before it. `num_drafted` and
    `num_accepted` count drafts before any cut at a stop.
    """

    key: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_drafted: int
    num_accepted: int
    finish_reason: FinishReason | None


def commit(
    batch: Batch,
    block: list[list[int]],
    verdicts: list[Verdict],
    features: list[Tensor | None],
    target: Target,
    drafter: Drafter,
) -> list[StepOutput]:
    """Write each row's verdict: tokens, target cache, draft context."""
    return [
        _commit_row(row, draft, verdict, row_features, target, drafter)
        for row, draft, verdict, row_features in zip(batch, block, verdicts, features, strict=True)
    ]


def _commit_row(
    row: Row,
    draft: list[int],
    verdict: Verdict,
    features: Tensor | None,
    target: Target,
    drafter: Drafter,
) -> StepOutput:
    sequence = row.sequence
    num_kept = 0
    for token_id in verdict.token_ids:
        sequence.append(token_id)
        num_kept += 1
        if sequence.finish_reason:
            break
    output = StepOutput(
        key=sequence.key,
        token_ids=verdict.token_ids[:num_kept],
        logprobs=verdict.logprobs[:num_kept],
        num_drafted=len(draft),
        num_accepted=verdict.num_accepted,
        finish_reason=sequence.finish_reason,
    )
    # The last token of a complete row is the next anchor, and stays out of both caches.
    num_cached = sequence.num_cached + len(row.new_ids) + max(0, num_kept - 1)
    if sequence.finish_reason is None:
        target.truncate(sequence.key, num_cached)
        # A sequence that may never draft needs no draft context: plain decoding stays free of it.
        if drafter.layer_ids and sequence.params.max_draft_tokens != 0:
            num_new = num_cached - sequence.num_cached
            drafter.absorb(sequence.key, None if features is None else features[:num_new])
    else:
        target.close(sequence.key)
        drafter.close(sequence.key)
    sequence.num_cached = num_cached
    sequence.check()
    return output
