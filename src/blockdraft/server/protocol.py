"""What requests look like: OpenAI's fields, those of other engines, and our own.

Types are strict, unknown fields are refused. Ranges are checked where the values are used, in
SamplingParams. A field whose type is a single value is there to be refused with its name when it
asks for something else. No torch here.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOP_STRINGS = 64
MAX_LISTED_IDS = 1024
MAX_PROMPTS = 1024


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Number = Annotated[float, Field(allow_inf_nan=False)]
Ids = list[int]


class StreamOptions(_Strict):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_rounds: bool = False


class Sampling(_Strict):
    """The fields that chat and text completions share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LISTED_IDS)] | None = None

    # Of other engines.
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_LISTED_IDS)] | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None

    # Our own.
    speculative: bool | int | None = None

    # Without effect on the text.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """A function with the text of its arguments."""

    name: str
    arguments: str


class MadeCall(_Strict):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class ChatMessage(_Strict):
    """One turn. The fields without use here are those that clients send back with an answer."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    provider_specific_fields: dict[str, Any] | None = None  # litellm adds them to answers


class JsonSchemaFormat(_Strict):
    """A JSON schema with a name; it is kept to whether `strict` or not."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class FunctionTool(_Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]


class NamedTool(_Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: dict[str, Any]


class ToolFields(_Strict):
    """The tools of a conversation."""

    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class Templated(ToolFields):
    """The fields that decide how a conversation becomes a prompt."""

    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None


class ChatRequest(Sampling, Templated):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: Literal[True] | None = None


class TokenizeRequest(ToolFields):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Literal[True] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
