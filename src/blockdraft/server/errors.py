"""Every error as OpenAI's clients expect it. No torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from blockdraft.core.errors import (
    BlockdraftError,
    ContextTooLong,
    EngineDead,
    EngineStopped,
    Overloaded,
    RequestError,
    RequestTimeout,
)

_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_SHOWN = 60
_MOST_CHARACTERS = 1000
"""Of a message: what a client has sent, megabytes maybe, stands in it."""
RETRY_AFTER_DRAIN = 10
_TOO_LONG = "this model's maximum context length is exceeded"
"""Begins as OpenAI's own message: clients (litellm) know the error by these words, not its code."""


class ApiError(Exception):
    """An answer that is no success: status, what is wrong, which parameter, and a code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = _shortened(message)
        param = None if param is None else _shortened(param)
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }
        self.headers = headers or {}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """In the form of Anthropic's errors, which has no place for the parameter."""
        kind = _ANTHROPIC_KINDS.get(self.status, "api_error")
        detail = {"type": kind, "message": self.body["error"]["message"]}
        return {"type": "error", "error": detail}

    def response(self, path: str) -> JSONResponse:
        """As the answer to a request for `path`, in the form that its clients know."""
        body = self.anthropic_body if is_anthropic(path) else self.body
        return JSONResponse(body, self.status, self.headers)


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's routes, or below."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def unknown_model(name: str, served: str) -> ApiError:
    """The request wants a model that is not served."""
    return ApiError(
        404,
        f"the model {name!r:.{_SHOWN}} is not served here; {served!r} is",
        param="model",
        code="model_not_found",
    )


def draining() -> ApiError:
    """The server is about to end."""
    return ApiError(
        503,
        "the server is shutting down; try again later, or use another one",
        kind="server_error",
        code="shutting_down",
        headers={"retry-after": str(RETRY_AFTER_DRAIN)},
    )


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Name a parameter in errors about the request that name none."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or param
        raise


def as_api_error(error: BaseException, *, prompt_param: str | None = None) -> ApiError:
    """What a client is told of any error; `prompt_param` is blamed where nothing else is."""
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split())
    if isinstance(error, ContextTooLong):
        param = error.param or prompt_param
        message = f"{_TOO_LONG}: {message}"
        return ApiError(400, message, param=param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, message, param=error.param or prompt_param, code="invalid_value")
    if isinstance(error, Overloaded):
        headers = {"retry-after": str(error.retry_after)}
        return ApiError(429, message, kind="overloaded", code="queue_full", headers=headers)
    if isinstance(error, RequestTimeout):
        # A client that tried again on its own, as OpenAI's does twice, would take the time once
        # more, on a server that has too much to do: this is for its user to decide.
        headers = {"x-should-retry": "false"}
        return ApiError(408, message, kind="timeout", code="request_timeout", headers=headers)
    if isinstance(error, EngineStopped):
        return draining()
    if isinstance(error, EngineDead):
        return ApiError(503, message, kind="server_error", code="engine_dead")
    if isinstance(error, BlockdraftError):
        return ApiError(500, message, kind="server_error", code="internal_error")
    # What went wrong inside is for the log.
    return ApiError(
        500, "the server failed on this request", kind="server_error", code="internal_error"
    )


def from_validation(error: RequestValidationError) -> ApiError:
    """A body that does not have the shape that the protocol asks for."""
    found = error.errors()
    first = found[0]
    param = _param(first["loc"], error.body, first["type"])
    if first["type"] == "string_unicode" and not param:
        return ApiError(400, "the name of a parameter is not valid Unicode", code="invalid_json")
    if not param:
        return ApiError(400, "the body is not a JSON object; give one", code="invalid_json")
    same = [f for f in found if _param(f["loc"], error.body, f["type"]) == param]
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"unknown parameter {param}; leave it out", param=param, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing; give it", param=param, code="missing_parameter")
    reasons = " or ".join(dict.fromkeys(map(_reason, same)))
    value = shown(first.get("input"))
    return ApiError(400, f"{param} is {value}: {reasons}", param=param, code="invalid_type")


def _reason(found: Mapping[str, Any]) -> str:
    """What is wrong with a value, in the words of JSON where pydantic has Python's."""
    if found["type"] == "none_required":
        return "it is not supported; leave it out"
    if found["type"] == "literal_error" and found["ctx"]["expected"] in ("False", "True"):
        return f"only {found['ctx']['expected'].lower()} is supported; leave it out"
    return str(found["msg"])


def _param(loc: Sequence[Any], body: Any, kind: str) -> str:
    """The parameter at a location, such as messages[0].content.

    A location also names the alternatives of a type that were tried; what is not found in the body
    is one of them, unless it is what is missing there.
    """
    path, here = "", body
    for index, part in enumerate(loc[1:], 2):
        if isinstance(here, dict) and isinstance(part, str) and part in here:
            path, here = f"{path}.{part}" if path else part, here[part]
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
        elif kind == "missing" and index == len(loc) and isinstance(here, dict):
            path = f"{path}.{part}" if path else str(part)
    return path


def _shortened(text: str) -> str:
    """Without its middle if it is long: values stand at the beginning, remedies at the end."""
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def shown(value: object) -> str:
    """The beginning of a value, as JSON."""
    text = ""
    try:
        # Not all of it: to write a million members would hold up all other requests.
        for part in json.JSONEncoder().iterencode(value):
            text += part
            if len(text) > _SHOWN:
                return text[: _SHOWN - 3] + "..."
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return text


async def answer_validation(request: Request, error: Exception) -> JSONResponse:
    """Handler of RequestValidationError."""
    assert isinstance(error, RequestValidationError)
    return from_validation(error).response(request.url.path)


async def answer_unknown_route(request: Request, error: Exception) -> JSONResponse:
    """Handler of HTTPException: of what is asked for, and how."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    message = f"{asked:.200}: {error.detail}; {_way_to_a_route(request)}"
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"  # which the guard makes a GET
    refusal = ApiError(error.status_code, message, headers=headers)
    return refusal.response(request.url.path)


def _way_to_a_route(request: Request) -> str:
    """OpenAI's clients are given an address with /v1 at its end, and Anthropic's one without."""
    path, paths = request.url.path, {getattr(route, "path", "") for route in request.app.routes}
    if f"/v1{path}" in paths:
        return "give the client the server's address with /v1 at its end"
    if path.startswith("/v1/") and path.removeprefix("/v1") in paths:
        return "give the client the server's address without /v1 at its end"
    return "/openapi.json lists the routes"


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Handler of everything else that is raised on purpose."""
    return as_api_error(error).response(request.url.path)
