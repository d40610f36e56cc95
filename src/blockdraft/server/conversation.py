"""Turns as chat templates know them. No torch."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from blockdraft.core.errors import RequestError
from blockdraft.server.protocol import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    MadeCall,
    Prediction,
)
from blockdraft.text.tokenizer import THINKING_SWITCH, Tokenizer

EFFORT = "reasoning_effort"
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of parts whose text is in `text`; that of a refusal has a field of its own."""
_NEWER_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's renamed roles, and its older one, by the names that templates know."""


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The turns of a conversation. It may have lost its beginning, calls of results included.

    Raises:
        RequestError: a turn lacks what its role needs, or holds what is no text.
    """
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def speaks_of_tools(messages: Iterable[Mapping[str, Any]]) -> bool:
    """True if a turn calls a tool, or is the result of a call."""
    return any(turn["role"] == "tool" or "tool_calls" in turn for turn in messages)


def template_options(
    kwargs: Mapping[str, Any] | None, effort: str | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Variables for the chat template; an effort only where it knows such a thing."""
    options: dict[str, Any] = {}
    if effort is not None and EFFORT in tokenizer.chat_template:
        options[EFFORT] = effort
    if effort == "none" and tokenizer.has_thinking_switch:
        options[THINKING_SWITCH] = False
    return {**options, **(kwargs or {})}


def _turn(message: ChatMessage, place: str) -> dict[str, Any]:
    calls = _calls(message)
    if calls and message.role != "assistant":
        raise RequestError(
            f"{place} has tool_calls and the role {message.role}; only assistants call tools",
            param=f"{place}.tool_calls",
        )
    turn: dict[str, Any] = {
        "role": _NEWER_ROLES.get(message.role, message.role),
        "content": _content(message, place),
    }
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = [_template_call(call) for call in calls]
    if turn["role"] == "tool":
        for name in ("tool_call_id", "name"):
            if (value := getattr(message, name)) is not None:
                turn[name] = value
    return turn


def _calls(message: ChatMessage) -> list[MadeCall]:
    if message.tool_calls:
        return message.tool_calls
    return [MadeCall(function=message.function_call)] if message.function_call else []


def _template_call(call: MadeCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function)}
    found = {"type": call.type, "function": function}
    return found if call.id is None else {"id": call.id, **found}


def _arguments(function: CalledFunction) -> str | dict[str, Any]:
    """Some clients write nothing where a function takes nothing."""
    given = function.arguments
    return "{}" if isinstance(given, str) and not given.strip() else given


def _content(message: ChatMessage, place: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        # An answer or a result may be empty; a refusal is an answer in a field of its own.
        if message.role in ("assistant", "tool", "function"):
            return message.refusal or ""
        raise RequestError(f"{place} has no content; give it", param=f"{place}.content")
    return "".join(part_text(part, f"{place}.content[{i}]") for i, part in enumerate(content))


def prediction_text(prediction: Prediction | None) -> str:
    """What the answer is expected to be; empty if nothing is.

    Raises:
        RequestError: it is not text.
    """
    if prediction is None:
        return ""
    if prediction.type != "content":
        raise RequestError(
            f"prediction has the type {prediction.type!r:.40}; give content", param="prediction"
        )
    if isinstance(prediction.content, str):
        return prediction.content
    return "".join(
        part_text(part, f"prediction.content.{index}")
        for index, part in enumerate(prediction.content)
    )


def part_text(part: str | ContentPart, place: str, types: Set[str] = TEXT_PARTS) -> str:
    """The text of a part of one of these types, or of a refusal; `place` names it in refusals.

    Raises:
        RequestError: it is of another type, or lacks its text.
    """
    if isinstance(part, str):
        return part
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in types | {"refusal"}:
        raise RequestError(
            f"{place} has the type {part.type!r:.40}; this model reads text only, give parts of "
            "the type text",
            param=f"{place}.type",
        )
    if text is None:
        raise RequestError(f"{place} has no text; give it", param=f"{place}.text")
    return text
