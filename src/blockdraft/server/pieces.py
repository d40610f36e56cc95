"""What an answer consists of, before it is written as JSON. One path for streams and whole answers.

A stream is a sequence of pieces, and a whole answer is their sum, so both have the same content.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from blockdraft.core.errors import BlockdraftError, Refusal, RequestError, RequestTimeout
from blockdraft.core.receipt import Receipt
from blockdraft.engine.completion import Chunk, Completion, Round
from blockdraft.engine.samples import Job
from blockdraft.engine.streams import Stream
from blockdraft.server.calls import Call
from blockdraft.server.parts import AnswerParser, AnswerPart, join_parts
from blockdraft.speculate.verify import TokenLogprobs
from blockdraft.text.kinds import Kind, token_kinds
from blockdraft.text.stream_decoder import StreamDecoder

TokenEntry = tuple[int, TokenLogprobs | None]
"""A token and its log-probability; the first token of a prompt has none."""


_MOST_KINDS = 4096
_MOST_CHARACTERS = 2**15
"""Tokens that are told apart by kind, and what they hold; more would hold up everybody else."""


class SampleFailed(BlockdraftError):
    """One sample of a request ended with an error of the engine's."""


@dataclass(slots=True)
class Piece:
    """What one chunk adds to the choice of index `index`. `completion` comes with the last one.

    `entries` are there if log-probabilities were asked for; `text_offsets` are where the text of
    each of them begins. `rounds` are there if they were asked for, and with the last piece
    `token_kinds`, those of all tokens of the choice. `finish_reason` is OpenAI's, and comes with
    the completion, as does the `receipt` if one was asked for.
    """

    index: int
    parts: list[AnswerPart] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    token_kinds: list[Kind] = field(default_factory=list)
    completion: Completion | None = None
    finish_reason: str | None = None
    receipt: Receipt | None = None

    @property
    def content(self) -> str:
        """The text of all its parts that are no thinking and no call."""
        return self._text("content")

    @property
    def reasoning(self) -> str:
        """The text of its thinking."""
        return self._text("reasoning")

    @property
    def calls(self) -> list[Call]:
        """Its calls, or what it adds to them."""
        return [part for part in self.parts if isinstance(part, Call)]

    def _text(self, kind: str) -> str:
        texts = [part for part in self.parts if not isinstance(part, Call)]
        return "".join(text for its_kind, text in texts if its_kind == kind)

    @property
    def shows_tokens_only(self) -> bool:
        """True if its text is held back yet: half a character, or what may become a stop string."""
        return not (self.parts or self.entries or self.rounds or self.completion)

    def add(self, other: "Piece") -> None:
        """Append the next piece of the same choice."""
        join_parts(self.parts, other.parts)
        self.token_ids += other.token_ids
        self.entries += other.entries
        self.text_offsets += other.text_offsets
        self.completion = other.completion
        self.finish_reason = other.finish_reason
        self.receipt = other.receipt


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as a part of the answer. `alone`: nothing else is wanted."""

    text: str
    alone: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A request on its way: its stream, and how its chunks become pieces.

    parser: makes what finds the parts of a choice. echoes: of each prompt, or empty. deadline: in
    the event loop's time. with_rounds: pieces tell what each target pass drafted; of a stream only.
    receipt: makes that of a finished sample, if receipts were asked for. shape_param: the parameter
    that says what the answer must look like, if one does. decoder: of a text, what makes its
    characters of tokens, behind those that are given; they tell where in it a token begins.
    """

    stream: Stream
    jobs: Sequence[Job]
    deadline: float
    seconds: float
    parser: Callable[[], AnswerParser]
    echoes: Sequence[Echo] = ()
    decoder: Callable[[Sequence[int]], StreamDecoder] | None = None
    with_rounds: bool = False
    receipt: Callable[[Job, Completion], Receipt] | None = None
    shape_param: str | None = None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of all choices as they come, none of them empty.

        Raises:
            RequestTimeout: the request took too long.
            RequestError: a sample cannot be finished as the request asks.
            SampleFailed: the engine could not finish a sample.
            EngineDead: the engine has ended.
        """
        choices: dict[int, _Choice] = defaultdict(lambda: _Choice(self))
        with self.stream:
            while (chunk := await self._next()) is not None:
                if chunk.completion is not None and chunk.completion.error is not None:
                    raise self._failure(chunk.completion.error)
                job = self.jobs[chunk.prompt_index]
                index = chunk.prompt_index * job.params.n + chunk.index
                piece = choices[index].take(index, chunk)
                if piece is not None:
                    yield piece

    def _failure(self, error: str) -> BlockdraftError:
        if isinstance(error, Refusal):
            return RequestError(error, param=self.shape_param)
        return SampleFailed(error)

    async def _next(self) -> Chunk | None:
        try:
            async with asyncio.timeout_at(self.deadline):
                return await anext(self.stream, None)
        except TimeoutError as error:
            raise self._late() from error

    def _late(self) -> RequestTimeout:
        seconds = f"{self.seconds:g} seconds"
        what = f"took longer than {seconds}, queueing included; ask for fewer tokens"
        if not self.stream.has_begun:
            what = f"waited {seconds} without getting a place; try again when the queue is shorter"
        return RequestTimeout(
            f"the request {what}, or start the server with a longer --request-timeout"
        )

    async def whole(self) -> list[Piece]:
        """All choices, in order."""
        choices: dict[int, Piece] = {}
        async for piece in self.pieces():
            if piece.index in choices:
                choices[piece.index].add(piece)
            else:
                choices[piece.index] = piece
        return [choices[index] for index in sorted(choices)]


class _Choice:
    """The state of one choice between its pieces."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = answer.parser()
        self._has_begun = False
        self._decoder: StreamDecoder | None = None
        self._text_offset = 0
        self._token_texts: list[str] = []

    def take(self, index: int, chunk: Chunk) -> Piece | None:
        """The piece of a chunk; None if there is nothing to tell yet."""
        piece = Piece(index, token_ids=list(chunk.token_ids), completion=chunk.completion)
        echo = self._answer.echoes[chunk.prompt_index] if self._answer.echoes else None
        if echo is not None and not self._has_begun:
            piece.parts.append(("content", echo.text))
            self._add_entries(piece, self._prompt_entries(chunk), self._decoder_behind(()))
            # What is begun at its end, as a character, is not completed by what follows.
            self._text_offset = len(echo.text)
        self._has_begun = True
        if echo is None or not echo.alone:
            self._add_text(piece, chunk)
            if chunk.logprobs:
                prompt_ids = self._answer.jobs[chunk.prompt_index].prompt_ids
                self._decoder = self._decoder or self._decoder_behind(prompt_ids)
                entries = zip(chunk.token_ids, chunk.logprobs, strict=False)
                self._add_entries(piece, entries, self._decoder)
        else:
            piece.token_ids = []
        if self._answer.with_rounds:
            self._add_rounds(piece, chunk)
        piece.finish_reason = self._finish_reason(chunk.completion)
        if self._answer.receipt is not None and chunk.completion is not None:
            job = self._answer.jobs[chunk.prompt_index]
            piece.receipt = self._answer.receipt(job, chunk.completion)
        return None if piece.shows_tokens_only and not piece.token_ids else piece

    def _add_text(self, piece: Piece, chunk: Chunk) -> None:
        join_parts(piece.parts, self._parser.feed(chunk.text))
        if chunk.completion is not None:
            join_parts(piece.parts, self._parser.close(chunk.completion.token_ids[-1]))

    def _finish_reason(self, completion: Completion | None) -> str | None:
        if completion is None:
            return None
        is_stop = completion.finish_reason == "stop"
        return "tool_calls" if self._parser.can_be_run and is_stop else completion.finish_reason

    def _decoder_behind(self, prompt_ids: Sequence[int]) -> StreamDecoder | None:
        decoder = self._answer.decoder
        return None if decoder is None else decoder(prompt_ids)

    def _add_entries(
        self, piece: Piece, entries: Iterable[TokenEntry], decoder: StreamDecoder | None
    ) -> None:
        """What is no text has no length, and a character of several tokens is the last one's."""
        for token_id, logprobs in entries:
            piece.entries.append((token_id, logprobs))
            if decoder is not None:
                piece.text_offsets.append(self._text_offset)
                self._text_offset += len(decoder.push(token_id))

    def _add_rounds(self, piece: Piece, chunk: Chunk) -> None:
        piece.rounds = list(chunk.rounds)
        for one in chunk.rounds:
            self._token_texts += one.texts
        # Not before the end: what a token is, as of code, depends on what follows it.
        if chunk.completion is not None and self._has_few_texts():
            piece.token_kinds = token_kinds(self._token_texts)

    def _has_few_texts(self) -> bool:
        texts = self._token_texts
        return len(texts) <= _MOST_KINDS and sum(map(len, texts)) <= _MOST_CHARACTERS

    def _prompt_entries(self, chunk: Chunk) -> list[TokenEntry]:
        job = self._answer.jobs[chunk.prompt_index]
        if not job.params.prompt_logprobs:
            return []
        return list(zip(job.prompt_ids, (None, *chunk.prompt_logprobs), strict=True))
