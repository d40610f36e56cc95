"""What /openapi.json says of answers.

Most are written as plain JSON (render.py), which is faster; tests hold them against these models.
"""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong, and the parameter concerned, if any."""

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


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """Tokens of the prediction, or draft tokens, that were accepted and rejected."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails


class Speculation(BaseModel):
    """Draft tokens and accepted ones, in vLLM's schema."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class SampleMetrics(BaseModel):
    """Times of the one sample of a request."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: Speculation | None


class Token(BaseModel):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(Token):
    """A token of the answer, and the most likely ones at its position."""

    top_logprobs: list[Token]


class ChatLogprobs(BaseModel):
    """Of the tokens of an answer."""

    content: list[ScoredToken]
    refusal: None


class FunctionCall(BaseModel):
    """A function with the JSON of its arguments."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A tool call by the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] = []
    receipt: dict[str, Any] = {}
    finish_reason: str


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: SampleMetrics | None


class ChatCompletion(_Answer):
    """The answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(BaseModel):
    """Of the tokens of a text; the first of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One continuation of a text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    receipt: dict[str, Any] = {}
    finish_reason: str


class TextCompletion(_Answer):
    """The answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """All models that are served: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str


class Health(BaseModel):
    """The server's status; `active`: requests that it still drains, `reason`: why it died."""

    status: Literal["ok", "draining", "dead"]
    active: int = 0
    reason: str = ""


class Ready(BaseModel):
    """Whether a new request would be accepted."""

    ready: bool


class ResponseAnswer(BaseModel):
    """The answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    receipt: dict[str, Any] = {}


class MessageAnswer(BaseModel):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]
    receipt: dict[str, Any] = {}


class CountedTokens(BaseModel):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class Version(BaseModel):
    """The version of blockdraft."""

    version: str


Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {
        "model": ErrorAnswer,
        "description": "400: a parameter is invalid, unknown or not supported; 401: the API key; "
        "403: a page of another origin; 404: unknown model or route; 408: too slow; 413: too "
        "large; 415: not JSON; 421: unknown host; 429: the queue is full",
    },
    "5XX": {
        "model": ErrorAnswer,
        "description": "503: the server is shutting down, or its engine has ended",
    },
}
"""Of every route. The range leaves no place for FastAPI's own 422, which is never sent."""

ANTHROPIC_ERRORS: Responses = {
    status: {"model": AnthropicError, "description": error["description"]}
    for status, error in ERRORS.items()
}

METRICS: Responses = {
    200: {
        "description": "Prometheus's text format",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


def answer(model: type[BaseModel], description: str = "The answer") -> Responses:
    """A 200 whose JSON is written without the model."""
    return {200: {"model": model, "description": description}}


def streamed(model: type[BaseModel]) -> Responses:
    """The same, or events."""
    found = answer(model, "A complete answer, or events if `stream` is true")
    found[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return found


def unavailable(model: type[BaseModel], description: str) -> Responses:
    """A 503 that tells how the server is, instead of an error."""
    return {**answer(model), 503: {"model": model, "description": description}}
