"""Samples of requests, as an engine would begin them or has decoded them."""

from collections.abc import Iterable
from typing import Any

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence


def make_sample(
    prompt: Iterable[int], output: Iterable[int] = (), *, key: int = 0, seed: int = 0, **params: Any
) -> Sequence:
    """One behind a prompt and some output; `params` are those of its request."""
    token_ids = list(prompt)
    sample = Sequence(
        key, SamplingParams(**params), seed, 0, frozenset(), token_ids, len(token_ids)
    )
    for token_id in output:
        sample.append(token_id)
    return sample


def decoding_row(sample: Sequence, num_draft_tokens: int) -> Row:
    """Its share of the next step, with room for a path of so many candidates."""
    sample.num_cached = len(sample.token_ids) - 1
    return Row(sample, sample.token_ids[-1:], num_draft_tokens, max_depth=num_draft_tokens)
