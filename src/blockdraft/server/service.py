"""From a checked request to a session: prompts, parameters, a place in the queue."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.core.request import SamplingParams
from blockdraft.engine.async_engine import AsyncEngine
from blockdraft.engine.samples import Job
from blockdraft.server.calls import CallFinder
from blockdraft.server.config import ServeConfig
from blockdraft.server.conversation import speaks_of_tools, template_messages, template_options
from blockdraft.server.errors import blaming, unknown_model
from blockdraft.server.metrics import Metrics
from blockdraft.server.params import chat_params, completion_params, is_echo_alone
from blockdraft.server.pieces import Answer, Echo
from blockdraft.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
)
from blockdraft.server.reasoning import START
from blockdraft.server.render import ChatForm, CompletionForm, Envelope, Form
from blockdraft.server.session import Session
from blockdraft.server.shape import Shape, Toolbox, read_shape, read_toolbox
from blockdraft.text.token_bytes import TokenBytes
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_prompt import encode_tool_chat

_TAIL = 16
"""Tokens at the end of a prompt in which the mark of a thinking section is looked for."""

Result = TypeVar("Result")

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
    max_draft_tokens: int
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
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.config = config
        self.metrics = metrics
        self.tokens = TokenBytes(tokenizer)
        # A long text takes a while, in which others want to be served.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

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
        toolbox = read_toolbox(request, self.tokenizer)
        prompt_ids = await self.encode_chat(request, toolbox)
        thinks = self._thinks(prompt_ids)
        shape = read_shape(request, toolbox, thinks=thinks)
        params = chat_params(
            request,
            num_prompt=len(prompt_ids),
            max_context=self.engine.max_tokens,
            grammar=await self._compiled(shape),
        )
        form = ChatForm(
            self.tokens,
            with_logprobs=bool(request.logprobs),
            with_ids=bool(request.return_token_ids),
        )
        jobs = self._jobs([prompt_ids], [params])
        find_calls = None
        if toolbox is not None:
            find_calls = partial(CallFinder, toolbox, self.tokenizer.eos_ids)
        return self._start(request, caller, form, jobs, thinks=thinks, find_calls=find_calls)

    async def complete(self, request: CompletionRequest, caller: Caller) -> Session:
        """Start to continue texts.

        Raises:
            RequestError, ApiError, Overloaded, EngineDead: they cannot be continued.
        """
        self.check_model(request.model)
        prompts = await self._encode_prompts(request)
        grammar = await self._compiled(read_shape(request, None))
        max_context = self.engine.max_tokens
        params = [
            completion_params(
                request, num_prompt=len(ids), max_context=max_context, grammar=grammar
            )
            for ids in prompts
        ]
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
        return self._start(request, caller, form, self._jobs(prompts, params), echoes=echoes)

    async def encode_chat(
        self, request: ChatRequest | TokenizeRequest, toolbox: Toolbox | None
    ) -> list[int]:
        """The prompt of a conversation in which the model is told of the tools."""
        messages = template_messages(request.messages or ())
        options = template_options(
            request.chat_template_kwargs, request.reasoning_effort, self.tokenizer
        )
        for name in ("add_generation_prompt", "continue_final_message"):
            if name in options:
                raise RequestError(
                    f"{name} is a parameter of its own; take it out of chat_template_kwargs",
                    param="chat_template_kwargs",
                )
            options[name] = getattr(request, name)
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        tools = () if toolbox is None else toolbox.tools
        if tools or speaks_of_tools(messages):
            return await self._in_thread(
                lambda: encode_tool_chat(self.tokenizer, messages, tools, options)
            )
        return await self._in_thread(lambda: self.tokenizer.encode_chat(messages, options))

    async def encode_text(self, text: str) -> list[int]:
        """The tokens of a text, with whatever the model puts at its start."""
        return await self._in_thread(lambda: self.tokenizer.encode(text))

    async def _encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompt = request.prompt
        if isinstance(prompt, str):
            return [await self.encode_text(prompt)]
        if not prompt:
            raise RequestError("prompt is an empty list; give at least one", param="prompt")
        ids = [one for one in prompt if isinstance(one, int)]
        if ids:
            return [ids]
        texts = [one for one in prompt if isinstance(one, str)]
        if texts:
            return [await self.encode_text(text) for text in texts]
        return [list(one) for one in prompt if isinstance(one, list)]

    async def _compiled(self, shape: Shape | None) -> Grammar | None:
        """The grammar of a shape; refused, if it cannot be followed, before anything waits."""
        if shape is None:
            return None
        for one in (*shape.parts, shape):
            with blaming(one.param):
                await self._in_thread(partial(self.engine.check_grammar, one.grammar))
        return shape.grammar

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    def _jobs(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Job]:
        num = sum(one.n for one in params)
        most = self.config.max_waiting + self.engine.max_running
        if num > most:
            raise RequestError(
                f"the request asks for {num} samples, and at most {most} fit; ask for fewer",
                param="n" if params[0].n > 1 else "prompt",
            )
        return [
            Job(index, ids, one, secrets.randbits(64) if one.seed is None else one.seed)
            for index, (ids, one) in enumerate(zip(prompts, params, strict=True))
        ]

    def _start(
        self,
        request: Sampling,
        caller: Caller,
        form: Form,
        jobs: list[Job],
        *,
        thinks: bool | None = None,
        find_calls: Callable[[], CallFinder] | None = None,
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
            token_text=self.tokens.text_of,
            thinks=thinks,
            find_calls=find_calls,
            echoes=echoes,
            with_rounds=bool(request.stream and options.include_rounds),
        )
        if self.config.log_prompts:
            texts = [self.tokenizer.decode(job.prompt_ids) for job in jobs]
            logger.info("prompt %s of request %s: %r", envelope.id, caller.request_id, texts)
        return Session(
            envelope=envelope,
            form=form,
            answer=answer,
            metrics=self.metrics,
            max_draft_tokens=self.model.max_draft_tokens,
            tag=caller.tag,
            options=options,
            log_text=self.config.log_prompts,
            counts_tokens=not (echoes and echoes[0].alone),
        )

    def _thinks(self, prompt_ids: Sequence[int]) -> bool | None:
        if not self.tokenizer.thinks:
            return None
        return self.tokenizer.decode(prompt_ids[-_TAIL:]).rstrip().endswith(START)


def fingerprint(version: str, *settings: object) -> str:
    """Names what answers: the same fingerprint and seed give the same text."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    return f"blockdraft-{version}-{digest[:10]}"
