"""Tools, calls of them, and how a model writes those."""

from dataclasses import dataclass

from blockdraft.text.call_syntax import TAGGED
from blockdraft.text.tool_calls import Arguments, CallStart
from blockdraft.text.tools import parse_tools
from tests.schemas import SCHEMAS


def function(name="look", **changes):
    declared = {"name": name, "description": "Looks.", "parameters": SCHEMAS["object"]}
    return {"type": "function", "function": {**declared, **changes}}


LOOK, WAIT = function(), function("wait-2", parameters=None)
TOOLS = parse_tools([LOOK, WAIT])
NAMES = [tool.name for tool in TOOLS]


@dataclass(frozen=True)
class ToolCall:
    """What pieces of a call add up to."""

    name: str
    arguments: str


def joined(pieces):
    """Neighboring texts as one, and each call as one."""
    found = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            found.append(ToolCall(piece.name, ""))
        elif isinstance(piece, Arguments):
            call = found.pop()
            found.append(ToolCall(call.name, call.arguments + piece.text))
        elif found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


LOOK_CALL = ToolCall("look", '{"name": "abc", "age": 3}')
WAIT_CALL = ToolCall("wait-2", "{}")


def written(call, syntax=TAGGED):
    return syntax.write(call.name, call.arguments)


TWO_CALLS = f"{written(LOOK_CALL)}\n{written(WAIT_CALL)}"
WRONG_NAME = written(ToolCall("sing", "{}"))
