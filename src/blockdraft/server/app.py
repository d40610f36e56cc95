"""The HTTP routes. Each parses, calls the service once, and answers."""

import re
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from blockdraft.core.errors import BlockdraftError, RequestError
from blockdraft.server.describe import (
    ANTHROPIC_ERRORS,
    ERRORS,
    METRICS,
    ChatCompletion,
    CountedTokens,
    Detokenized,
    Health,
    MessageAnswer,
    ModelCard,
    ModelList,
    Ready,
    ResponseAnswer,
    TextCompletion,
    Tokenized,
    Version,
    answer,
    streamed,
    unavailable,
)
from blockdraft.server.errors import (
    ApiError,
    answer_error,
    answer_unknown_route,
    answer_validation,
    as_api_error,
    blaming,
)
from blockdraft.server.extras import tell_of_ignored
from blockdraft.server.guard import Guard, Traffic
from blockdraft.server.headers import REQUEST_IDS, WARNING, ResponseHeaders
from blockdraft.server.json_route import JsonRoute
from blockdraft.server.messages_api.reply import count_tokens, start_message
from blockdraft.server.messages_api.schema import CountRequest, MessagesRequest
from blockdraft.server.metrics import NO_TAG
from blockdraft.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from blockdraft.server.responses import EventStream, unless_gone
from blockdraft.server.responses_api.reply import start_response
from blockdraft.server.responses_api.schema import ResponsesRequest
from blockdraft.server.root_path import UnderPrefix
from blockdraft.server.service import Caller, Service
from blockdraft.server.session import Reply
from blockdraft.server.shape import read_toolbox
from blockdraft.server.web import PATHS, page_file

TAG_HEADER = "x-blockdraft-tag"
MAX_CHARACTERS = 2**20
"""Of a text for /tokenize."""
MAX_IDS = 2**18
"""Of a list for /detokenize."""
_TAG = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service, traffic: Traffic) -> FastAPI:
    """The app around a service. `traffic` tells whether the server is about to end."""
    # The interactive pages would be fetched from elsewhere, and this server works offline.
    app = FastAPI(
        title="blockdraft",
        version=version("blockdraft"),
        docs_url=None,
        redoc_url=None,
        # The address would be the one behind a proxy, without its prefix.
        redirect_slashes=False,
        responses=ERRORS,
        # Only said in the description; the prefix itself is taken off first of all.
        servers=[{"url": service.config.root_path or "/"}],
    )
    app.router.route_class = JsonRoute
    _add_openai_routes(app, service)
    _add_other_chat_routes(app, service)
    _add_token_routes(app, service)
    _add_health_routes(app, service, traffic)
    _add_page_routes(app)
    app.add_exception_handler(RequestValidationError, answer_validation)
    app.add_exception_handler(HTTPException, answer_unknown_route)
    for kind in (ApiError, BlockdraftError):
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(
        Guard,
        config=service.config,
        traffic=traffic,
        open_paths=PATHS,
        count_refused=service.metrics.count_refused,
    )
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients tell of themselves in many: x-stainless-os, x-api-key
            expose_headers=[*REQUEST_IDS, WARNING, "retry-after", "x-should-retry"],
        )
    app.add_middleware(ResponseHeaders)
    app.add_middleware(UnderPrefix, prefix=service.config.root_path)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=streamed(ChatCompletion))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(
            request, body, service, lambda: service.chat(body, _caller(request)), "messages"
        )

    @app.post("/v1/completions", responses=streamed(TextCompletion))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await _answer(
            request, body, service, lambda: service.complete(body, _caller(request)), "prompt"
        )

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(object="list", data=[_describe_model(service)])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        service.check_model(name)
        return _describe_model(service)


