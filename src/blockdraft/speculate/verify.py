"""Verification: what the target decided about a block. Pure."""

from dataclasses import dataclass

from torch import Tensor

from blockdraft.core.sequence import Batch, DraftBlock, Sequence
from blockdraft.speculate.choice import choices, token_logprobs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token in the raw distribution, and of the most likely ones."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's own next tokens of one row: the kept drafts, then the bonus.

    Empty for a row that does not reach its sequence's end. `num_accepted` leaves the bonus out.
    """

    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs]


def verify(block: DraftBlock, logits: list[Tensor], batch: Batch) -> list[Verdict]:
    """Choose at every position until a choice differs from the draft.

    logits: [1 + num_drafted, V] a row, [0, V] for an incomplete row.
    """
    return [
        _verify_row(draft, rows, row.sequence)
        for draft, rows, row in zip(block, logits, batch, strict=True)
    ]


def _verify_row(draft: list[int], logits: Tensor, sequence: Sequence) -> Verdict:
    token_ids: list[int] = []
    if logits.shape[0]:
        for index, choice in enumerate(choices(logits, sequence, draft)):
            token_ids.append(choice)
            if index == len(draft) or choice != draft[index]:
                break
    num_top = sequence.params.logprobs
    logprobs = []
    if num_top is not None:
        for index, token_id in enumerate(token_ids):
            logprobs.append(TokenLogprobs(*token_logprobs(logits[index], token_id, num_top)))
    return Verdict(token_ids, max(0, len(token_ids) - 1), logprobs)
