"""What every response carries, errors included: an id of the request, and warnings. No torch."""

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockdraft.server.errors import is_anthropic

REQUEST_ID = "x-request-id"
_ANTHROPIC_REQUEST_ID = "request-id"
"""Where Anthropic's clients look for it, to show it with an error."""
REQUEST_IDS = (REQUEST_ID, _ANTHROPIC_REQUEST_ID)
WARNING = "warning"
_ID = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")


class ResponseHeaders:
    """ASGI middleware around everything else.

    The id is the client's own if it is short and plain, else a new one. Whoever answers finds it
    as `request_id` in the state of the request, and may leave a `warning` there for the header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = state["request_id"]
                if is_anthropic(scope["path"]):
                    headers[_ANTHROPIC_REQUEST_ID] = state["request_id"]
                if "warning" in state:
                    headers[WARNING] = state["warning"]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _request_id(scope: Scope) -> str:
    name = REQUEST_ID.encode()
    given = next((value for key, value in scope["headers"] if key == name), b"").decode("latin-1")
    return given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
