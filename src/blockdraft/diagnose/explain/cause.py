"""Why a drafted token was rejected: what both models thought, and what would have saved it."""

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.core.sequence import Sequence
from blockdraft.diagnose.explain.round import Cause, Evidence, Likely
from blockdraft.speculate.sampler.choose import choices
from blockdraft.speculate.sampler.logits import Place, processed

SURE = 0.5
"""The target is sure where it gives one token at least this probability, as Evidence defines it."""
NUM_TOP = 5
"""Most likely tokens that are kept of each model."""

_UNCHANGED = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "min_tokens": 0,
    "grammar": None,
    "thinking_token_budget": None,
}
"""Parameters that leave the logits as they are."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot whose draft differs from the target's choice, before anything is committed.

    `ahead` are the kept drafts of the block, which stand between the sequence and the slot. target,
    drafter: raw logits [V]; None for a drafter that shows none.
    """

    sequence: Sequence
    ahead: list[int]
    drafted_id: int
    wanted_id: int
    target: Tensor
    drafter: Tensor | None


def weigh(slot: Slot) -> Evidence:
    """The probabilities behind the rejection."""
    sequence = _behind(slot)
    target = _believed(slot.target, sequence)
    evidence = Evidence(
        wanted_id=slot.wanted_id,
        target_probability=float(target[slot.wanted_id]),
        target_entropy=_entropy(target),
        target_top=_top(target),
    )
    if slot.drafter is None or bool(slot.drafter.isnan().any()):
        return evidence
    drafter = _believed(slot.drafter, sequence)
    probability = float(drafter[slot.wanted_id])
    return replace(
        evidence,
        drafter_probability=probability,
        drafter_rank=None if _cannot_say(slot) else _rank(drafter, slot.wanted_id),
        drafter_entropy=_entropy(drafter),
        drafter_top=_top(drafter),
    )


def find_cause(slot: Slot, evidence: Evidence) -> Cause:
    """The first of these that holds; "stop" is known only after the commit, and comes before all.

    vocabulary: the wanted token is none that the drafter can guess.
    other: the models' choices, made again from these logits, are not those of the run.
    penalty: without penalties, biases, grammar and minimum length both would have chosen the same
        token.
    noise: at temperature 0 both would have chosen the same token.
    target_uncertain: no token has a probability of SURE or more for the target.
    drafter_wrong: one has, and the drafter guessed another.

    "Would have chosen" is the choice rule itself, with the same noise. A drafter that shows no
    logits is taken to guess the drafted token whatever the parameters.
    """
    if _cannot_say(slot):
        return "vocabulary"
    params = slot.sequence.params
    if _choices(slot) != (slot.wanted_id, slot.drafted_id):
        return "other"
    if params.changes_logits and _would_agree(slot, **_UNCHANGED):
        return "penalty"
    if params.temperature > 0.0 and _would_agree(slot, temperature=0.0):
        return "noise"
    is_sure = evidence.target_top[0][1] >= SURE
    return "drafter_wrong" if is_sure else "target_uncertain"


def _cannot_say(slot: Slot) -> bool:
    return slot.drafter is not None and bool(slot.drafter[slot.wanted_id] == -torch.inf)


def _would_agree(slot: Slot, **changes: object) -> bool:
    target, drafter = _choices(slot, **changes)
    return target == drafter


def _choices(slot: Slot, **changes: object) -> tuple[int, int]:
    """What target and drafter choose there, with some parameters of the request changed."""
    sequence = _behind(slot)
    sequence.params = replace(sequence.params, **changes)  # type: ignore[arg-type]  # by name
    if sequence.params.grammar is None:
        sequence.constraint = None
    (target,) = choices(slot.target[None], sequence, [])
    if slot.drafter is None:
        return target, slot.drafted_id
    (drafter,) = choices(slot.drafter[None], sequence, [])
    return target, drafter


def _behind(slot: Slot) -> Sequence:
    """A copy of the sequence as if the kept drafts were committed."""
    sequence = copy(slot.sequence)
    sequence.token_ids = sequence.token_ids + slot.ahead
    sequence.output_counts = sequence.output_counts + Counter(slot.ahead)
    return sequence


def _believed(logits: Tensor, sequence: Sequence) -> NDArray[np.float64]:
    """Logits [V] -> probabilities [V] as Evidence defines them."""
    scores = processed(logits.float().cpu().numpy(), Place(sequence, 0, []))
    top = scores.max()
    # An infinite logit takes everything, shared by all that are infinite.
    weights = np.isposinf(scores) if np.isposinf(top) else np.exp(scores.astype(np.float64) - top)
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


def _entropy(probabilities: NDArray[np.float64]) -> float:
    """In bits."""
    some = probabilities[probabilities > 0.0]
    return float(-(some * np.log2(some)).sum())


def _rank(probabilities: NDArray[np.float64], token_id: int) -> int:
    """From 1. Of tokens as likely as each other the lowest id is first, as the choice has it."""
    own = probabilities[token_id]
    num_ahead = (probabilities > own).sum() + (probabilities[:token_id] == own).sum()
    return 1 + int(num_ahead)


def _top(probabilities: NDArray[np.float64]) -> tuple[Likely, ...]:
    ids = np.argsort(-probabilities, kind="stable")[:NUM_TOP]
    return tuple((int(i), float(probabilities[i])) for i in ids)
