"""Penalties on the tokens that a sequence has already."""

from collections import Counter
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence

Values = NDArray[np.float32]
Ids = NDArray[np.intp]


def penalize(scores: Values, sequence: Sequence, ahead: list[int]) -> None:
    """Repetition over prompt and output (arXiv 1909.05858), frequency and presence over output.

    scores: [V], changed in place. Tokens `ahead` count as output.
    """
    params, known = sequence.params, _known(sequence)
    more, counts = Counter(ahead), sequence.output_counts
    if params.repetition_penalty != 1.0:
        new = [i for i in more if i not in counts and i not in sequence.prompt_ids]
        _repeat(scores, known.prompt, params)
        _repeat(scores, known.written, params)
        _repeat(scores, np.array(new, dtype=np.intp), params)
    if params.presence_penalty or params.frequency_penalty:
        ids = np.array(list(more), dtype=np.intp)
        times = np.array([counts[i] + more[i] for i in more], dtype=np.float32)
        # Those ahead are subtracted once, with what they have in all.
        values = scores[ids] - _amounts(times, params)
        scores[known.output] -= _amounts(known.times, params)
        scores[ids] = values


def _repeat(scores: Values, ids: Ids, params: SamplingParams) -> None:
    penalty = np.float32(params.repetition_penalty)
    values = scores[ids]
    scores[ids] = np.where(values > 0, values / penalty, values * penalty)


def _amounts(times: Values, params: SamplingParams) -> Values:
    """Of tokens that the output has so many times."""
    found: Values = np.float32(params.frequency_penalty) * times
    return found + np.float32(params.presence_penalty)


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The different tokens of a sequence: of the prompt, and of the output with their counts.

    written: those of the output that the prompt has not. The other fields tell whether the sequence
    has changed since.
    """

    prompt_ids: frozenset[int]
    counts: Counter[int]
    num_tokens: int
    prompt: Ids
    written: Ids
    output: Ids
    times: Values

    @classmethod
    def of(cls, sequence: Sequence, before: "_Known | None") -> "_Known":
        """What a sequence has now; before: what it had. A long prompt is read once."""
        prompt_ids, counts = sequence.prompt_ids, sequence.output_counts
        if before is not None and before.prompt_ids is prompt_ids:
            prompt = before.prompt
        else:
            prompt = np.fromiter(prompt_ids, np.intp, len(prompt_ids))
        return cls(
            prompt_ids,
            counts,
            len(sequence.token_ids),
            prompt,
            np.array([i for i in counts if i not in prompt_ids], dtype=np.intp),
            np.array(list(counts), dtype=np.intp),
            np.array(list(counts.values()), dtype=np.float32),
        )

    def holds(self, sequence: Sequence) -> bool:
        """True if the sequence has got no tokens since."""
        return (
            self.num_tokens == len(sequence.token_ids)
            and self.counts is sequence.output_counts
            and self.prompt_ids is sequence.prompt_ids
        )


_last: WeakKeyDictionary[Sequence, _Known] = WeakKeyDictionary()
"""What is known of each sequence: many places of a step ask, and sets take long to read."""


def _known(sequence: Sequence) -> _Known:
    known = _last.get(sequence)
    if known is None or not known.holds(sequence):
        known = _last[sequence] = _Known.of(sequence, known)
    return known