def _add_other_chat_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses", responses=streamed(ResponseAnswer))
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        return await _answer(
            request,
            body,
            service,
            lambda: start_response(service, body, _caller(request)),
            "input",
        )

    @app.post("/v1/messages", responses={**streamed(MessageAnswer), **ANTHROPIC_ERRORS})
    async def message(body: MessagesRequest, request: Request) -> Response:
        return await _answer(
            request,
            body,
            service,
            lambda: start_message(service, body, _caller(request)),
            "messages",
        )

    @app.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
    async def count(body: CountRequest, request: Request) -> CountedTokens:
        tell_of_ignored(request, body, strict=service.config.strict)
        with blaming("messages"):
            num_tokens = await count_tokens(service, body, request.state.client)
        return CountedTokens(input_tokens=num_tokens)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=answer(Tokenized))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        tell_of_ignored(request, body, strict=service.config.strict)
        service.check_model(body.model)
        with blaming("prompt" if body.messages is None else "messages"):
            convert = partial(_tokenized, service, body)
            return await service.preparing.text(convert, request.state.client)

    @app.post("/detokenize", responses=answer(Detokenized))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        tell_of_ignored(request, body, strict=service.config.strict)
        service.check_model(body.model)
        _check_size("tokens", len(body.tokens), MAX_IDS, "ids")
        convert = partial(_detokenized, service, body.tokens)
        return await service.preparing.text(convert, request.state.client)


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.prompt is None:
        if body.add_special_tokens:
            raise RequestError(
                "add_special_tokens is true, but the special tokens of a conversation are those of "
                "the chat template; leave it out",
                param="add_special_tokens",
            )
        return service.prompts.encode_chat(body, read_toolbox(body, service.tokenizer))
    if body.tools is not None:
        raise RequestError("tools belong to messages; leave out prompt", param="tools")
    _check_size("prompt", len(body.prompt), MAX_CHARACTERS, "characters")
    if body.add_special_tokens is False:
        return service.tokenizer.encode_continuation(body.prompt)
    return service.tokenizer.encode(body.prompt)


def _tokenized(service: Service, body: TokenizeRequest) -> Response:
    """To be called in a thread: even the JSON of many tokens takes a while."""
    token_ids = _encode(service, body)
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": service.engine.max_tokens,
            "tokens": token_ids,
            "token_strs": [service.tokens.text_of(i) for i in token_ids]
            if body.return_token_strs
            else None,
        }
    )


def _detokenized(service: Service, token_ids: list[int]) -> Response:
    """To be called in a thread."""
    service.engine.check_ids("tokens", token_ids)
    return JSONResponse({"prompt": service.tokenizer.decode_all(token_ids)})


def _check_size(param: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise ApiError(
            413,
            f"{param} has {size} {unit}, and at most {most} are accepted per request; send it in "
            "parts",
            param=param,
            code="input_too_large",
        )


def _add_health_routes(app: FastAPI, service: Service, traffic: Traffic) -> None:
    @app.get("/health", responses=unavailable(Health, "draining or dead"))
    async def health() -> JSONResponse:
        death = service.engine.death
        if death is not None:
            return JSONResponse({"status": "dead", "reason": death}, 503)
        if traffic.is_draining:
            return JSONResponse({"status": "draining", "active": traffic.num_active - 1}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=unavailable(Ready, "a new request would be refused"))
    async def ready() -> JSONResponse:
        is_ready = service.engine.has_room and not traffic.is_draining
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/version")
    async def show_version() -> Version:
        return Version(version=version("blockdraft"))

    @app.get("/metrics", response_class=Response, responses=METRICS)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=_METRICS_TYPE)


def _add_page_routes(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_file()

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return page_file(name)


async def _answer(
    request: Request,
    body: Sampling | ResponsesRequest | MessagesRequest,
    service: Service,
    start: Callable[[], Coroutine[Any, Any, Reply]],
    prompt_param: str,
) -> Response:
    """Stream an answer, or collect it; either way it ends when the client leaves.

    Raises:
        ClientGone: it left before its answer began; the guard knows what that means.
    """
    tell_of_ignored(request, body, strict=service.config.strict)
    with blaming(prompt_param):
        reply = await unless_gone(request.receive, start())
    if body.stream:
        return EventStream(
            reply.events(),
            failure=lambda error: reply.failure(as_api_error(error, prompt_param=prompt_param)),
            close=reply.close,
            seconds=reply.seconds,
            names_events=reply.names_events,
        )
    try:
        return JSONResponse(await unless_gone(request.receive, reply.whole()))
    finally:
        reply.close()


def _caller(request: Request) -> Caller:
    tag = request.headers.get(TAG_HEADER, NO_TAG)
    if not _TAG.fullmatch(tag):
        raise RequestError(
            f"the header {TAG_HEADER} is {tag!r:.40}; give 1 to 32 letters, digits, or any of _.-",
            param=TAG_HEADER,
        )
    return Caller(client=request.state.client, tag=tag, request_id=request.state.request_id)


def _describe_model(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model.name,
        object="model",
        created=service.model.created,
        owned_by="blockdraft",
        root=service.model.root,
        max_model_len=service.engine.max_tokens,
    )
