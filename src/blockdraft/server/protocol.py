"""What requests look like: OpenAI's fields, those of other engines, and our own.

What could change the text is honored or refused: types are strict, ranges are checked where the
values are used, in SamplingParams, and a field whose type is a single value is there to be refused
with its name when it asks for something else. What cannot change the text has any type. Null is
the same as nothing. Unknown fields of messages are ignored; those of a request are kept for
server/extras.py, which says what becomes of them. No torch here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from blockdraft.core.request import MAX_TOOLS

MAX_STOP_STRINGS = 64
MAX_LISTED_IDS = 1024
MAX_PROMPTS = 1024
MAX_TURNS = 8192
"""Turns of a conversation, or the items that become them."""


class Fields(BaseModel):
    """An object whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Clients send null for what they have no value for."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class _Exact(Fields):
    """An object that defines the answer's format, so an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")


class RequestFields(Fields):
    """The body of a request; `model_extra` has its unknown fields.

    own_names: how the route calls fields that others call otherwise, by the names of those.
    """

    model_config = ConfigDict(extra="allow")
    own_names: ClassVar[Mapping[str, str]] = {}


Number = Annotated[float, Field(allow_inf_nan=False)]
Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""Checked up to the first item that is wrong: telling of a million takes a minute."""
Ids = Listed[int]


def at_most(most: int, kind: str) -> BeforeValidator:
    """Refuses many items before they are looked at, one by one, while other requests wait."""

    def check(given: Any) -> Any:
        if isinstance(given, dict | list) and len(given) > most:
            raise PydanticCustomError(
                "too_long",
                "{kind} should have at most {most} items, not {num}; give fewer",
                {"kind": kind, "most": most, "num": len(given)},
            )
        return given

    return BeforeValidator(check)


LogitBias = Annotated[
    dict[str, Number], Field(max_length=MAX_LISTED_IDS), at_most(MAX_LISTED_IDS, "Dictionary")
]
FEW_TOOLS = at_most(MAX_TOOLS, "List")
FEW_TURNS = at_most(MAX_TURNS, "List")


class StreamOptions(Fields):
    """What a stream reports besides its text; `model_extra` has its unknown fields."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_rounds: bool | None = False
    include_obfuscation: Any = None
    """Without effect: OpenAI's padding, which hides the length of tokens."""


class JsonSchemaFormat(_Exact):
    """A JSON schema, enforced whether `strict` or not; its name is not used."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Exact):
    """The answer's format; `schema` beside the type is a habit of other engines."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


JsonSchema = dict[str, Any] | str
"""A schema, or the text of one."""


class StructuredOutputs(_Exact):
    """The answer's format, as in vLLM: one of the first five fields."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: Any = None


Speculative = bool | Annotated[int, Field(ge=0)] | None
"""The older form of num_draft_tokens: false is 0, and true sets no limit."""


class StructuredFields(RequestFields):
    """The answer's format, in the fields of other engines."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None


class ShapeFields(StructuredFields):
    """The answer's format, in one of several fields."""

    response_format: ResponseFormat | None = None


class ContentPart(Fields):
    """A piece of a message; server/conversation.py knows which types have text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Prediction(Fields):
    """The expected answer, to draft from."""

    type: str = "content"
    content: str | Listed[str | ContentPart]


class AnswerFields(StructuredFields):
    """The fields that all generating routes share."""

    model: str | None = None
    stream: bool | None = False
    temperature: Number | None = None
    top_p: Number | None = None
    seed: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: LogitBias | None = None

    # Of other engines.
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: int | None = None
    thinking_token_budget: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_LISTED_IDS)] | None = None

    # Our own.
    receipt: bool | None = None
    num_draft_tokens: int | None = None
    draft_depth: int | None = None
    speculative: Speculative = None

    # Without effect on the text.
    prediction: Prediction | None = None
    cache_salt: Any = None
    data_parallel_rank: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    skip_reading_prefix_cache: Any = None
    truncation_side: Any = None


class Sampling(AnswerFields, ShapeFields):
    """The fields that chat and text completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | Annotated[Listed[str], Field(max_length=MAX_STOP_STRINGS)] | None = None

    # Of other engines.
    return_token_ids: bool | None = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None

    # Without effect on the text.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    priority: Any = None
    request_id: Any = None
    guided_decoding_backend: Any = None


class CalledFunction(Fields):
    """A function with its arguments, or the text of them."""

    name: str
    arguments: str | dict[str, Any]


class MadeCall(Fields):
    """A tool call of an earlier answer."""

    function: CalledFunction
    type: Literal["function"] | None = "function"
    id: str | None = None


class ChatMessage(Fields):
    """One turn. The role `function` and `function_call` are OpenAI's older form of tools."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Listed[str | ContentPart] | None = None
    tool_calls: Listed[MadeCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None


ChoiceOfTools = Literal["none", "auto", "required"] | dict[str, Any]
"""Among tools; text/tools.py says what is wrong with an object better than its fields could."""


class FunctionTool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]


class ToolFields(RequestFields):
    """The tools of a conversation, and which of them may or must be called."""

    tools: Annotated[Listed[FunctionTool] | None, FEW_TOOLS] = None
    tool_choice: ChoiceOfTools | None = None
    parallel_tool_calls: bool | None = None


class TemplateFields(ToolFields):
    """The fields that decide how a conversation becomes a prompt."""

    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
    reasoning_effort: str | None = None


class ChatRequest(Sampling, TemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[Listed[ChatMessage], FEW_TURNS]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: Listed[Literal["text"]] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    verbosity: Any = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[Listed[str], Field(max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[Listed[Ids], Field(max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: Literal[True] | None = None


class TokenizeRequest(TemplateFields):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Listed[ChatMessage] | None, FEW_TURNS] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
