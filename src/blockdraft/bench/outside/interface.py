"""What every outside engine is to a run, in a process or by URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.errors import BlockdraftError


class EngineFailed(BlockdraftError):
    """An engine cannot be started, has died, or does not answer: nothing more comes from it."""


class PromptFailed(BlockdraftError):
    """An engine refuses one prompt, and may answer the next."""


@dataclass(frozen=True, slots=True)
class OutsideOutput:
    """An output of another engine; `num_passes` of its target, the prompt's included, if told."""

    timed: TimedOutput
    num_passes: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no output for a prompt."""

    reason: str


class ReadyEngine(Protocol):
    """An engine that is ready."""

    versions: Mapping[str, str]

    def decode(self, prompt_ids: list[int], max_tokens: int) -> OutsideOutput:
        """Answer greedily.

        Raises:
            EngineFailed, PromptFailed: there is no answer.
        """

    def close(self) -> None:
        """End it; it may have died before."""
