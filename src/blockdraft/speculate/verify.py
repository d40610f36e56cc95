"""Verification: what the target decided about a block. Pure."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.sequence import Batch, DraftBlock, Row, Sequence
from blockdraft.speculate.choice import NO_CHOICE, argmax_ids, choices, token_logprobs

logger = logging.getLogger(__name__)


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

    Whatever goes wrong for one row alone is the error of its verdict.

    logits: [positions, V], as in TargetOutput.
    """
    split = _split(block, logits, batch)
    rows = rows_of(block, logits, batch)
    greedy = _greedy_choices([r for r, row in zip(rows, batch, strict=True) if _is_greedy(row)])
    verdicts = [
        _verify_row(
            row.sequence,
            draft,
            own,
            next(greedy) if _is_greedy(row) else choices(own, row.sequence, draft),
        )
        for row, draft, own in zip(batch, block, rows, strict=True)
    ]
    return [
        _with_scores(verdict, row, own) if row.sequence.is_scoring else verdict
        for verdict, row, own in zip(verdicts, batch, split, strict=True)
    ]


def _with_scores(verdict: Verdict, row: Row, logits: Tensor) -> Verdict:
    try:
        return replace(verdict, prompt_logprobs=_score(row, logits))
    except Exception as error:
        logger.exception("a prompt could not be scored; its request ends with an error")
        return Verdict([], 0, [], f"its prompt's log-probabilities could not be found: {error!r}")


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


def _is_greedy(row: Row) -> bool:
    return row.sequence.params.is_greedy_argmax


def _greedy_choices(rows: list[Tensor]) -> Iterator[Iterable[int]]:
    """The choices of each of these rows [positions, V], found together: one wait for the device."""
    if rows:
        found = argmax_ids(torch.cat(rows) if len(rows) > 1 else rows[0])
        for own in rows:
            yield found[: own.shape[0]]
            del found[: own.shape[0]]


def _verify_row(
    sequence: Sequence, draft: list[int], logits: Tensor, found: Iterable[int]
) -> Verdict:
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    num_top = sequence.params.logprobs
    error = None
    try:
        for index, choice in enumerate(found):
            if choice == NO_CHOICE:
                error = _why_no_choice(logits[index], len(sequence.token_ids) + index)
                break
            if num_top is not None:
                logprobs.append(TokenLogprobs(*token_logprobs(logits[index], choice, num_top)))
            token_ids.append(choice)
            if index == len(draft) or choice != draft[index]:
                break
    except RequestError as refused:
        # Of the grammar: it ends this sequence, and not the step that others share.
        error = str(refused)
    except Exception as failed:
        logger.exception("a token could not be chosen; its request ends with an error")
        position = len(sequence.token_ids) + len(token_ids)
        error = f"the token at position {position} could not be chosen: {failed!r}"
    num_accepted = len(token_ids) if error else max(0, len(token_ids) - 1)
    return Verdict(token_ids, num_accepted, logprobs, error)


def _why_no_choice(logits: Tensor, position: int) -> str:
    """logits: [V], of which none could be chosen."""
    if bool(logits.isnan().any()):
        what = "not numbers"
    elif bool((logits == -torch.inf).all()):
        what = "all minus infinity"
    else:
        what = "infinite, and cannot be sampled from"
    return f"the target's logits for the token at position {position} are {what}"
