"""What a request does to the target's logits before anything is chosen."""

from collections.abc import Sequence as IdSequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockdraft.core.errors import RequestError
from blockdraft.core.sequence import Sequence
from blockdraft.speculate.sampler.penalties import penalize
from blockdraft.speculate.sampler.philox import Stream

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token is chosen: behind a sequence's tokens and `num_ahead` more.

    `ahead` begins with these, if it matters what they are.
    """

    sequence: Sequence
    num_ahead: int
    ahead: IdSequence[int]

    @property
    def path(self) -> list[int]:
        """The tokens between the sequence and this place."""
        assert len(self.ahead) >= self.num_ahead
        return list(self.ahead[: self.num_ahead])

    @property
    def stream(self) -> Stream:
        """The random words of this place."""
        position = len(self.sequence.token_ids) + self.num_ahead
        return Stream(self.sequence.seed, self.sequence.sample_index, position)


def processed(scores: Scores, place: Place) -> Scores:
    """Penalties, logit bias, grammar and limits of length applied to `scores` [V].

    A copy, unless nothing changes. Only tokens of the sequence and those ahead count. Tokens
    rejected earlier never do.

    Raises:
        RequestError: nothing may be chosen.
    """
    sequence, params = place.sequence, place.sequence.params
    if not params.changes_logits:
        return scores
    scores = scores.copy()
    if params.uses_penalties:
        penalize(scores, sequence, place.path)
    if biases := params.logit_bias:
        # No id comes twice.
        ids = np.fromiter(biases.keys(), np.intp, len(biases))
        scores[ids] += np.fromiter(biases.values(), np.float32, len(biases))
    allowed = None
    if sequence.constraint is not None:
        allowed = sequence.constraint.allowed(sequence.output_ids, place.path)
    if sequence.num_output + place.num_ahead < params.min_tokens:
        allowed = _without_stops(allowed, sequence, scores.shape[0])
    if sequence.thinking is not None:
        allowed = _with_end_of_thinking(allowed, sequence, place, scores.shape[0])
    if allowed is not None:
        _forbid_others(scores, allowed)
    return scores


def _with_end_of_thinking(
    allowed: Mask | None, sequence: Sequence, place: Place, vocab_size: int
) -> Mask | None:
    """`allowed` [V], or the one token with which the thinking ends here; a grammar goes first."""
    limit = sequence.thinking
    if limit is None or not limit.may_force(sequence.num_output + place.num_ahead):
        return allowed
    forced = limit.forced(sequence.output_ids + place.path)
    if forced is None or (allowed is not None and not allowed[forced]):
        return allowed
    only = np.zeros(vocab_size, dtype=np.bool_)
    only[forced] = True
    return only


def _without_stops(allowed: Mask | None, sequence: Sequence, vocab_size: int) -> Mask:
    """`allowed` [V] less the tokens that end the sequence; a grammar may allow nothing else."""
    others = np.ones(vocab_size, dtype=np.bool_) if allowed is None else allowed.copy()
    others[list(sequence.stop_ids)] = False
    if others.any():
        return others
    if allowed is None:
        raise RequestError(
            f"min_tokens is {sequence.params.min_tokens}, but every token of the vocabulary ends "
            "the answer; give fewer stop_token_ids, or min_tokens 0",
            param="min_tokens",
        )
    return allowed


def _forbid_others(scores: Scores, allowed: Mask) -> None:
    scores[~allowed] = -np.inf
    if scores.max() == -np.inf:
        # A drafter may give no chance to any of them, and then all have the same.
        scores[allowed] = 0.0


def tempered(scores: Scores, top: np.float32, temperature: float) -> NDArray[np.float64]:
    """scores / T in float64, less those of `top`, the largest: however small T is, none is inf."""
    # Far below the largest a score may become -inf: it has no chance anyway.
    with np.errstate(over="ignore"):
        values: NDArray[np.float64] = (scores.astype(np.float64) - top) / temperature
    return values
