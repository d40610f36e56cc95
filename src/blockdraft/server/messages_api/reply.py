"""The answer to a request to /v1/messages."""

from blockdraft.server.extensions import renaming
from blockdraft.server.messages_api.convert import CHAT_NAMES, chat_request
from blockdraft.server.messages_api.schema import CountRequest, MessagesRequest
from blockdraft.server.messages_api.write import MessageWriter
from blockdraft.server.service import Caller, Service
from blockdraft.server.session import EventReply
from blockdraft.server.shape import read_toolbox


async def start_message(service: Service, request: MessagesRequest, caller: Caller) -> EventReply:
    """Start to answer.

    Raises:
        RequestError, ApiError, Overloaded, EngineDead: it cannot be answered.
    """
    chat = chat_request(request)
    if request.thinking_token_budget is None and service.tokenizer.thinking_marks is None:
        # Clients send it to every model; one that does not think keeps to it.
        chat.thinking_token_budget = None
    names = dict(CHAT_NAMES)
    if request.thinking_token_budget is not None:
        del names["thinking_token_budget"]  # the client has given it by the chat's name
    with renaming(names):
        session = await service.chat(chat, caller)
    writer = MessageWriter(
        id=f"msg_{session.envelope.id.removeprefix('chatcmpl-')}",
        model=session.envelope.model,
        num_prompt=sum(len(job.prompt_ids) for job in session.answer.jobs),
    )
    return EventReply(session, writer)


async def count_tokens(service: Service, request: CountRequest, client: str) -> int:
    """The tokens of a prompt.

    Raises:
        RequestError, ApiError: it is none.
    """
    service.check_model(request.model)
    chat = chat_request(request)

    def count() -> int:
        toolbox = read_toolbox(chat, service.tokenizer)
        return len(service.prompts.encode_chat(chat, toolbox))

    with renaming(CHAT_NAMES):
        return await service.preparing.text(count, client)
