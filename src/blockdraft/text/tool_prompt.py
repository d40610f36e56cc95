"""How a conversation with tools is put to a model: by its chat template, or in our own words."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.text.harmony import harmony_marks
from blockdraft.text.tokenizer import OPTIONAL_KEYS, TOOL_KEYS, Tokenizer
from blockdraft.text.tools import BARE, TAGGED, CallSyntax, Tool
from blockdraft.text.xml_syntax import XML

_INSTRUCTIONS = """You may call these functions to answer. Each line describes one:
{declarations}
To call a function, write its name and its arguments in this form:
{example}
The result comes back in the next message, between <tool_response> and </tool_response>."""


def native_syntax(tokenizer: Tokenizer) -> CallSyntax | None:
    """The syntax that the chat template teaches, if it shows tools in a way that is known here."""
    source = tokenizer.template_source
    if source is None or not re.search(r"\btools\b", source):
        return None
    if "<tool_call>" in source and "<function=" in source:
        return XML if "<parameter=" in source else None
    if "<tool_call>" in source and '"arguments' in source.replace('\\"', '"'):
        return TAGGED
    return BARE if '"parameters": dictionary' in source else None


def encode_tool_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    options: Mapping[str, Any] | None = None,
    *,
    most: int | None = None,
) -> list[int]:
    """Token ids of a conversation with tools; messages may hold calls and their results.

    `options` and `most` are those of Tokenizer.encode_chat. `tools` may be empty: earlier turns had
    some. Where the template does not know tools, they are described in a system message, or before
    the first question if it knows none. Calls are written out in the syntax TAGGED, and results
    become messages of the user.

    Raises:
        RequestError, ContextTooLong: as Tokenizer.encode_chat, or a call or a result is malformed.
    """
    messages = [_with_parsed_calls(message) for message in messages]
    if native_syntax(tokenizer) is not None or harmony_marks(tokenizer):
        declarations = [tool.declaration for tool in tools]
        return tokenizer.encode_chat(messages, options, tools=declarations, most=most)
    try:
        return tokenizer.encode_chat(_in_words(messages, tools), options, most=most)
    except ContextTooLong:
        raise
    except RequestError:
        if not tools or not messages or messages[0].get("role") != "user":
            raise
        # Some templates (Gemma 2) refuse system messages, and this one was ours.
        written = _in_words(messages, tools, in_question=True)
        return tokenizer.encode_chat(written, options, most=most)


def _with_parsed_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates take the arguments of a call as an object; OpenAI's form has their text."""
    if not isinstance(message, Mapping):
        raise RequestError(f"message {message!r:.60} is no object")
    unknown = set(message) - {"role", "content", *OPTIONAL_KEYS, *TOOL_KEYS}
    if unknown:
        raise RequestError(f"message {message!r:.60} holds the unknown key {min(unknown)!r}")
    calls = message.get("tool_calls")
    if calls is None:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"tool_calls is {calls!r:.60}; give a list of calls")
    parsed = [_parsed_call(call) for call in calls]
    return {**message, "content": message.get("content") or "", "tool_calls": parsed}


def _parsed_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"tool call {call!r:.60} lacks the object 'function'")
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the arguments {arguments!r:.60} are no JSON: {error}") from error
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise RequestError(f"tool call {call!r:.60} needs a name and an object of arguments")
    return {**call, "function": {"name": name, "arguments": arguments}}


def _in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, in_question: bool = False
) -> list[dict[str, Any]]:
    """The conversation for a template that knows nothing of tools.

    in_question: what is said of them stands in the first message, whoever speaks there.
    """
    written = [_without_tools(message) for message in messages]
    if not tools or not written:
        return _joined_results(written)
    lines = [json.dumps(tool.declaration["function"], ensure_ascii=False) for tool in tools]
    example = TAGGED.write("name", '{"argument": "value"}')
    words = _INSTRUCTIONS.format(declarations="\n".join(lines), example=example)
    first = written[0]
    if first.get("role") == "system":
        written = [{**first, "content": f"{first['content']}\n\n{words}"}, *written[1:]]
    elif in_question:
        written = [{**first, "content": f"{words}\n\n{first['content']}"}, *written[1:]]
    else:
        written = [{"role": "system", "content": words}, *written]
    return _joined_results(written)


def _without_tools(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, str):
        raise RequestError(f"message {message!r:.60} has no text as its content")
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        TAGGED.write(
            call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
        )
        for call in message.get("tool_calls", ())
    ]
    text = [content] if content or not calls else []
    optional = {key: message[key] for key in OPTIONAL_KEYS & message.keys()}
    return {"role": role, "content": "\n".join([*text, *calls]) if calls else content, **optional}


def _joined_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results that follow each other share a message: many templates want the roles in turns."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if all(str(m.get("content")).startswith("<tool_response>") for m in (last, message)):
            joined[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined
