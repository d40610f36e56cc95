"""What /openapi.json says of answers, beyond what the routes' signatures tell."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong: with which parameter, if with one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's envelope of errors."""

    error: ErrorDetail


class AnthropicDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Anthropic's envelope of errors."""

    type: Literal["error"]
    error: AnthropicDetail


Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {
        "model": ErrorAnswer,
        "description": "400 a parameter is bad, unknown or not supported; 401 the API key; 404 "
        "another model or route; 408 too slow; 413 too large; 429 too many wait",
    },
    "5XX": {
        "model": ErrorAnswer,
        "description": "503 the server shuts down, or its engine has ended",
    },
}
"""Of every route. The range leaves no place for FastAPI's own 422, which is never sent."""

ANTHROPIC_ERRORS: Responses = {
    status: {"model": AnthropicError, "description": said["description"]}
    for status, said in ERRORS.items()
}

STREAM: Responses = {
    200: {
        "description": "A whole answer, or events if `stream` is true",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}

METRICS: Responses = {
    200: {
        "description": "Prometheus's text format",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


def unavailable(description: str) -> Responses:
    """A 503 that tells how the server is, instead of an error."""
    schema = {"schema": {"type": "object"}}
    return {503: {"description": description, "content": {"application/json": schema}}}
