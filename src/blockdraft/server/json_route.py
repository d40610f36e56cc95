"""Routes that take JSON say so to a client that sends something else. No torch."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from blockdraft.server.errors import ApiError


class JsonRoute(APIRoute):
    """A route whose body is JSON, if it has one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        answer = super().get_route_handler()
        if self.body_field is None:
            return answer

        async def check_and_answer(request: Request) -> Response:
            _check_type(request.headers.get("content-type", ""))
            return await answer(request)

        return check_and_answer


def _check_type(content_type: str) -> None:
    # Parameters, such as the character set, follow a semicolon.
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    found = f"the body is sent as {kind!r:.80}" if kind else "the header Content-Type is missing"
    raise ApiError(
        415,
        f"{found}, and this server reads JSON; send Content-Type: application/json",
        code="unsupported_media_type",
    )
