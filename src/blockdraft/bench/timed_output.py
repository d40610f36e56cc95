"""What is measured of one output."""

from dataclasses import dataclass, field

from blockdraft.core.errors import AnswerFailed
from blockdraft.engine.completion import Completion
from blockdraft.measure.acceptance import AcceptanceStats


@dataclass(frozen=True, slots=True)
class TimedOutput:
    """Tokens of one output and the seconds they took.

    total_seconds: from the request to the last token, the prompt's pass included.
    decode_seconds: from the first token to the last.
    queue_seconds: from the request to its first step, part of the total.
    largest_gap: the longest between two tokens; None where it was not watched.
    """

    token_ids: tuple[int, ...]
    total_seconds: float
    decode_seconds: float
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    queue_seconds: float = 0.0
    largest_gap: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """All tokens over the total time."""
        return len(self.token_ids) / self.total_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the seconds since it; 0 for a single token."""
        later = len(self.token_ids) - 1
        return later / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def first_token_seconds(self) -> float:
        """From the request to its first token, waiting and the prompt's pass included."""
        return self.total_seconds - self.decode_seconds

    @property
    def prompt_seconds(self) -> float:
        """From its first step to its first token."""
        return self.first_token_seconds - self.queue_seconds


def timed_output(completion: Completion) -> TimedOutput:
    """The figures of one of our own outputs.

    Raises:
        AnswerFailed: it ended with an error, so its times and tokens are those of no answer.
    """
    if completion.finish_reason == "error":
        raise AnswerFailed(
            f"an answer that was to be measured ended with an error: {completion.error}; a result "
            "leaves nothing out, so none is written: fix the error, or leave out its prompt"
        )
    timings = completion.timings
    return TimedOutput(
        token_ids=completion.token_ids,
        total_seconds=timings.total,
        decode_seconds=timings.decode,
        acceptance=completion.acceptance,
        queue_seconds=timings.queue,
        largest_gap=timings.largest_gap,
    )
