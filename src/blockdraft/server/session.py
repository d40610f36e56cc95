"""One request while it is answered: its pieces written as JSON, its tokens and times counted."""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from blockdraft.engine.completion import Completion
from blockdraft.server.errors import ApiError
from blockdraft.server.metrics import Metrics
from blockdraft.server.pieces import Answer, Piece
from blockdraft.server.protocol import StreamOptions
from blockdraft.server.render import Envelope, Form, Json, request_metrics, usage

logger = logging.getLogger(__name__)


class Reply(Protocol):
    """An answer on its way to its client: `whole` or `events`, once; `close` must be called.

    names_events: the lines of an event tell its type, as clients of some interfaces expect it.
    """

    @property
    def names_events(self) -> bool:
        """See above."""
        ...

    @property
    def seconds(self) -> float:
        """How long the answer may take."""
        ...

    async def whole(self) -> Json:
        """The answer as one object. Raises what Answer.pieces raises."""
        ...

    def events(self) -> AsyncIterator[Json]:
        """The answer as it comes. Raises what Answer.pieces raises."""
        ...

    def failure(self, error: ApiError) -> Json:
        """The event that tells that the answer has failed."""
        ...

    def close(self) -> None:
        """End what is unfinished, and count it."""
        ...


@dataclass(slots=True)
class Session:
    """An answer in the form of OpenAI's chats and texts. A Reply.

    `pieces` is for replies of other forms, instead of `whole` and `events`.
    """

    envelope: Envelope
    form: Form
    answer: Answer
    metrics: Metrics
    max_draft_depth: int
    tag: str
    options: StreamOptions
    log_text: bool
    counts_tokens: bool = True
    names_events: ClassVar[bool] = False
    _num_tokens: int = 0
    _completions: list[Completion] = field(default_factory=list)
    _is_closed: bool = False

    async def whole(self) -> Json:
        """See Reply."""
        pieces = await self.answer.whole()
        for piece in pieces:
            self._count(piece)
        choices = [self.form.message(piece) for piece in pieces]
        return self.envelope.wrap(choices, usage=self.usage(), metrics=self._metrics())

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of the answer as they come, counted. Raises what Answer.pieces raises."""
        async for piece in self.answer.pieces():
            self._count(piece)
            yield piece

    async def events(self) -> AsyncIterator[Json]:
        """See Reply."""
        opened: set[int] = set()
        async for piece in self.pieces():
            if piece.shows_tokens_only and not self.form.with_ids:
                continue
            if piece.index not in opened:
                opened.add(piece.index)
                opening = self.form.opening(piece.index)
                if opening is not None:
                    yield self._event([opening])
            yield self._event([self.form.delta(piece)])
        if self.options.include_usage:
            yield self._event([], usage=self.usage(), metrics=self._metrics())

    def failure(self, error: ApiError) -> Json:
        """See Reply."""
        return error.body

    @property
    def seconds(self) -> float:
        """See Reply."""
        return self.answer.seconds

    def close(self) -> None:
        """See Reply."""
        if self._is_closed:
            return
        self._is_closed = True
        self.answer.stream.close()
        num_samples = sum(job.params.n for job in self.answer.jobs)
        self.metrics.count_aborted(num_samples - len(self._completions))

    def _event(self, choices: list[Json], **more: Json | None) -> Json:
        if self.options.continuous_usage_stats:
            more.setdefault("usage", self.usage())
        elif self.options.include_usage:
            more.setdefault("usage", None)
        return self.envelope.wrap(choices, kind=self.form.chunk_kind, **more)

    def _count(self, piece: Piece) -> None:
        if self.counts_tokens:
            self._num_tokens += len(piece.token_ids)
        if piece.completion is None:
            return
        self._completions.append(piece.completion)
        job = self.answer.jobs[piece.index // self.answer.jobs[0].params.n]
        self.metrics.count_end(piece.completion, len(job.prompt_ids), self.tag)
        if self.log_text:
            logger.info("answer %s/%d: %r", self.envelope.id, piece.index, piece.completion.text)

    def usage(self) -> Json:
        """Tokens so far, as OpenAI's chats tell them."""
        return usage(self.answer.jobs, self._num_tokens, self._completions)

    def _metrics(self) -> Json | None:
        return request_metrics(self._completions, self.max_draft_depth)


class EventWriter(Protocol):
    """Writes an answer as named events, and keeps what they add up to."""

    def begin(self) -> list[Json]:
        """The events before any text."""
        ...

    def take(self, piece: Piece) -> list[Json]:
        """The events of a piece."""
        ...

    def end(self, last: Piece | None, usage: Json) -> list[Json]:
        """The events behind the last piece."""
        ...

    def fail(self, error: ApiError) -> Json:
        """The event that ends a stream that has failed."""
        ...

    def render(self) -> Json:
        """The answer as it stands."""
        ...


@dataclass(frozen=True, slots=True)
class EventReply:
    """A chat in the form of another interface, made of its events. A Reply."""

    session: Session
    writer: EventWriter
    names_events: ClassVar[bool] = True

    @property
    def seconds(self) -> float:
        """See Reply."""
        return self.session.seconds

    async def whole(self) -> Json:
        """See Reply."""
        async for _ in self.events():
            pass
        return self.writer.render()

    async def events(self) -> AsyncIterator[Json]:
        """See Reply."""
        for event in self.writer.begin():
            yield event
        last = None
        async for last in self.session.pieces():
            for event in self.writer.take(last):
                yield event
        for event in self.writer.end(last, self.session.usage()):
            yield event

    def failure(self, error: ApiError) -> Json:
        """See Reply."""
        return self.writer.fail(error)

    def close(self) -> None:
        """See Reply."""
        self.session.close()
