"""The answer to a request to /v1/messages."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from blockdraft.server.errors import ApiError
from blockdraft.server.extensions import renaming
from blockdraft.server.messages_api.convert import CHAT_NAMES, chat_request
from blockdraft.server.messages_api.schema import CountRequest, MessagesRequest
from blockdraft.server.messages_api.write import MessageWriter
from blockdraft.server.render import Json
from blockdraft.server.service import Caller, Service
from blockdraft.server.session import Session
from blockdraft.server.shape import read_toolbox


@dataclass(frozen=True, slots=True)
class MessagesReply:
    """A chat on its way to a client of the Messages API. A Reply."""

    session: Session
    writer: MessageWriter
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
        last = None
        async for last in self.session.pieces():
            for event in self.writer.take(last):
                yield event
        for event in self.writer.end(last, self.session.usage()):
            yield event

    def failure(self, error: ApiError) -> Json:
        """See Reply."""
        return self.writer.fail(error)

    def close(self) -> None:
        """See Reply."""
        self.session.close()


async def start_message(
    service: Service, request: MessagesRequest, caller: Caller
) -> MessagesReply:
    """Start to answer.

    Raises:
        RequestError, ApiError, Overloaded, EngineDead: it cannot be answered.
    """
    chat = chat_request(request)
    with renaming(CHAT_NAMES):
        session = await service.chat(chat, caller)
    writer = MessageWriter(
        id=f"msg_{session.envelope.id.removeprefix('chatcmpl-')}",
        model=session.envelope.model,
        num_prompt=sum(len(job.prompt_ids) for job in session.answer.jobs),
    )
    return MessagesReply(session, writer)


async def count_tokens(service: Service, request: CountRequest, client: str) -> dict[str, int]:
    """The tokens of a prompt.

    Raises:
        RequestError, ApiError: it is none.
    """
    service.check_model(request.model)
    chat = chat_request(request)

    def count() -> int:
        toolbox = read_toolbox(chat, service.tokenizer)
        return len(service.chat_encoder(chat, toolbox)())

    with renaming(CHAT_NAMES):
        return {"input_tokens": await service.preparing.text(count, client)}
