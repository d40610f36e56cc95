"""Verification: what the target decided about a block. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.sequence import Batch, DraftBlock, Row, Sequence
from blockdraft.speculate.sampler.choose import Walk, choose
from blockdraft.speculate.sampler.logprobs import token_logprobs
from blockdraft.speculate.sampler.reference import NO_CHOICE


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token in the raw distribution, and of the most likely ones."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's own next tokens of one row: the kept drafts, then the bonus.

    Empty for a row that does not reach its sequence's end. `num_accepted` leaves the bonus out.
    `error` says why there is no choice where there should be one. `prompt_logprobs` are those of
    the next prompt tokens that had none.
    """

    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs]
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def verify(block: DraftBlock, logits: Tensor, batch: Batch) -> list[Verdict]:
    """Choose at every position until a choice differs from the draft.

    logits: [positions, V], as in TargetOutput.
    """
    split = _split(block, logits, batch)
    rows = rows_of(block, logits, batch)
    walks = [
        Walk(own, row.sequence, draft) for own, row, draft in zip(rows, batch, block, strict=True)
    ]
    verdicts = [
        _verify_row(walk.sequence, walk.ahead, walk.logits, found)
        for walk, found in zip(walks, choose(walks), strict=True)
    ]
    return [
        replace(verdict, prompt_logprobs=_score(row, own)) if row.sequence.is_scoring else verdict
        for verdict, row, own in zip(verdicts, batch, split, strict=True)
    ]


def _score(row: Row, logits: Tensor) -> list[TokenLogprobs]:
    """Of the prompt tokens behind each position of the row; logits: [new tokens, V].

    What a preempted sequence computes again is not told again.
    """
    sequence, num_top = row.sequence, row.sequence.params.logprobs
    assert num_top is not None
    first = sequence.num_cached + 1
    end = min(first + logits.shape[0], sequence.num_prompt)
    return [
        TokenLogprobs(*token_logprobs(logits[i - first], sequence.token_ids[i], num_top))
        for i in range(max(first, sequence.num_scored + 1), end)
    ]


def rows_of(block: DraftBlock, logits: Tensor, batch: Batch) -> list[Tensor]:
    """A forward's packed logits by rows: [1 + drafted, V], or [0, V] where nothing is chosen."""
    return [
        own[own.shape[0] - row.num_choices(len(draft)) :]
        for own, row, draft in zip(_split(block, logits, batch), batch, block, strict=True)
    ]


def _split(block: DraftBlock, logits: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """By rows: all logits of each, those of a scored prompt included."""
    counts = [row.num_logits(len(draft)) for row, draft in zip(batch, block, strict=True)]
    return torch.split(logits, counts)


def _verify_row(
    sequence: Sequence, draft: list[int], logits: Tensor, found: Iterable[int]
) -> Verdict:
    token_ids: list[int] = []
    error = None
    try:
        for index, choice in enumerate(found):
            if choice == NO_CHOICE:
                position = len(sequence.token_ids) + index
                error = (
                    f"the target's logits for the token at position {position} are not numbers, "
                    "or all -inf"
                )
                break
            token_ids.append(choice)
            if index == len(draft) or choice != draft[index]:
                break
    except RequestError as refused:
        # Of the grammar: it ends this sequence, and not the step that others share.
        error = str(refused)
    num_top = sequence.params.logprobs
    logprobs = []
    if num_top is not None:
        for index, token_id in enumerate(token_ids):
            logprobs.append(TokenLogprobs(*token_logprobs(logits[index], token_id, num_top)))
    num_accepted = len(token_ids) if error else max(0, len(token_ids) - 1)
    return Verdict(token_ids, num_accepted, logprobs, error)
