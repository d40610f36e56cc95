"""The choice: which token comes next, given the logits.

One rule for every temperature. The choice is a function of the processed logits, the seed, the
sample index and the absolute position. The target's choice verifies a draft; the drafter applies
the same function to its own logits to guess it, so that both see the same noise
(drafter-invariant speculative decoding, Daliri et al., arXiv 2408.07978).
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.sequence import Sequence
from blockdraft.speculate.filters import keep_min_p, keep_top_k, keep_top_p
from blockdraft.speculate.noise import gumbel_noise

Scores = NDArray[np.float32]
Mask = NDArray[np.bool_]

NO_CHOICE = -1
"""Stands for the choice where some logit is not a number, all are minus infinity, or a sampled one
is plus infinity: no token may be chosen there."""


def choices(logits: Tensor, sequence: Sequence, ahead: list[int]) -> Iterator[int]:
    """Yield the choice of each row of `logits` [rows, V], lazily.

    Row i follows the sequence's tokens and `ahead[:i]`; a caller that stops early pays for no more
    rows. Ties go to the lowest id.

    Raises:
        RequestError: the grammar cannot be followed any further.
    """
    if sequence.params.is_greedy_argmax:
        yield from argmax_ids(logits)
        return
    rows = logits.float().cpu().numpy()
    for index in range(rows.shape[0]):
        yield _choose(rows[index].copy(), sequence, ahead[:index])


def argmax_ids(logits: Tensor) -> list[int]:
    """The id of the largest logit in each row of [rows, V], or NO_CHOICE."""
    # argmax of bfloat16 is slow on CPUs; the conversion is exact. NaN counts as the largest.
    largest = logits.float().max(dim=-1)
    is_none = largest.values.isnan() | (largest.values == -torch.inf)
    token_ids: list[int] = largest.indices.masked_fill(is_none, NO_CHOICE).tolist()
    return token_ids


def _choose(scores: Scores, sequence: Sequence, ahead: list[int]) -> int:
    # The largest is NaN if any is.
    largest = scores.max()
    is_endless = largest == np.inf and sequence.params.temperature > 0.0
    if np.isnan(largest) or largest == -np.inf or is_endless:
        return NO_CHOICE
    process_logits(scores, sequence, ahead)
    if sequence.params.temperature == 0.0:
        return int(scores.argmax())
    position = len(sequence.token_ids) + len(ahead)
    noise = gumbel_noise(sequence.seed, sequence.sample_index, position, scores.shape[0])
    return pick(scores, sequence.params.temperature, survivors(scores, sequence), noise)


def pick(
    scores: Scores,
    temperature: float,
    survivor_ids: NDArray[np.intp] | None,
    noise: NDArray[np.float64],
) -> int:
    """argmax of scores / T + noise over the survivors, in float64; a sample of their softmax."""
    if survivor_ids is None:
        return int((_tempered(scores, temperature) + noise).argmax())
    kept = _tempered(scores[survivor_ids], temperature) + noise[survivor_ids]
    return int(survivor_ids[kept.argmax()])


def _tempered(scores: Scores, temperature: float) -> NDArray[np.float64]:
    """scores / T in float64, shifted so that the largest is 0: however small T is, none is inf."""
    # Far below the largest a score may become -inf: it has no chance anyway.
    with np.errstate(over="ignore"):
        tempered: NDArray[np.float64] = (scores.astype(np.float64) - scores.max()) / temperature
    return tempered


def survivors(scores: Scores, sequence: Sequence) -> NDArray[np.intp] | None:
    """Ids left by top-k, top-p and min-p, in this order, ascending; None if nothing filters.

    top-p and min-p look at the probabilities at the request's temperature.
    """
    params = sequence.params
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return None
    ids = np.flatnonzero(scores > -np.inf)
    if params.top_k:
        ids = ids[keep_top_k(scores[ids], params.top_k)]
    tempered = _tempered(scores[ids], params.temperature)
    if params.top_p < 1.0:
        kept = keep_top_p(tempered, params.top_p)
        ids, tempered = ids[kept], tempered[kept]
    if params.min_p > 0.0:
        ids = ids[keep_min_p(tempered, params.min_p)]
    return ids


def process_logits(scores: Scores, sequence: Sequence, ahead: list[int]) -> None:
    """Apply penalties, logit bias, grammar and the minimum length to `scores` [V], in place.

    Only tokens of the sequence and `ahead` count. Tokens rejected earlier never do.
    """
    params = sequence.params
    if not params.changes_logits:
        return
    if params.uses_penalties:
        _penalize(scores, sequence, ahead)
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += np.float32(bias)
    allowed = None
    if sequence.constraint is not None:
        allowed = sequence.constraint.allowed(sequence.output_ids, ahead)
    if sequence.num_output + len(ahead) < params.min_tokens:
        allowed = _without_stops(allowed, sequence, scores.shape[0])
    if allowed is not None:
        _forbid_others(scores, allowed)


def _without_stops(allowed: Mask | None, sequence: Sequence, vocab_size: int) -> Mask:
    """`allowed` [V] less the tokens that end the sequence, if it holds any others."""
    others = np.ones(vocab_size, dtype=np.bool_) if allowed is None else allowed.copy()
    others[list(sequence.stop_ids)] = False
    return others if allowed is None or others.any() else allowed


def _forbid_others(scores: Scores, allowed: Mask) -> None:
    scores[~allowed] = -np.inf
    if scores.max() == -np.inf:
        if not allowed.any():
            raise RequestError(
                "min_tokens forbids the end of the answer here, and nothing else may follow; lower "
                "min_tokens, or give fewer stop_token_ids"
            )
        # A drafter may give no chance to any of them, and then all have the same.
        scores[allowed] = 0.0


def _penalize(scores: Scores, sequence: Sequence, ahead: list[int]) -> None:
    """Repetition over prompt and output (arXiv 1909.05858), frequency and presence over output."""
    params = sequence.params
    counts = sequence.output_counts + type(sequence.output_counts)(ahead)
    if params.repetition_penalty != 1.0:
        seen = np.fromiter(sequence.prompt_ids | counts.keys(), dtype=np.intp)
        penalty = np.float32(params.repetition_penalty)
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = np.fromiter(counts.keys(), dtype=np.intp)
        times = np.fromiter(counts.values(), dtype=np.float32)
        frequency = np.float32(params.frequency_penalty) * times
        scores[ids] -= frequency + np.float32(params.presence_penalty)


def token_logprobs(
    logits: Tensor, token_id: int, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of a token, and the `num_top` most likely tokens with theirs, at most all.

    logits: [V], as the target gave them: no temperature, penalty or filter.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(min(num_top, logprobs.shape[-1]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return float(logprobs[token_id]), list(pairs)
