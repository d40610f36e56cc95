"""What one round of drafting, verifying and committing did. Plain values, no tensors."""

from dataclasses import dataclass
from typing import Literal, get_args

Cause = Literal[
    "stop", "vocabulary", "penalty", "noise", "target_uncertain", "drafter_wrong", "other"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Every rejection has exactly one; `find_cause` of cause.py says when each holds."""

CAUSE_LABELS: dict[Cause, str] = {
    "stop": "the answer ended",
    "vocabulary": "not in the drafter's vocabulary",
    "penalty": "penalty, bias, grammar or minimum length",
    "noise": "sampling noise",
    "target_uncertain": "target uncertain",
    "drafter_wrong": "drafter wrong, target sure",
    "other": "other",
}

Likely = tuple[int, float]
"""A token id and its probability."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the two models thought of the slot where the draft was rejected.

    Probabilities are those of the logits after penalties, biases and minimum length, at temperature
    1 and unfiltered: what the models believe, which the temperature of a request does not change.
    Entropies are in bits. A drafter that shows no logits, or some that are not numbers, leaves its
    fields None or empty. Rank 1 is
    the drafter's most likely token; a token that it cannot guess has probability 0 and no rank.
    """

    wanted_id: int
    target_probability: float
    target_entropy: float
    target_top: tuple[Likely, ...]
    drafter_probability: float | None = None
    drafter_rank: int | None = None
    drafter_entropy: float | None = None
    drafter_top: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejection:
    """The first drafted token that was not kept, at `slot` (from 0) of its block.

    `evidence` is None where the target was not asked: behind the end of the answer, or where its
    logits were not numbers.
    """

    slot: int
    drafted_id: int
    cause: Cause
    evidence: Evidence | None


@dataclass(frozen=True, slots=True)
class Round:
    """One target pass of one sequence that committed tokens.

    `start` is the place in the output of the first token that it committed, `num_kept` how many of
    `token_ids` were drafts; a last one that is none was the target's own. `is_prompt` marks the
    pass over the prompt, or over what a preempted sequence computed again: it drafts nothing.
    `sources` are the kinds of drafters that proposed each draft. Of a tree, `drafted_ids` are the
    path that was kept and its first continuation, `num_beside` counts the other candidates.
    """

    start: int
    drafted_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_kept: int
    is_prompt: bool
    rejection: Rejection | None
    sources: tuple[str, ...] = ()
    num_beside: int = 0

    @property
    def num_tested(self) -> int:
        """Drafts that were kept, and the rejected one: slots behind it were not looked at."""
        return self.num_kept + (self.rejection is not None)
