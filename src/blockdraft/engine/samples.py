"""The samples that run in an engine: its tokens, and the text beside them."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Constraint
from blockdraft.core.thinking import ThinkingLimit
from blockdraft.core.uninterrupted import uninterrupted
from blockdraft.engine.completion import Chunk, Round
from blockdraft.engine.engine import Engine
from blockdraft.engine.record import SampleText
from blockdraft.speculate.commit import StepOutput
from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.grammar import CompiledGrammar, Grammars
from blockdraft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, checked, with the seed that all its samples share.

    `shown_ids` are special tokens that have text in its answers.
    `grammar` is that of `params`: held here, it need not be compiled again when a sample begins.
    """

    prompt_index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    shown_ids: frozenset[int] = frozenset()
    grammar: CompiledGrammar | None = None
    prediction_ids: tuple[int, ...] = ()


class Samples:
    """Runs samples in an engine and hands out chunks of their text; a sample has a key.

    For one thread, that of the engine, but for `abandoned`.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.grammars = grammars
        self._busy = threading.Lock()
        self.abandoned: deque[int] = deque()
        """Keys of samples that nobody reads any more; see `drop_abandoned`."""
        self._news: dict[int, None] = {}
        """Keys of the samples of which a chunk can be taken, in the order in which it came."""

    @property
    def open(self) -> list[int]:
        """Keys of the samples that have not been taken to their end."""
        return [key for key, record in self.engine.progress.items() if record.text is not None]

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what cannot run, before anything is queued.

        Raises:
            RequestError: see RequestLimits; or a grammar cannot be compiled, or there is a budget
                of thinking and the model does not think.
        """
        if params.grammar is not None:
            self.grammars.compile(params.grammar)
        self.thinking(prompt_ids, params)
        self.engine.limits.check_prompt(prompt_ids, params)
        self.engine.limits.check_min_tokens(params, self.tokenizer.eos_ids)

    def thinking(self, prompt_ids: Sequence[int], params: SamplingParams) -> ThinkingLimit | None:
        """What bounds the thinking of one sample of a request, if anything does.

        Raises:
            RequestError: the chat template knows no thinking.
        """
        budget, marks = params.thinking_token_budget, self.tokenizer.thinking_marks
        if budget is None:
            return None
        if marks is None:
            raise RequestError(
                f"thinking_token_budget is {budget}, but the target's chat template has no "
                "thinking section between tags; leave it out",
                param="thinking_token_budget",
            )
        return ThinkingLimit(marks, budget, begun=self.tokenizer.begins_thinking(prompt_ids))

    def prediction_ids(self, prediction: str | Sequence[int]) -> tuple[int, ...]:
        """The tokens of a prediction.

        Raises:
            RequestError: see RequestLimits.check_prediction; or the text is not valid Unicode.
        """
        if isinstance(prediction, str):
            try:
                most = self.engine.limits.max_tokens
                prediction = self.tokenizer.encode_continuation(prediction, most=most)
            except ContextTooLong as error:
                raise RequestError(
                    f"in the prediction {error}: give the part that is expected first",
                    param="prediction",
                ) from error
        self.engine.limits.check_prediction(prediction)
        return tuple(prediction)

    def add(self, job: Job, sample_index: int, *, added_at: float | None = None) -> int:
        """Queue one sample of a job and return its key. See `check` for what it raises."""
        params, text = job.params, self.detokenizer(job)
        with self._alone():
            key = self.engine.add(
                job.prompt_ids,
                params,
                eos_ids=self.tokenizer.eos_ids,
                sample_index=sample_index,
                seed=job.seed,
                prediction_ids=job.prediction_ids,
                scan_stop=text.push,
                constraint=self.constraint(params),
                thinking=self.thinking(job.prompt_ids, params),
                added_at=added_at,
            )
            self.engine.progress[key].text = SampleText(job.prompt_index, text)
        return key

    def detokenizer(self, job: Job) -> Detokenizer:
        """What writes the text of a sample of a job, and scans it for stop strings."""
        params = job.params
        return Detokenizer(
            self.tokenizer,
            prompt_ids=job.prompt_ids,
            stop=params.stop,
            stop_ids=params.ending_ids(self.tokenizer.eos_ids),
            min_tokens=params.min_tokens,
            shown_ids=job.shown_ids,
        )

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """What the grammar of a request, if it has one, allows in one sample."""
        return None if params.grammar is None else self.grammars.start(params.grammar)

    def step(self, only: int | None = None) -> list[StepOutput]:
        """Advance the engine by a step, or only the sample with this key. See Engine.advance.

        An interrupt ends the sample at hand, and is raised again when the others have their tokens.
        """
        interrupt = None
        with self._alone():
            self.engine.advance(only)
            with uninterrupted():  # if one came before, the outputs are there in the next step
                outputs = self.engine.report()
                for output in outputs:
                    text = self._text(output.key)
                    try:
                        text.receive(output)
                    except BaseException as error:
                        self._fail(output.key, text, error)
                        if not isinstance(error, Exception):
                            interrupt = error
                    if output.token_ids or text.is_finished:  # an end may come without a token
                        self._news[output.key] = None
        if interrupt is not None:
            raise interrupt
        return outputs

    def check_engine(self) -> None:
        """See Engine.check."""
        with self._alone():
            self.engine.check()

    def fail(self, key: int, error: str) -> None:
        """End a sample with an error; its last chunk can be taken."""
        with self._alone(), uninterrupted():
            self._news[key] = None
            self._end(key, self._text(key), error)

    def _text(self, key: int) -> SampleText:
        text = self.engine.progress[key].text
        assert text is not None, "the sample was added to the engine past these samples"
        return text

    def _fail(self, key: int, text: SampleText, error: BaseException) -> None:
        """End a sample whose text could not be written."""
        if isinstance(error, Exception):  # an interrupt is raised again, and no fault
            logger.error(
                "a text could not be written; its request ends with an error", exc_info=error
            )
        self._end(key, text, f"its text could not be written: {error!r}")

    def _end(self, key: int, text: SampleText, error: str) -> None:
        text.is_finished = True  # first: the end is told also where memory cannot be given back
        self.engine.fail(key, error)

    @property
    def with_news(self) -> list[int]:
        """Keys of the samples of which a chunk can be taken."""
        return list(self._news)

    def has_news(self, key: int) -> bool:
        """True if a chunk of the sample can be taken."""
        return key in self._news

    def mark_stall(self, key: int) -> None:
        """The tokens that came last came late."""
        self._text(key).passes[-1].follows_stall = True

    def take_chunk(self, key: int) -> Chunk:
        """What is new of a sample. The last chunk holds the completion; the sample is gone then."""
        record, sample = self.engine.progress[key], self._text(key)
        with self._alone(), uninterrupted():
            text, rounds = self._read(key, sample)
            completion = self.engine.take(key).completion() if sample.is_finished else None
            self._news.pop(key, None)
        prompt_logprobs = () if sample.has_begun else tuple(sample.prompt_logprobs)
        sample.has_begun = True
        return Chunk(
            prompt_index=sample.prompt_index,
            index=record.sequence.sample_index,
            text=text,
            token_ids=sample.take_ids(),
            completion=completion,
            logprobs=sample.take_logprobs(),
            prompt_logprobs=prompt_logprobs,
            rounds=rounds,
        )

    def _read(self, key: int, text: SampleText) -> tuple[str, tuple[Round, ...]]:
        """Text that is final by now, and its rounds; nothing of a sample whose text fails."""
        try:
            piece, rounds = text.detokenizer.read(), text.take_rounds()
        except Exception as error:
            self._fail(key, text, error)
            return "", ()
        text.pieces.append(piece)
        return piece, rounds

    def drop(self, key: int) -> None:
        """Forget a sample before its end."""
        with self._alone(), uninterrupted():
            self._forget(key)

    def drop_abandoned(self) -> None:
        """Forget what is in `abandoned`: now, or where a call is under way at its end. Never waits.

        For finalizers, which the garbage collector runs in any thread and at any moment.
        """
        # If the lock is taken, its holder comes here after it has let go, and does this. So nothing
        # stays behind, even if no further step comes.
        while self.abandoned:
            with uninterrupted():
                if not self._busy.acquire(blocking=False):
                    return
                try:
                    while self.abandoned:
                        self._forget(self.abandoned.popleft())
                finally:
                    self._busy.release()

    def _forget(self, key: int) -> None:
        self._news.pop(key, None)
        if key in self.engine.progress:  # an interrupt may come when it has just been taken
            self.engine.take(key)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No sample is forgotten meanwhile; those that were abandoned inside are at the end."""
        try:
            with self._busy:
                yield
        finally:
            self.drop_abandoned()
