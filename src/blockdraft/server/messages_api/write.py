"""The pieces of an answer as Anthropic's message, or as the events of its stream. No torch."""

from dataclasses import dataclass, field

from pydantic_core import from_json, to_json

from blockdraft.server.calls import Call
from blockdraft.server.errors import ApiError
from blockdraft.server.parts import AnswerPart
from blockdraft.server.pieces import Piece
from blockdraft.server.render import Json

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(slots=True)
class MessageWriter:
    """Writes one message: `begin`, each piece with `take`, `end`; each gives its events.

    The message, `render` behind the end, is made of the same blocks as the events.

    Args:
        num_prompt: tokens of the prompt. How many of them were not computed again is known at the
            end only.
    """

    id: str
    model: str
    num_prompt: int
    _blocks: list[Json] = field(default_factory=list)
    _block: Json | None = None
    _call: Call | None = None
    _arguments: str = ""
    _stop_reason: str | None = None
    _stop_sequence: str | None = None
    _usage: Json = field(default_factory=dict)
    _receipt: Json = field(default_factory=dict)
    """As a field of the message; empty unless one was asked for."""

    def begin(self) -> list[Json]:
        """The events before any text."""
        self._usage = _usage(self.num_prompt, 0, 0)
        return [{"type": "message_start", "message": self.render()}, {"type": "ping"}]

    def take(self, piece: Piece) -> list[Json]:
        """The events of a piece."""
        events: list[Json] = []
        for part in piece.parts:
            events += self._take_part(part)
        return events

    def end(self, last: Piece | None, usage: Json) -> list[Json]:
        """The events behind the last piece."""
        events = self._close()
        if last is not None and last.finish_reason is not None:
            self._stop_reason = _STOP_REASONS.get(last.finish_reason, "end_turn")
            stop_string = None if last.completion is None else last.completion.stop_string
            if self._stop_reason == "end_turn" and stop_string is not None:
                self._stop_reason, self._stop_sequence = "stop_sequence", stop_string
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        self._usage = _usage(usage["prompt_tokens"], num_cached, usage["completion_tokens"])
        if last is not None and last.receipt is not None:
            self._receipt = {"receipt": last.receipt.to_json()}
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage}
        events.append({**end, **self._receipt})
        return [*events, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> Json:
        """The event that ends a stream that has failed."""
        return error.anthropic_body

    def render(self) -> Json:
        """The message as it stands."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._blocks),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage,
            **self._receipt,
        }

    def _take_part(self, part: AnswerPart) -> list[Json]:
        events: list[Json] = []
        if not self._belongs(part):
            events += self._close()
            events.append(self._open(part))
        if isinstance(part, Call):
            text, delta = (
                part.arguments,
                {"type": "input_json_delta", "partial_json": part.arguments},
            )
            self._arguments += text
        else:
            key = "thinking" if part[0] == "reasoning" else "text"
            text, delta = part[1], {"type": f"{key}_delta", key: part[1]}
            assert self._block is not None
            self._block[key] += text
        if text:
            place = len(self._blocks)
            events.append({"type": "content_block_delta", "index": place, "delta": delta})
        return events

    def _belongs(self, part: AnswerPart) -> bool:
        """True if the part goes on with the block that is open."""
        if self._block is None:
            return False
        if isinstance(part, Call):
            return self._call is not None and self._call.index == part.index
        return bool(self._block["type"] == ("thinking" if part[0] == "reasoning" else "text"))

    def _open(self, part: AnswerPart) -> Json:
        if isinstance(part, Call):
            self._call, self._arguments = part, ""
            # Named as Anthropic names them, though clients take any id.
            name = part.id.replace("call_", "toolu_")
            self._block = {"type": "tool_use", "id": name, "name": part.name, "input": {}}
        elif part[0] == "reasoning":
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._block = {"type": "text", "text": ""}
        block = dict(self._block)
        return {"type": "content_block_start", "index": len(self._blocks), "content_block": block}

    def _close(self) -> list[Json]:
        if self._block is None:
            return []
        if self._call is not None:
            self._block["input"] = _as_object(self._arguments)
        event = {"type": "content_block_stop", "index": len(self._blocks)}
        self._blocks.append(self._block)
        self._block = self._call = None
        return [event]


def _as_object(arguments: str) -> Json:
    """The arguments of a call; of those that were cut, or are no JSON, what can be read.

    Numbers that no float holds (1e400, NaN) become null: JSON could not be written with them.
    """
    try:
        found = from_json(arguments, allow_partial=True)
        found = from_json(to_json(found, inf_nan_mode="null"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(num_prompt: int, num_cached: int, num_answered: int) -> Json:
    """Anthropic's input_tokens are those behind the cached ones."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_answered,
    }
