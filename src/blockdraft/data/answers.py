"""What is asked of a target, and what it answers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from blockdraft.text.kinds import distinct_ngram_share

LOOP_CHECK_EVERY = 32


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to write; temperature 0 is greedy, `sample` counts answers to the same prompt."""

    id: str
    set: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The target's tokens for one job; finish is "stop", "length" or "loop"."""

    job: Job
    response_ids: tuple[int, ...]
    finish: str


class Writer(Protocol):
    """Answers jobs."""

    def write(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Yield answers as they finish, in no particular order."""


def has_begun_to_loop(response_ids: Sequence[int]) -> bool:
    """True if an unfinished answer repeats itself; looked for every LOOP_CHECK_EVERY tokens.

    The tail alone is looked at: a fresh loop hides behind a long good beginning.
    """
    if len(response_ids) < 3 * LOOP_CHECK_EVERY or len(response_ids) % LOOP_CHECK_EVERY:
        return False
    return distinct_ngram_share(response_ids[-2 * LOOP_CHECK_EVERY :]) < 0.5
