"""From a checked request to a session: prompts, parameters, a place in the queue."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.core.receipt import Environment
from blockdraft.core.request import SamplingParams
from blockdraft.engine.async_engine import AsyncEngine
from blockdraft.engine.samples import Job
from blockdraft.server.calls import CallFinder
from blockdraft.server.config import ServeConfig
from blockdraft.server.errors import blaming, unknown_model
from blockdraft.server.extensions import renaming
from blockdraft.server.harmony import HarmonyParser
from blockdraft.server.metrics import Metrics
from blockdraft.server.params import (
    chat_names,
    chat_params,
    check_scores,
    completion_params,
    is_echo_alone,
)
from blockdraft.server.parts import AnswerParser, MarkedParser
from blockdraft.server.pieces import Answer, Echo
from blockdraft.server.preparing import Preparing
from blockdraft.server.prompts import PromptReader
from blockdraft.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Ids,
    Sampling,
    ShapeFields,
    StreamOptions,
)
from blockdraft.server.receipts import Receipts
from blockdraft.server.render import ChatForm, CompletionForm, Envelope, Form
from blockdraft.server.session import Session
from blockdraft.server.shape import Shape, Toolbox, read_shape
from blockdraft.text.grammar import CompiledGrammar
from blockdraft.text.harmony import harmony_marks
from blockdraft.text.stream_decoder import StreamDecoder
from blockdraft.text.token_bytes import TokenBytes
from blockdraft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, for fairness, and the tag under which its acceptance is counted.

    `request_id` is what its response carries, see server/headers.py.
    """

    client: str
    tag: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: the name for requests, its origin, and what its drafter can do."""

    name: str
    root: str
    fingerprint: str
    max_draft_depth: int
    created: int


class Service:
    """Answers requests with an engine that runs."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        model: ServedModel,
        config: ServeConfig,
        metrics: Metrics,
        environment: Callable[[], Environment],
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.config = config
        self.metrics = metrics
        self.tokens = TokenBytes(tokenizer)
        self.preparing = Preparing(engine, config)
        self._marks = harmony_marks(tokenizer)
        self.prompts = PromptReader(tokenizer, engine, has_channels=bool(self._marks))
        self._receipts = Receipts(model.root, environment)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.model.name:
            raise unknown_model(name, self.model.name)

    async def chat(self, request: ChatRequest, caller: Caller) -> Session:
        """Start to answer a conversation.

        Raises:
            RequestError, ApiError, Overloaded, EngineDead: it cannot be answered.
        """
        self.check_model(request.model)
        num = self._num_samples(request.n, 1)
        with self.engine.hold(num):
            chat = await self.preparing.prompt(lambda: self.prompts.chat(request), caller.client)
            shape, compiled = await self._shape(request, caller, chat.toolbox, thinks=chat.thinks)
            await self._prepare_receipts(request)
        # Nothing is awaited from here on, so the room that was held is still there.
        form = ChatForm(
            self.tokens,
            with_logprobs=bool(request.logprobs),
            with_ids=bool(request.return_token_ids),
        )
        parser = partial(self._answer_parser, chat.toolbox, chat.thinks)
        with renaming(chat_names(request)):
            params = chat_params(
                request,
                num_prompt=len(chat.prompt_ids),
                max_context=self.engine.max_tokens,
                grammar=None if shape is None else shape.grammar,
            )
            jobs = _jobs(
                [chat.prompt_ids],
                [params],
                compiled,
                shown_ids=self._shown_ids(chat.toolbox),
                prediction_ids=chat.prediction_ids,
            )
            return self._start(request, caller, form, jobs, shape, parser=parser)

    async def complete(self, request: CompletionRequest, caller: Caller) -> Session:
        """Start to continue texts.

        Raises:
            RequestError, ApiError, Overloaded, EngineDead: they cannot be continued.
        """
        self.check_model(request.model)
        if request.receipt and is_echo_alone(request):
            raise RequestError(
                "a receipt needs an answer, but max_tokens is 0; leave out receipt", param="receipt"
            )
        num = self._num_samples(request.n, _num_prompts(request.prompt))
        with self.engine.hold(num):
            prompts, prediction_ids = await self.preparing.prompt(
                lambda: (
                    self.prompts.texts(request.prompt),
                    self.prompts.prediction(request),
                ),
                caller.client,
            )
            shape, compiled = await self._shape(request, caller)
            await self._prepare_receipts(request)
        # Nothing is awaited from here on, so the room that was held is still there.
        params = [
            completion_params(
                request,
                num_prompt=len(ids),
                max_context=self.engine.max_tokens,
                grammar=None if shape is None else shape.grammar,
            )
            for ids in prompts
        ]
        check_scores(request, prompts)
        form = CompletionForm(
            self.tokens,
            prompts,
            n=params[0].n,
            with_logprobs=request.logprobs is not None,
            with_ids=bool(request.return_token_ids),
            is_echo_alone=is_echo_alone(request),
        )
        echoes: list[Echo] = []
        if request.echo:
            alone = is_echo_alone(request)
            echoes = [Echo(self.tokenizer.decode(ids), alone) for ids in prompts]
        jobs = _jobs(prompts, params, compiled, prediction_ids=prediction_ids)
        return self._start(request, caller, form, jobs, shape, echoes=echoes)

    async def _shape(
        self,
        request: ShapeFields,
        caller: Caller,
        toolbox: Toolbox | None = None,
        *,
        thinks: bool | None = None,
    ) -> tuple[Shape | None, CompiledGrammar | None]:
        """What the answer must look like; refused, if it cannot be, before anything waits."""
        asked = [getattr(request, name) for name in ShapeFields.model_fields]
        if toolbox is None and not any(one is not None for one in asked):
            return None, None
        # A text has no channels.
        is_harmony = bool(self._marks) and isinstance(request, ChatRequest)
        tags, special = self.tokenizer.thinking_tags, self.tokenizer.thinking_ids
        shape = await self.preparing.shape(
            lambda: read_shape(
                request, toolbox, thinks=thinks, tags=tags, is_harmony=is_harmony, special=special
            ),
            caller.client,
        )
        if shape is None:
            return None, None
        compiled = None
        for one in (*shape.parts, shape):
            with blaming(one.param):
                try:
                    compiled = await self.preparing.grammar(one.grammar, caller.client)
                except RequestError:
                    if one.param == "tools" and toolbox is not None:
                        await self._blame_a_tool(toolbox, caller)
                    raise
        return shape, compiled

    async def _blame_a_tool(self, toolbox: Toolbox, caller: Caller) -> None:
        """Raise what is wrong with the parameters of a function that may be called.

        Nothing if each is right alone.
        """
        for index, tool in enumerate(toolbox.tools):
            if tool not in toolbox.callable_tools:
                continue
            try:
                grammar = Grammar.json_schema(tool.parameters)
                await self.preparing.grammar(grammar, caller.client)
            except RequestError as error:
                raise RequestError(
                    f"the parameters of the function {tool.name!r}: {error}",
                    param=f"tools[{index}]",
                ) from error

    def _num_samples(self, n: int | None, num_prompts: int) -> int:
        """How much room a request needs; whether `n` makes sense is checked with its parameters.

        Raises:
            RequestError: it can never have so much.
        """
        num_each = max(1, 1 if n is None else n)
        most = self.config.max_waiting + self.engine.max_running
        if num_each * num_prompts > most:
            # Their product may have more digits than Python writes.
            raise RequestError(
                f"the request asks for {num_each} samples of {num_prompts} prompts, and at most "
                f"{most} samples are allowed; ask for fewer",
                param="n" if num_each > 1 else "prompt",
            )
        return num_each * num_prompts

    def _start(
        self,
        request: Sampling,
        caller: Caller,
        form: Form,
        jobs: list[Job],
        shape: Shape | None,
        *,
        parser: Callable[[], AnswerParser] = MarkedParser,
        echoes: Sequence[Echo] = (),
    ) -> Session:
        stream = self.engine.submit(jobs, client=caller.client)
        prefix = "chatcmpl" if isinstance(form, ChatForm) else "cmpl"
        envelope = Envelope(
            id=f"{prefix}-{secrets.token_hex(12)}",
            kind=form.whole_kind,
            created=int(time.time()),
            model=self.model.name,
            fingerprint=self.model.fingerprint,
        )
        options = request.stream_options or StreamOptions()
        seconds = self.config.request_seconds
        answer = Answer(
            stream=stream,
            jobs=jobs,
            deadline=asyncio.get_running_loop().time() + seconds,
            seconds=seconds,
            parser=parser,
            echoes=echoes,
            decoder=None if isinstance(form, ChatForm) else partial(StreamDecoder, self.tokenizer),
            with_rounds=bool(request.stream and options.include_rounds),
            receipt=self._receipts.make if request.receipt else None,
            shape_param=None if shape is None else shape.param,
        )
        if self.config.log_prompts:
            texts = [self.tokenizer.decode(job.prompt_ids) for job in jobs]
            logger.info("prompt %s of request %s: %r", envelope.id, caller.request_id, texts)
        return Session(
            envelope=envelope,
            form=form,
            answer=answer,
            metrics=self.metrics,
            max_draft_depth=self.model.max_draft_depth,
            tag=caller.tag,
            options=options,
            log_text=self.config.log_prompts,
            counts_tokens=not (echoes and echoes[0].alone),
        )

    async def _prepare_receipts(self, request: Sampling) -> None:
        """The first one takes as long as reading all weights."""
        if request.receipt:
            await self._receipts.prepare()

    def _shown_ids(self, toolbox: Toolbox | None) -> frozenset[int]:
        """Special tokens that the parser looks for."""
        of_calls = {} if toolbox is None else toolbox.mark_ids
        found = {**self.tokenizer.thinking_ids, **of_calls}
        return self._marks | self.tokenizer.without_text(found.values())

    def _answer_parser(self, toolbox: Toolbox | None, thinks: bool | None) -> AnswerParser:
        if self._marks:
            return HarmonyParser(toolbox, self.tokenizer.eos_ids)
        finder = None if toolbox is None else CallFinder(toolbox, self.tokenizer.eos_ids)
        return MarkedParser(thinks, finder, self.tokenizer.thinking_tags)


def _num_prompts(prompt: str | list[str] | Ids | list[Ids]) -> int:
    """One, if it is a text or a list of ids; all items of a list are of one kind."""
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    return 1 if is_one else len(prompt)


def _jobs(
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    grammar: CompiledGrammar | None,
    shown_ids: frozenset[int] = frozenset(),
    prediction_ids: tuple[int, ...] = (),
) -> list[Job]:
    return [
        Job(
            index,
            ids,
            one,
            secrets.randbits(64) if one.seed is None else one.seed,
            shown_ids=shown_ids,
            grammar=grammar,
            prediction_ids=prediction_ids,
        )
        for index, (ids, one) in enumerate(zip(prompts, params, strict=True))
    ]


def fingerprint(version: str, *settings: object) -> str:
    """Names what answers: the same fingerprint and seed give the same text."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    return f"blockdraft-{version}-{digest[:10]}"
