"""A request to /v1/responses as a chat. No torch."""

from collections.abc import Sequence
from typing import Any

from blockdraft.core.errors import RequestError
from blockdraft.server.conversation import TEXT_PARTS, part_text
from blockdraft.server.errors import shown
from blockdraft.server.protocol import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ChoiceOfTools,
    ContentPart,
    FunctionTool,
    MadeCall,
    ResponseFormat,
)
from blockdraft.server.responses_api.schema import (
    CallItem,
    InputItem,
    MessageItem,
    OtherItem,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
    TextFormat,
)

_TEXT_PARTS = TEXT_PARTS | {"reasoning_text"}
_LOGPROBS = "message.output_text.logprobs"


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """The chat that a request asks for.

    Raises:
        RequestError: it asks for what this server does not have.
    """
    _refuse_what_needs_a_store(request)
    _refuse_logprobs(request)
    chat = ChatRequest(
        **request.answer_fields(),
        messages=[],
        max_tokens=request.max_output_tokens,
        stop=request.stop,
        response_format=_response_format(request),
        tools=_tools(request),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )
    # The limit is that of the items, which was checked; instructions may be one turn more.
    chat.messages = _messages(request)
    return chat


def _refuse_what_needs_a_store(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise RequestError(
                f"{name} refers to something stored, and this server stores nothing; send the "
                "whole conversation in input",
                param=name,
            )
    if request.background:
        raise RequestError(
            "background is true, and this server stores no responses to be fetched later; leave "
            "it out and stream the response",
            param="background",
        )


def _refuse_logprobs(request: ResponsesRequest) -> None:
    only = "only /v1/chat/completions gives log-probabilities"
    if _LOGPROBS in (request.include or ()):
        raise RequestError(f"include asks for {_LOGPROBS}; {only}", param="include")
    for name in ("logprobs", "top_logprobs"):
        value = getattr(request, name)
        if value:
            raise RequestError(f"{name} is {shown(value)}, and {only}; leave it out", param=name)


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    items = request.input
    if isinstance(items, str):
        items = [MessageItem(role="user", content=items)]
    conversation = _Conversation()
    if request.instructions:
        conversation.add_text("system", request.instructions)
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    return conversation.messages()


class _Conversation:
    """Turns out of items: what the model wrote in one go is one turn, with all of its calls."""

    def __init__(self) -> None:
        # Pieces are kept apart until all are there: joining each to those before it would take
        # seconds for the items of a large body.
        self._system: list[str] = []
        self._reasoning: list[str] = []
        self._turns: list[ChatMessage] = []

    def messages(self) -> list[ChatMessage]:
        """The turns; system messages at the start are one, as many templates take no more."""
        if not self._system:
            return self._turns
        return [ChatMessage(role="system", content="\n\n".join(self._system)), *self._turns]

    def add(self, item: InputItem, place: str) -> None:
        """Take the next item; `place` names it in refusals."""
        if isinstance(item, MessageItem):
            self.add_text(item.role, _text_of(item.content, f"{place}.content"))
        elif isinstance(item, CallItem):
            self._add_call(item)
        elif isinstance(item, ResultItem):
            text = _text_of(item.output, f"{place}.output")
            self._add_turn(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))
        elif isinstance(item, ReasoningItem):
            text = _text_of(item.content or [], f"{place}.content")
            self._reasoning += [text] if text else []
        else:
            raise _other_item(item, place)

    def add_text(self, role: Any, text: str) -> None:
        """Take a turn of text."""
        role = "system" if role == "developer" else role
        if role == "assistant":
            self._turns.append(self._answer(text))
        elif role == "system" and not self._turns:
            self._system.append(text)
        else:
            self._add_turn(ChatMessage(role=role, content=text))

    def _add_turn(self, turn: ChatMessage) -> None:
        """Take a turn that is not the model's. An answer that was cut has its thinking alone."""
        if self._reasoning:
            self._turns.append(self._answer(""))
        self._turns.append(turn)

    def _add_call(self, item: CallItem) -> None:
        function = CalledFunction(name=item.name, arguments=item.arguments)
        call = MadeCall(id=item.call_id, type="function", function=function)
        if not self._turns or self._turns[-1].role != "assistant" or self._reasoning:
            self._turns.append(self._answer(""))
        last = self._turns[-1]
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(call)

    def _answer(self, text: str) -> ChatMessage:
        reasoning, self._reasoning = "".join(self._reasoning) or None, []
        return ChatMessage(role="assistant", content=text, reasoning_content=reasoning)


def _other_item(item: OtherItem, place: str) -> RequestError:
    if item.type == "item_reference":
        reason = "refers to something stored, and this server stores nothing; send the item itself"
    else:
        reason = (
            f"has the type {item.type!r:.60}; messages, function_call, function_call_output and "
            "reasoning are supported"
        )
    return RequestError(f"{place} {reason}", param=place)


def _text_of(content: str | Sequence[ContentPart], place: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        part_text(part, f"{place}[{index}]", _TEXT_PARTS) for index, part in enumerate(content)
    )


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted: TextFormat | None = None if request.text is None else request.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.name is None or wanted.schema_ is None:
        raise RequestError(
            "text.format is a json_schema without its name or its schema; give both",
            param="text.format",
        )
    given = {"name": wanted.name, "schema": wanted.schema_}
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": given})


def _tools(request: ResponsesRequest) -> list[FunctionTool] | None:
    tools = []
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            raise RequestError(
                f"tools[{index}] has the type {tool.type!r:.60}; this server supports only "
                "functions, which the client runs",
                param=f"tools[{index}]",
            )
        given = tool.model_dump(include={"name", "description", "parameters", "strict"})
        function = {name: value for name, value in given.items() if value is not None}
        tools.append(FunctionTool(type="function", function=function))
    return tools or None


def _tool_choice(choice: ChoiceOfTools | None) -> Any:
    """In the form of chats, which refuse what is wrong with it."""
    if not isinstance(choice, dict):
        return choice
    tools = choice.get("tools")
    if choice.get("type") != "allowed_tools" or not isinstance(tools, list):
        return _named_tool(choice)
    allowed = {"mode": choice.get("mode"), "tools": [_named_tool(tool) for tool in tools]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _named_tool(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}
