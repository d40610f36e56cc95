"""What requests to /v1/messages look like. No torch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from blockdraft.server.extensions import ChatFields
from blockdraft.server.protocol import (
    FEW_TOOLS,
    FEW_TURNS,
    MAX_STOP_STRINGS,
    Fields,
    Listed,
    RequestFields,
)


class Block(Fields):
    """A block of content; `type` says which fields it has: text, tool_use, tool_result ..."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "Listed[Block] | str | None" = None
    is_error: bool | None = None


class Turn(Fields):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Listed[Block] | str


class ClientTool(Fields):
    """A tool; only those that the client runs are supported, whose type is `custom` or left out."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class Choice(Fields):
    """Whether tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """Whether the model thinks first, if its chat template has a switch, and for how long."""

    type: str
    budget_tokens: int | None = None


class OutputFormat(Fields):
    """The answer's format."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """How the answer is written."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(RequestFields):
    """POST /v1/messages/count_tokens."""

    own_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }

    model: str | None = None
    messages: Annotated[Listed[Turn], FEW_TURNS]
    system: Listed[Block] | str | None = None
    tools: Annotated[Listed[ClientTool] | None, FEW_TOOLS] = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Any = None
    container: Any = None

    # Without effect on the text.
    cache_control: Any = None
    stop_sequences: Any = None  # clients count what they are about to send as it is


class MessagesRequest(CountRequest, ChatFields):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[Listed[str], Field(max_length=MAX_STOP_STRINGS)] | None = None

    # No message has log-probabilities.
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    # Without effect on the text.
    metadata: Any = None
    service_tier: Any = None
