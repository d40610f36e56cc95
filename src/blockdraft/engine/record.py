"""The one record of a sample that runs in an engine."""

from dataclasses import dataclass, field

from blockdraft.core.sequence import Sequence
from blockdraft.engine.completion import Completion, Round, Timings
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.prediction import num_as_predicted
from blockdraft.speculate.verify import TokenLogprobs
from blockdraft.text.detokenizer import Detokenizer


@dataclass(slots=True)
class _Pass:
    """A `Round` whose text is not final yet."""

    num_tokens: int
    num_drafted: int
    num_accepted: int
    follows_stall: bool = False


@dataclass(slots=True)
class SampleText:
    """The text of one sample, and what of it and its tokens nobody has taken yet.

    pieces: the text that was taken. num_told: tokens of the rounds that were taken.
    """

    prompt_index: int
    detokenizer: Detokenizer
    pieces: list[str] = field(default_factory=list)
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_taken_logprobs: int = 0
    passes: list[_Pass] = field(default_factory=list)
    num_told: int = 0
    has_begun: bool = False
    is_finished: bool = False

    def receive(self, output: StepOutput) -> None:
        """Note what a step has committed; its text was written while it was committed."""
        self.new_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        if output.token_ids:
            self.passes.append(
                _Pass(len(output.token_ids), output.num_drafted, output.num_accepted)
            )
        if output.finish_reason is not None:
            self.is_finished = True
            self.detokenizer.close()

    def take_ids(self) -> tuple[int, ...]:
        """The tokens that came since the last call."""
        new = tuple(self.new_ids)
        self.new_ids.clear()
        return new

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Those that came since the last call."""
        new = tuple(self.logprobs[self.num_taken_logprobs :])
        self.num_taken_logprobs = len(self.logprobs)
        return new

    def take_rounds(self) -> tuple[Round, ...]:
        """Those whose text is final by now."""
        rounds = []
        for one in self.passes:
            texts = self.detokenizer.token_texts(self.num_told, self.num_told + one.num_tokens)
            if texts is None:
                break
            self.num_told += one.num_tokens
            rounds.append(Round(texts, one.num_drafted, one.num_accepted, one.follows_stall))
        del self.passes[: len(rounds)]
        return tuple(rounds)


@dataclass(slots=True)
class SampleRecord:
    """What is known of one sample from `Engine.add` to `Engine.take`.

    Times are perf_counter seconds. `text` is None if only token ids are read. K/V pages and draft
    contexts are kept elsewhere, under the key of the sequence, by those who own the memory.
    `counted` is the last output in `acceptance`: after an interrupt it may be reported again.
    """

    sequence: Sequence
    added_at: float
    text: SampleText | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    largest_gap: float = 0.0
    finished_at: float | None = None
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    counted: StepOutput | None = None

    def completion(self) -> Completion:
        """What the caller gets of a sample that has ended, whose text was written."""
        sequence, text = self.sequence, self.text
        assert sequence.finish_reason is not None
        assert text is not None
        params, prediction_ids = sequence.params, sequence.prediction_ids
        num_predicted = None
        if prediction_ids:
            num_predicted = num_as_predicted(prediction_ids, sequence.output_ids)
        return Completion(
            index=sequence.sample_index,
            token_ids=tuple(sequence.output_ids),
            text="".join(text.pieces),
            finish_reason=sequence.finish_reason,
            seed=sequence.seed,
            logprobs=None if params.logprobs is None else tuple(text.logprobs),
            acceptance=self.acceptance,
            timings=self._timings(),
            error=sequence.error,
            num_reused_tokens=sequence.num_reused,
            prompt_logprobs=tuple(text.prompt_logprobs) if params.prompt_logprobs else None,
            stop_string=text.detokenizer.stop_string,
            num_predicted_tokens=num_predicted,
            num_unpredicted_tokens=(
                None if num_predicted is None else len(prediction_ids) - num_predicted
            ),
        )

    def _timings(self) -> Timings:
        assert self.finished_at is not None
        # Without a token, all the time went by before one.
        first_token_at = self.first_token_at or self.finished_at
        decode = self.finished_at - first_token_at
        return Timings(
            first_token=first_token_at - self.added_at,
            decode=decode,
            total=self.finished_at - self.added_at,
            tokens_per_second=(self.sequence.num_output - 1) / decode if decode else 0.0,
            queue=(self.started_at or self.finished_at) - self.added_at,
            largest_gap=self.largest_gap,
        )
