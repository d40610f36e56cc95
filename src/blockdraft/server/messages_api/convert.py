"""A request to /v1/messages as a chat. No torch."""

import json
from collections.abc import Sequence
from typing import Any

from blockdraft.core.errors import RequestError
from blockdraft.server.messages_api.schema import (
    Block,
    Choice,
    ClientTool,
    CountRequest,
    MessagesRequest,
    OutputFormat,
    Turn,
)
from blockdraft.server.protocol import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    FunctionTool,
    JsonSchemaFormat,
    MadeCall,
    ResponseFormat,
)
from blockdraft.text.tokenizer import THINKING_SWITCH

CHAT_NAMES = {
    "response_format": "output_config",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""How the client calls what the chat calls otherwise."""

_FORMAT_NAME = "answer"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BETWEEN_BLOCKS = "\n\n"


def chat_request(request: CountRequest) -> ChatRequest:
    """The chat that a request asks for.

    Raises:
        RequestError: it asks for what this server does not have.
    """
    for name in ("mcp_servers", "container"):
        if getattr(request, name):
            raise RequestError(f"{name} runs at Anthropic, not here; leave it out", param=name)
    choice = request.tool_choice
    is_single = choice is not None and choice.disable_parallel_tool_use
    messages = _messages(request)
    last = messages[-1] if messages else None
    is_begun = last is not None and last.role == "assistant" and not last.tool_calls
    chat = ChatRequest(
        **(_answer_fields(request) if isinstance(request, MessagesRequest) else {}),
        messages=[],
        # An answer that the client has begun goes on.
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        response_format=_response_format(request),
        tools=_tools(request.tools or ()),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if is_single else None,
        chat_template_kwargs=_template_kwargs(request),
        reasoning_effort=None if request.output_config is None else request.output_config.effort,
    )
    # The limit is that of the client's turns, which was checked; one may become several.
    chat.messages = messages
    return chat


def _answer_fields(request: MessagesRequest) -> dict[str, Any]:
    fields = request.answer_fields()
    if request.thinking is not None and request.thinking.type == "enabled":
        fields.setdefault("thinking_token_budget", request.thinking.budget_tokens)
    return {
        **fields,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
    }


def _template_kwargs(request: CountRequest) -> dict[str, Any] | None:
    given = request.chat_template_kwargs
    if request.thinking is None:
        return given
    return {THINKING_SWITCH: request.thinking.type != "disabled", **(given or {})}


def _messages(request: CountRequest) -> list[ChatMessage]:
    messages = []
    if request.system:
        text = _text_of(request.system, "system", _BETWEEN_BLOCKS)
        messages.append(ChatMessage(role="system", content=text))
    for index, turn in enumerate(request.messages):
        place = f"messages[{index}].content"
        if turn.role == "assistant":
            messages.append(_answer(turn, place))
        elif turn.role == "system":
            text = _text_of(turn.content, place, _BETWEEN_BLOCKS)
            messages.append(ChatMessage(role="system", content=text))
        else:
            messages += _questions(turn, place)
    return messages


def _answer(turn: Turn, place: str) -> ChatMessage:
    """A turn of the model: text, thinking and calls."""
    if isinstance(turn.content, str):
        return ChatMessage(role="assistant", content=turn.content)
    text, thinking = "", ""
    calls = []
    for index, block in enumerate(turn.content):
        here = f"{place}[{index}]"
        if block.type == "tool_use":
            calls.append(_call(block, here))
        elif block.type == "thinking":
            thinking += block.thinking or ""
        elif block.type != "redacted_thinking":
            text += _block_text(block, here)
    return ChatMessage(
        role="assistant",
        content=text,
        tool_calls=calls or None,
        reasoning_content=thinking or None,
    )


def _call(block: Block, place: str) -> MadeCall:
    if block.id is None or block.name is None or block.input is None:
        raise RequestError(f"{place} needs an id, a name and an input", param=place)
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = CalledFunction(name=block.name, arguments=arguments)
    return MadeCall(id=block.id, type="function", function=function)


def _questions(turn: Turn, place: str) -> list[ChatMessage]:
    """A turn of the user: results of calls, and text, in their order."""
    if isinstance(turn.content, str):
        return [ChatMessage(role="user", content=turn.content)]
    messages: list[ChatMessage] = []
    texts: list[str] = []
    for index, block in enumerate(turn.content):
        here = f"{place}[{index}]"
        if block.type != "tool_result":
            texts.append(_block_text(block, here))
            continue
        if texts:
            messages.append(ChatMessage(role="user", content=_BETWEEN_BLOCKS.join(texts)))
            texts = []
        messages.append(_result(block, here))
    if texts or not messages:
        messages.append(ChatMessage(role="user", content=_BETWEEN_BLOCKS.join(texts)))
    return messages


def _result(block: Block, place: str) -> ChatMessage:
    if block.tool_use_id is None:
        raise RequestError(f"{place} lacks its tool_use_id", param=place)
    text = _text_of(block.content or "", f"{place}.content", _BETWEEN_BLOCKS)
    if block.is_error:
        # Chat templates have no other place for it.
        text = f"Error: {text}"
    return ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id)


def _text_of(content: str | Sequence[Block], place: str, between: str) -> str:
    if isinstance(content, str):
        return content
    return between.join(
        _block_text(block, f"{place}[{index}]") for index, block in enumerate(content)
    )


def _block_text(block: Block, place: str) -> str:
    if block.type != "text":
        raise RequestError(
            f"{place} has the type {block.type!r:.60}, which is not supported here; give text",
            param=place,
        )
    if block.text is None:
        raise RequestError(f"{place} lacks its text", param=place)
    return block.text


def _response_format(request: CountRequest) -> ResponseFormat | None:
    wanted: OutputFormat | None = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        wanted = request.output_config.format
    if wanted is None:
        return None
    given = JsonSchemaFormat.model_validate({"name": _FORMAT_NAME, "schema": wanted.schema_})
    return ResponseFormat(type="json_schema", json_schema=given)


def _tools(tools: Sequence[ClientTool]) -> list[FunctionTool] | None:
    found = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.type not in (None, "custom") or tool.input_schema is None:
            reason = "lacks its input_schema"
            if tool.type not in (None, "custom"):
                reason = f"has the type {tool.type!r:.60}, which only Anthropic defines"
            raise RequestError(
                f"{place} {reason}; give tools with a name, a description and an input_schema",
                param=place,
            )
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        for name in ("description", "strict"):
            if getattr(tool, name) is not None:
                function[name] = getattr(tool, name)
        found.append(FunctionTool(type="function", function=function))
    return found or None


def _tool_choice(choice: Choice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise RequestError(
            "tool_choice is of the type tool and lacks the tool's name", param="tool_choice"
        )
    return {"type": "function", "function": {"name": choice.name}}
