"""The path prefix under which a proxy shows the server, such as /models. No torch."""

from starlette.types import ASGIApp, Receive, Scope, Send


class UnderPrefix:
    """ASGI middleware around everything else: takes the prefix off, if the proxy has left it on."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope.get("path", "")
        if self._prefix and f"{path}/".startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :] or "/"}
        await self._app(scope, receive, send)
