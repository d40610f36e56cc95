"""Tools, calls of them, and how a model writes those."""

import json
import random
from dataclasses import dataclass, replace

import jsonschema
import pytest

from blockdraft import RequestError, SamplingParams
from blockdraft.text.call_parsers import call_parser
from blockdraft.text.call_syntax import TAGGED, calls_grammar
from blockdraft.text.tool_calls import Arguments, CallStart
from blockdraft.text.tools import ToolChoice, parse_tools
from tests.schemas import SCHEMAS


def function(name="look", **changes):
    declared = {"name": name, "description": "Looks.", "parameters": SCHEMAS["object"]}
    return {"type": "function", "function": {**declared, **changes}}


TYPED = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "on": {"type": "boolean"},
        "kind": {"enum": ["red", "blue"]},
        "place": {"$ref": "#/$defs/Place"},
        "any": {},
    },
    "$defs": {
        "Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    },
}
"""Parameters of every type."""
LOOK, WAIT = function(), function("wait-2", parameters=None)
TOOLS = parse_tools([LOOK, WAIT])
NAMES = [tool.name for tool in TOOLS]


@dataclass(frozen=True)
class ToolCall:
    """What pieces of a call add up to."""

    name: str
    arguments: str


def in_pieces(text, seed):
    """A text, cut up at random: single letters with seed 0, longer and longer ones with others."""
    draw = random.Random(seed)
    while text:
        length = draw.randint(1, 1 + 9 * seed)
        yield text[:length]
        text = text[length:]


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


def assert_refused_where_required(schema, reason, syntax):
    """Calls of a function with this schema can be found, and cannot be kept to it."""
    tools = parse_tools([function("look", parameters=schema)])
    with pytest.raises(RequestError, match=reason):
        calls_grammar(tools, ToolChoice("required"), syntax)
    assert calls_grammar(tools, ToolChoice("auto"), syntax) is None


def required_calls(llm, tools, syntax, temperature, *, parallel=True):
    """Random calls of tools, equal drafted and plain: (how it ended, calls) of each sample.

    Those of a sample that was not cut off fit their schemas.
    """
    grammar = calls_grammar(tools, ToolChoice("required"), syntax, parallel=parallel)
    params = SamplingParams(
        max_tokens=480, grammar=grammar, temperature=temperature, seed=1, n=1 + 5 * int(temperature)
    )
    found = llm.generate("the", params).completions
    plain = llm.generate("the", replace(params, num_draft_tokens=0)).completions
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    samples = []
    for completion in found:
        parser = call_parser(syntax, tools)
        calls = joined([*parser.push(completion.text), *parser.close()])
        samples.append((completion.finish_reason, calls))
        if completion.finish_reason == "stop":
            assert parser.are_whole
            for call in calls:
                (tool,) = [tool for tool in tools if tool.name == call.name]
                jsonschema.validate(json.loads(call.arguments), dict(tool.parameters))
    return samples
