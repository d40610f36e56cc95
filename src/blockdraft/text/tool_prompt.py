"""How a conversation with tools is put to a model: by its chat template, or in our own words."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.text.call_syntax import (
    BARE,
    DEEPSEEK,
    DEEPSEEK_V31,
    KIMI,
    MISTRAL,
    MISTRAL_LIST,
    TAGGED,
    JsonSyntax,
)
from blockdraft.text.harmony import harmony_marks
from blockdraft.text.python_syntax import LFM2, OLMO, PYTHON, PythonSyntax
from blockdraft.text.tokenizer import OPTIONAL_KEYS, TOOL_KEYS, Tokenizer
from blockdraft.text.tools import Tool
from blockdraft.text.xml_syntax import GLM, GLM_47, MINIMAX, XML, XmlSyntax

AnySyntax = JsonSyntax | PythonSyntax | XmlSyntax

_SIGNS: tuple[tuple[tuple[str, ...], AnySyntax | None], ...] = (
    (("<tool_call>", "<function=", "<parameter="), XML),
    (("<tool_call>", "<function="), None),
    (("<tool_call>", "</arg_key><arg_value>"), GLM_47),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>", '"arguments'), TAGGED),
    (("<minimax:tool_call>", "<invoke name="), MINIMAX),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS] [",), replace(MISTRAL_LIST, section="[TOOL_CALLS] [")),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    # It leaves out the calls of a message that has a content, if only an empty one.
    (("<｜tool▁sep｜>", "'assistant' and message['content'] is none"), None),
    (("<｜tool▁sep｜>", "```json"), DEEPSEEK),
    (("<｜tool▁sep｜>",), DEEPSEEK_V31),
    (("<|tool_call_argument_begin|>",), KIMI),
    (("<function_calls>", "<invoke "), None),
    (("<function_calls>",), OLMO),
    (("[func_name1(",), PYTHON),
    (('"parameters": dictionary',), BARE),
)
"""What stands in a chat template that teaches a syntax; the first that fits is it."""
_LFM2_SIGN = "List of tools: "
"""Older templates of LFM2 show tools and no calls, which its vocabulary has marks for."""

_INSTRUCTIONS = """You may call these functions to answer. Each line describes one:
{declarations}
To call a function, write its name and its arguments in this form:
{example}"""
_RESULTS = """
The result comes back in the next message, between <tool_response> and </tool_response>."""
_JOINS_ARGUMENTS = re.compile(r"\['arguments'\]\s*\+")


def native_syntax(tokenizer: Tokenizer) -> AnySyntax | None:
    """The syntax that the chat template teaches, if it shows calls in a way that is known here."""
    source = tokenizer.template_source or ""
    if _LFM2_SIGN in source and (LFM2.marks[0] in source or tokenizer.mark_ids(LFM2.marks)):
        return LFM2
    found = (syntax for signs, syntax in _SIGNS if all(sign in source for sign in signs))
    syntax = next(found, None)
    return syntax if _shows_tools(source) or syntax in (DEEPSEEK, DEEPSEEK_V31) else None


def _shows_tools(source: str) -> bool:
    return re.search(r"\btools\b", source) is not None


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
    become messages of the user. DeepSeek's own templates know calls and results, and no tools.

    Raises:
        RequestError, ContextTooLong: as Tokenizer.encode_chat, or a call or a result is malformed.
    """
    messages = [_with_parsed_calls(message) for message in messages]
    syntax = native_syntax(tokenizer)
    if syntax is not None or harmony_marks(tokenizer):
        source = tokenizer.template_source or ""
        if syntax is not None:
            as_text = _JOINS_ARGUMENTS.search(source) is not None
            messages = list(_fitted(messages, syntax.call_id, as_text=as_text))
        if isinstance(syntax, PythonSyntax) and "tool_calls" not in source:
            messages = [_with_written_calls(message, syntax) for message in messages]
        if isinstance(syntax, JsonSyntax) and not _shows_tools(source):
            messages = _described(messages, tools, syntax)
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
        raise RequestError(f"message {message!r:.60} is not an object")
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
            raise RequestError(
                f"the arguments {arguments!r:.60} are not valid JSON: {error}"
            ) from error
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise RequestError(f"tool call {call!r:.60} needs a name and an object of arguments")
    # Clients may leave out the type, and DeepSeek's templates write it.
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _fitted(
    messages: Sequence[Mapping[str, Any]], call_id: str, *, as_text: bool
) -> Iterator[Mapping[str, Any]]:
    """Calls with ids that the template takes, and their arguments as text if it takes these."""
    ids: dict[object, str] = {}
    num_calls = 0
    for message in messages:
        fitted = dict(message)
        if "tool_calls" in message:
            calls = fitted["tool_calls"] = []
            for call in message["tool_calls"]:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                if call_id:
                    ids[call.get("id")] = call_id.format(name=name, index=num_calls)
                    call = {**call, "id": ids[call.get("id")]}
                if as_text:
                    text = json.dumps(arguments, ensure_ascii=False)
                    call = {**call, "function": {"name": name, "arguments": text}}
                calls.append(call)
                num_calls += 1
        if call_id and message.get("role") == "tool":
            answered = message.get("tool_call_id")
            if answered not in ids:  # the beginning of the conversation was cut off
                name = message.get("name") or "unknown"
                ids[answered] = call_id.format(name=name, index=num_calls)
                num_calls += 1
            fitted["tool_call_id"] = ids[answered]
        yield fitted


def _with_written_calls(message: Mapping[str, Any], syntax: PythonSyntax) -> dict[str, Any]:
    """A message whose calls are part of its text."""
    written = dict(message)
    if calls := written.pop("tool_calls", None):
        functions = (call["function"] for call in calls)
        try:
            text = syntax.write((one["name"], one["arguments"]) for one in functions)
        except RecursionError as error:  # it takes a little more than reading them
            raise RequestError("the arguments of a call are nested too deeply") from error
        written["content"] = f"{message['content']}{text}"
    return written


def _in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, in_question: bool = False
) -> list[Mapping[str, Any]]:
    """The conversation for a template that knows nothing of tools; see _described."""
    written = [_without_tools(message) for message in messages]
    return _joined_results(_described(written, tools, TAGGED, in_question=in_question))


def _described(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    syntax: JsonSyntax,
    *,
    in_question: bool = False,
) -> list[Mapping[str, Any]]:
    """The conversation with a description of the tools.

    in_question: it stands in the first message, whoever speaks there.
    """
    if not tools or not messages:
        return list(messages)
    lines = [json.dumps(tool.declaration["function"], ensure_ascii=False) for tool in tools]
    example = syntax.write("name", '{"argument": "value"}')
    words = _INSTRUCTIONS.format(declarations="\n".join(lines), example=example)
    words += _RESULTS if syntax is TAGGED else ""
    first, *rest = messages
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n\n{words}"}, *rest]
    if in_question:
        return [{**first, "content": f"{words}\n\n{first['content']}"}, *rest]
    return [{"role": "system", "content": words}, first, *rest]


def _without_tools(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, str):
        raise RequestError(f"message {message!r:.60} has content that is not text")
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


def _joined_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Results that follow each other share a message: many templates want the roles in turns."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if all(str(m.get("content")).startswith("<tool_response>") for m in (last, message)):
            joined[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined
