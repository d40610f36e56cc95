"""Routes that take JSON say so to a client that sends something else. No torch."""

import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from blockdraft.server.errors import ApiError

MAX_OBJECTS = 2**15
"""Objects and lists of a body, such as turns and their parts. To check so many takes a tenth of a
second, in which all other requests wait; a body may hold a million, which take over a second."""
MAX_MEMBERS = 2**17
"""Names with their values, of all objects of a body together, for the same reason."""
MAX_VALUES = 2**19
"""Values of all lists and objects, such as token ids, for the same reason. No other thread could
read them meanwhile: Python's reader of JSON lets none of them run."""


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
    # Python's reader takes others too, in which a letter may have the byte of a quote or a comma.
    if (encoding := json.detect_encoding(body)) not in ("utf-8", "utf-8-sig"):
        raise _no_json(f"it is in {encoding.upper()}; send it in UTF-8")
    # Few texts hold so many commas that it takes a second look to tell them from JSON's own.
    if _excess(body) and (excess := _excess(_without_texts(body))):
        raise ApiError(
            413,
            f"the body holds {excess}; send fewer turns or prompts, or their parts joined",
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


def _excess(body: bytes) -> str | None:
    """What it has too many of, the marks in its texts counted as JSON's own."""
    for num, most, what in (
        (body.count(b"{") + body.count(b"["), MAX_OBJECTS, "JSON objects and lists"),
        (body.count(b":"), MAX_MEMBERS, "members of objects"),
        (body.count(b",") + 1, MAX_VALUES, "values"),
    ):
        if num > most:
            return f"{num} {what}, and at most {most} are accepted"
    return None


def _without_texts(body: bytes) -> bytes:
    """What stands outside of strings; in a time that does not depend on how many there are."""
    # A quote behind a backslash ends no string.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    letters = np.frombuffer(plain, np.uint8)
    is_inside = np.logical_xor.accumulate(letters == ord('"'))
    return letters[~is_inside].tobytes()


def _no_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


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
            f"the header Content-Encoding is {encoding!r:.80}, and this server does not "
            "decompress; send the body uncompressed, without this header",
            code="unsupported_media_type",
        )
