"""What requests to /v1/responses look like. No torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from blockdraft.server.extensions import ChatFields
from blockdraft.server.protocol import (
    FEW_TOOLS,
    FEW_TURNS,
    MAX_STOP_STRINGS,
    ChoiceOfTools,
    ContentPart,
    Fields,
    Listed,
)


class MessageItem(Fields):
    """A turn."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Listed[ContentPart] | str


class CallItem(Fields):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Fields):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Listed[ContentPart] | str


class ReasoningItem(Fields):
    """What the model thought before it answered; encrypted content and summaries say nothing."""

    type: Literal["reasoning"]
    content: Listed[ContentPart] | None = None


class OtherItem(Fields):
    """An item of another kind, which is refused."""

    type: str


def _item_kind(item: Any) -> str:
    known = ("message", "function_call", "function_call_output", "reasoning")
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return "message"
    return kind if kind in known else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_kind),
]


class TextFormat(Fields):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Fields):
    """How the text is written."""

    format: TextFormat | None = None


class Reasoning(Fields):
    """How long the model thinks, where its chat template can tell it."""

    effort: str | None = None


class FunctionTool(Fields):
    """A tool; `type` is `function`, others are refused."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""How the client calls what the chat calls otherwise."""


class ResponsesRequest(ChatFields):
    """POST /v1/responses."""

    own_names: ClassVar[Mapping[str, str]] = {
        **CHAT_NAMES,
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }

    input: Annotated[Listed[InputItem] | str, FEW_TURNS]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: str | Annotated[Listed[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[Listed[FunctionTool] | None, FEW_TOOLS] = None
    tool_choice: ChoiceOfTools | None = None
    parallel_tool_calls: bool | None = None

    # Nothing is stored, so these are refused if they ask for it.
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    include: Listed[str] | None = None

    # No response has log-probabilities, so these are refused if they ask for some.
    logprobs: Any = None
    top_logprobs: Any = None

    # Without effect on the text; the first two are told again in the response.
    metadata: Any = None
    truncation: Any = None
    store: Any = None
    stream_options: Any = None
    service_tier: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    max_tool_calls: Any = None
