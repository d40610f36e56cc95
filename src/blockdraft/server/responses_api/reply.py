"""The answer to a request to /v1/responses."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from blockdraft.server.errors import ApiError
from blockdraft.server.extensions import renaming
from blockdraft.server.render import Json
from blockdraft.server.responses_api.convert import CHAT_NAMES, chat_request
from blockdraft.server.responses_api.schema import ResponsesRequest
from blockdraft.server.responses_api.write import ResponseWriter
from blockdraft.server.service import Caller, Service
from blockdraft.server.session import Session


@dataclass(frozen=True, slots=True)
class ResponsesReply:
    """A chat on its way to a client of the Responses API. A Reply."""

    session: Session
    writer: ResponseWriter
    names_events: ClassVar[bool] = True

    @property
    def seconds(self) -> float:
        """See Reply."""
        return self.session.seconds

    async def whole(self) -> Json:
        """See Reply."""
        async for _ in self.events():
            pass
        return self.writer.render()

    async def events(self) -> AsyncIterator[Json]:
        """See Reply."""
        for event in self.writer.begin():
            yield event
        finish_reason = None
        async for piece in self.session.pieces():
            finish_reason = piece.finish_reason
            for event in self.writer.take(piece):
                yield event
        for event in self.writer.end(finish_reason, self.session.usage()):
            yield event

    def failure(self, error: ApiError) -> Json:
        """See Reply."""
        return self.writer.fail(error)

    def close(self) -> None:
        """See Reply."""
        self.session.close()


async def start_response(
    service: Service, request: ResponsesRequest, caller: Caller
) -> ResponsesReply:
    """Start to answer.

    Raises:
        RequestError, ApiError, Overloaded, EngineDead: it cannot be answered.
    """
    chat = chat_request(request)
    with renaming(CHAT_NAMES):
        session = await service.chat(chat, caller)
    envelope = session.envelope
    writer = ResponseWriter(
        request=request,
        id=f"resp_{envelope.id.removeprefix('chatcmpl-')}",
        created=envelope.created,
        model=envelope.model,
        count_tokens=service.tokenizer.count,
    )
    return ResponsesReply(session, writer)
