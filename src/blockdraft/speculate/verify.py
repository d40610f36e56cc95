"""Verification: what the target decided about the candidates of a pass. Pure."""

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blockdraft.core.errors import Refusal, RequestError
from blockdraft.core.plan import ROOT, ForwardPlan, PlannedRow
from blockdraft.speculate.sampler.choose import Chooser, Walk, choose
from blockdraft.speculate.sampler.logprobs import token_logprobs
from blockdraft.speculate.sampler.reference import NO_CHOICE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token in the raw distribution, and of the most likely ones."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's own next tokens of one row: those of the kept nodes, then the bonus.

    nodes: the path from the anchor whose tokens the target chose. Without tokens for a row that
    does not reach its sequence's end. error: why there is no choice where there should be one; the
    bonus is missing then. prompt_logprobs: of the next prompt tokens that had none.
    """

    token_ids: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_accepted(self) -> int:
        """The depth that was kept, without the bonus."""
        return len(self.nodes)


def verify(plan: ForwardPlan, logits: Tensor) -> list[Verdict]:
    """Walk down each row's tree: the choice at a node, then the child that equals it.

    The first choice without a child is the bonus. Whatever goes wrong for one row alone is the
    error of its verdict.

    logits: [positions, V], as in TargetOutput.
    """
    split = _split(plan, logits)
    walks = [
        Walk.tree(_choice_rows(planned, own), planned.row.sequence, planned.tree)
        for planned, own in zip(plan, split, strict=True)
    ]
    verdicts = [
        _walk_down(planned, walk.logits, chooser)
        for planned, walk, chooser in zip(plan, walks, choose(walks), strict=True)
    ]
    return [
        _with_scores(verdict, planned, own) if planned.row.sequence.is_scoring else verdict
        for verdict, planned, own in zip(verdicts, plan, split, strict=True)
    ]


def rows_of(plan: ForwardPlan, logits: Tensor) -> list[Tensor]:
    """A forward's packed logits by rows: [1 + nodes, V], or [0, V] where nothing is chosen."""
    split = _split(plan, logits)
    return [_choice_rows(planned, own) for planned, own in zip(plan, split, strict=True)]


def _split(plan: ForwardPlan, logits: Tensor) -> tuple[Tensor, ...]:
    """By rows: all logits of each, those of a scored prompt included."""
    return torch.split(logits, [planned.num_logits for planned in plan])


def _choice_rows(planned: PlannedRow, logits: Tensor) -> Tensor:
    """Of a row's logits those at which a token is chosen."""
    if not planned.row.sequence.is_scoring:
        return logits
    return logits[logits.shape[0] - planned.num_choices :]


def _walk_down(planned: PlannedRow, logits: Tensor, choice_at: Chooser) -> Verdict:
    """logits: [1 + nodes, V] of one row."""
    if not logits.shape[0]:
        return Verdict()
    sequence, tree = planned.row.sequence, planned.tree
    verdict, node, num_top = Verdict(), ROOT, sequence.params.logprobs
    position = len(sequence.token_ids)
    try:
        while True:
            choice = choice_at(1 + node)
            if choice == NO_CHOICE:
                return replace(verdict, error=_why_no_choice(logits[1 + node], position))
            if num_top is not None:
                told = token_logprobs(logits[1 + node], choice, num_top)
                verdict.logprobs.append(TokenLogprobs(*told))
            verdict.token_ids.append(choice)
            child = tree.child(node, choice)
            if child is None:
                return verdict
            verdict.nodes.append(child)
            node, position = child, position + 1
    except RequestError as refused:
        # The grammar allows nothing here: this sequence ends, and no other does.
        return replace(verdict, error=Refusal(refused))
    except Exception as failed:
        logger.exception("a token could not be chosen; its request ends with an error")
        error = f"the token at position {position} could not be chosen: {failed!r}"
        return replace(verdict, error=error)


def _why_no_choice(logits: Tensor, position: int) -> str:
    """logits: [V], of which none could be chosen."""
    what = "not numbers" if bool(logits.isnan().any()) else "all minus infinity"
    return f"the target's logits for the token at position {position} are {what}"


def _with_scores(verdict: Verdict, planned: PlannedRow, logits: Tensor) -> Verdict:
    try:
        return replace(verdict, prompt_logprobs=_score(planned, logits))
    except Exception as error:
        logger.exception("a prompt could not be scored; its request ends with an error")
        return Verdict(error=f"its prompt's log-probabilities could not be found: {error!r}")


def _score(planned: PlannedRow, logits: Tensor) -> list[TokenLogprobs]:
    """Of the prompt tokens behind each position of the row; logits: [new tokens, V].

    What a preempted sequence computes again is not told again.
    """
    sequence = planned.row.sequence
    num_top = sequence.params.logprobs
    assert num_top is not None
    first = sequence.num_cached + 1
    end = min(first + logits.shape[0], sequence.num_prompt)
    return [
        TokenLogprobs(*token_logprobs(logits[i - first], sequence.token_ids[i], num_top))
        for i in range(max(first, sequence.num_scored + 1), end)
    ]
