"""Routes that take JSON say so to a client that sends something else. No torch."""

import json
import re
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from blockdraft.server.errors import ApiError

MAX_OBJECTS = 2**15
"""Objects and lists of a body, such as turns and their parts. To check so many takes a tenth of a
second, in which all other requests wait; a body may hold a million, which take over a second."""
MAX_MEMBERS = 2**17
"""Names with their values, of all objects of a body together, for the same reason."""
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""Strings of JSON. Matches wherever one begins, even if it has no end, so time is linear."""


class JsonRoute(APIRoute):
    """A route whose body is JSON, if it has one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        answer = super().get_route_handler()
        if self.body_field is None:
            return answer

        async def check_and_answer(request: Request) -> Response:
            _check_type(request.headers.get("content-type", ""))
            _check_encoding(request.headers.get("content-encoding", ""))
            await _check_body(request)
            return await answer(request)

        return check_and_answer


async def _check_body(request: Request) -> None:
    """Say what is wrong with a body that cannot be read as JSON; what is read is kept."""
    body = await request.body()
    if _holds_too_much(body) and _holds_too_much(_TEXTS.sub(b"", body)):
        raise ApiError(
            413,
            f"the body holds more than {MAX_OBJECTS} JSON objects and lists, or more than "
            f"{MAX_MEMBERS} members of objects; send fewer turns, or their parts joined",
            code="body_too_large",
        )
    try:
        if body:
            await request.json()
    except RecursionError as error:
        raise _no_json("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise _no_json(f"it is not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at character {error.pos}") from error
    except ValueError as error:  # what Python says of it is no advice for a client
        raise _no_json(
            f"a number has more than {sys.get_int_max_str_digits()} digits; give it fewer, or send "
            "it as a string"
        ) from error


def _holds_too_much(body: bytes) -> bool:
    """Whether it has too many objects, lists or members, what its texts hold included."""
    num_opened = body.count(b"{") + body.count(b"[")
    return num_opened > MAX_OBJECTS or body.count(b":") > MAX_MEMBERS


def _no_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is no JSON: {reason}", code="invalid_json")


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


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"the header Content-Encoding is {encoding!r:.80}, and this server reads what is not "
            "compressed; send the body uncompressed, without this header",
            code="unsupported_media_type",
        )
