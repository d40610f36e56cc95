"""The pieces of an answer as OpenAI's response, or as the events of its stream. No torch."""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.server.calls import Call
from blockdraft.server.errors import ApiError
from blockdraft.server.parts import AnswerPart
from blockdraft.server.pieces import Piece
from blockdraft.server.render import Json
from blockdraft.server.responses_api.schema import ResponsesRequest

_ROOM = 100
"""Levels of nesting that are left to the response around a value, and to who writes it."""

Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class _Item:
    """An item of the output while it is written: a message, a call, or thinking."""

    kind: Literal["message", "reasoning", "function_call"]
    id: str
    call: Call | None = None
    text: str = ""

    def belongs(self, part: AnswerPart) -> bool:
        """True if the part goes on with this item."""
        if isinstance(part, Call):
            return self.call is not None and self.call.index == part.index
        return self.kind == ("reasoning" if part[0] == "reasoning" else "message")

    def part(self) -> Json:
        """The only part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def render(self, status: Status) -> Json:
        """As it stands in a response."""
        item: Json = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            return {
                **item,
                "call_id": self.call.id,
                "name": self.call.name,
                "arguments": self.text,
            }
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}


def _new_item(part: AnswerPart) -> _Item:
    name = secrets.token_hex(12)
    if isinstance(part, Call):
        return _Item("function_call", f"fc_{name}", call=part)
    if part[0] == "reasoning":
        return _Item("reasoning", f"rs_{name}")
    return _Item("message", f"msg_{name}")


@dataclass(slots=True)
class ResponseWriter:
    """Writes one response: `begin`, each piece with `take`, `end`; each gives its events.

    The response, `render` behind the end, is made of the same items as the events.

    Args:
        request: what is told again in the response.
        count_tokens: the number of tokens of a text, for what was thought.
    """

    request: ResponsesRequest
    id: str
    created: int
    model: str
    count_tokens: Callable[[str], int]
    _done: list[Json] = field(default_factory=list)
    _item: _Item | None = None
    _num_events: int = 0
    _num_thought: int = 0
    _status: str = "in_progress"
    _usage: Json | None = None
    _error: Json | None = None
    _receipt: Json = field(default_factory=dict)
    """As a field of the response; empty unless one was asked for."""
    _told: Json = field(init=False)
    """What the response tells of its request. Three events have it, and it may be megabytes."""

    def __post_init__(self) -> None:
        self._told = _told_of(self.request)

    def begin(self) -> list[Json]:
        """The events before any text."""
        response = self.render()
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def take(self, piece: Piece) -> list[Json]:
        """The events of a piece."""
        events: list[Json] = []
        for part in piece.parts:
            events += self._take_part(part)
        return events

    def end(self, last: Piece | None, usage: Json) -> list[Json]:
        """The events behind the last piece."""
        is_cut = last is not None and last.finish_reason == "length"
        events = []
        if not self._done and self._item is None:
            events += self._open(("content", ""))
        events += self._close("incomplete" if is_cut else "completed")
        self._status = "incomplete" if is_cut else "completed"
        self._usage = self._usage_of(usage)
        if last is not None and last.receipt is not None:
            self._receipt = {"receipt": last.receipt.to_json()}
        return [*events, self._event(f"response.{self._status}", response=self.render())]

    def fail(self, error: ApiError) -> Json:
        """The event that ends a stream that has failed."""
        self._status = "failed"
        detail = error.body["error"]
        self._error = {"code": detail["code"] or "server_error", "message": detail["message"]}
        return self._event("response.failed", response=self.render())

    def render(self) -> Json:
        """The response as it stands."""
        is_cut = self._status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.model,
            "output": list(self._done),
            "previous_response_id": None,
            "store": False,
            "usage": self._usage,
            **self._told,
            **self._receipt,
        }

    def _take_part(self, part: AnswerPart) -> list[Json]:
        events: list[Json] = []
        if self._item is None or not self._item.belongs(part):
            events += self._close("completed")
            events += self._open(part)
        assert self._item is not None
        text = part.arguments if isinstance(part, Call) else part[1]
        if text:
            self._item.text += text
            events.append(self._delta(self._item, text))
        return events

    def _open(self, part: AnswerPart) -> list[Json]:
        item = self._item = _new_item(part)
        place = {"output_index": len(self._done)}
        events = [
            self._event("response.output_item.added", **place, item=item.render("in_progress"))
        ]
        if item.call is None:
            events.append(self._part_event("added", item))
        return events

    def _delta(self, item: _Item, text: str) -> Json:
        if item.kind == "function_call":
            return self._item_event("response.function_call_arguments.delta", item, delta=text)
        if item.kind == "reasoning":
            return self._text_event("response.reasoning_text.delta", item, delta=text)
        return self._text_event("response.output_text.delta", item, delta=text, logprobs=[])

    def _close(self, status: Status) -> list[Json]:
        item, self._item = self._item, None
        if item is None:
            return []
        events = self._ending(item)
        rendered = item.render(status)
        place = {"output_index": len(self._done)}
        events.append(self._event("response.output_item.done", **place, item=rendered))
        self._done.append(rendered)
        return events

    def _ending(self, item: _Item) -> list[Json]:
        """The whole text, once more."""
        if item.call is not None:
            whole = {"name": item.call.name, "arguments": item.text}
            return [self._item_event("response.function_call_arguments.done", item, **whole)]
        if item.kind == "reasoning":
            self._num_thought += self.count_tokens(item.text)
            done = self._text_event("response.reasoning_text.done", item, text=item.text)
        else:
            done = self._text_event("response.output_text.done", item, text=item.text, logprobs=[])
        return [done, self._part_event("done", item)]

    def _part_event(self, what: str, item: _Item) -> Json:
        return self._text_event(f"response.content_part.{what}", item, part=item.part())

    def _text_event(self, kind: str, item: _Item, **fields: object) -> Json:
        return self._item_event(kind, item, content_index=0, **fields)

    def _item_event(self, kind: str, item: _Item, **fields: object) -> Json:
        return self._event(kind, item_id=item.id, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: object) -> Json:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _usage_of(self, usage: Json) -> Json:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self._num_thought,
                **usage["completion_tokens_details"],
            },
            "total_tokens": usage["total_tokens"],
        }


def _told_of(asked: ResponsesRequest) -> Json:
    effort = asked.reasoning.effort if asked.reasoning else None
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": _told_again(asked.metadata or {}, {}),
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": _told_again(effort, None)},
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": _told_again(_format(asked), {"type": "text"})},
        "tool_choice": _told_again(asked.tool_choice or "auto", "auto"),
        "tools": _told_again([t.model_dump(exclude_none=True) for t in asked.tools or ()], []),
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": _told_again(asked.truncation or "disabled", "disabled"),
    }


def _told_again(value: object, otherwise: object) -> object:
    """What the request says, if it is JSON: requests may hold NaN and halves of characters."""
    inside = value
    for _ in range(_ROOM):
        inside = [inside]
    try:
        json.dumps(inside, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return otherwise
    return value


def _format(asked: ResponsesRequest) -> Json:
    if asked.text is None or asked.text.format is None:
        return {"type": "text"}
    return asked.text.format.model_dump(by_alias=True, exclude_none=True)
