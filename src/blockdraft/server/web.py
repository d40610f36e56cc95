"""The web page at `/`: files of this package, as they are. No torch, no build step.

A page may load and reach this server only, so it works offline, and what a model writes cannot
make it do anything: scripts come from files, never from text.
"""

from importlib.resources import files

from starlette.responses import Response

from blockdraft.server.errors import ApiError

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # a new version must not meet scripts of an old one
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_START = "index.html"
_FILES = {
    path.name: path.read_bytes() for path in files("blockdraft.server").joinpath("page").iterdir()
}

PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES)})
"""What a browser asks for without a key; the page itself asks with one."""


def page_file(name: str = _START) -> Response:
    """A file of the page, the page itself unless named.

    Raises:
        ApiError: there is no such file.
    """
    if name not in _FILES:
        raise ApiError(404, f"the page has no file {name!r:.80}; open / instead")
    suffix = name[name.rindex(".") :]
    return Response(_FILES[name], media_type=_TYPES[suffix], headers=_HEADERS)
