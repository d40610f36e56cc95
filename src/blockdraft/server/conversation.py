"""Turns as chat templates know them, checked against each other. No torch."""

from collections.abc import Sequence
from typing import Any

from blockdraft.core.errors import RequestError
from blockdraft.server.protocol import ChatMessage


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The turns of a conversation.

    Raises:
        RequestError: a turn lacks what its role needs, has what belongs to another, or is the
            result of a call that nobody has made.
    """
    made: set[str] = set()
    found = []
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]", made)
        made.update(call.id for call in message.tool_calls or ())
        found.append(_template_message(message))
    return found


def _check(message: ChatMessage, place: str, made: set[str]) -> None:
    role = message.role
    if message.tool_calls and role != "assistant":
        raise RequestError(
            f"{place} has tool_calls and the role {role}; only assistants call tools",
            param=f"{place}.tool_calls",
        )
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{place} has no content; give it", param=f"{place}.content")
    if role != "tool":
        for field in ("tool_call_id", "name"):
            if getattr(message, field) is not None:
                raise RequestError(
                    f"{place} has a {field} and the role {role}; leave it out, only results of "
                    "tools have one",
                    param=f"{place}.{field}",
                )
    elif message.tool_call_id not in made:
        raise RequestError(
            f"{place} is the result of the call {message.tool_call_id!r:.60}, which no turn before "
            "it makes; give the id of a call in tool_call_id",
            param=f"{place}.tool_call_id",
        )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    # OpenAI's newer name of the same role; templates know the old one.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
        found["tool_calls"] = calls
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found
