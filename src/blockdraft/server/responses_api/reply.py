"""The answer to a request to /v1/responses."""

from blockdraft.server.extensions import renaming
from blockdraft.server.responses_api.convert import chat_request
from blockdraft.server.responses_api.schema import CHAT_NAMES, ResponsesRequest
from blockdraft.server.responses_api.write import ResponseWriter
from blockdraft.server.service import Caller, Service
from blockdraft.server.session import EventReply


async def start_response(service: Service, request: ResponsesRequest, caller: Caller) -> EventReply:
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
    return EventReply(session, writer)
