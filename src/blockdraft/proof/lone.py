"""A sequence put to the target directly, beside the engine."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blockdraft.core.errors import ConfigError
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence as Tokens
from blockdraft.engine.engine import Engine

_KEYS = itertools.count(-1000, -1)
"""Those of the engine are not negative, those of its self-tests are above these."""


@contextmanager
def lone_sequence(
    engine: Engine, prompt_ids: Sequence[int], num_output: int, *, features: bool = False
) -> Iterator[Tokens]:
    """A sequence with room for a prompt and an output, nothing of it cached; closed afterwards.

    `features`: its forwards give features for the drafter too.

    Raises:
        ConfigError: the K/V memory is too small.
    """
    target, key = engine.target, next(_KEYS)
    params = SamplingParams(max_tokens=max(1, num_output), num_draft_tokens=None if features else 0)
    sequence = Tokens(key, params, 0, 0, frozenset(), list(prompt_ids), len(prompt_ids))
    # Of one token, which takes nothing over: what is computed here is written, also if it is there.
    target.memory.open(key, prompt_ids[:1], with_context=False, longest=sequence.longest)
    try:
        if not target.memory.reserve(key, len(prompt_ids) + num_output):
            raise ConfigError(
                f"the KV cache of {target.memory.num_tokens} tokens is too small; give more "
                "--memory"
            )
        yield sequence
    finally:
        target.close(key)
