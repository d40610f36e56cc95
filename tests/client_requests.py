"""Requests as clients send them, and what each must get. The bodies are theirs to the letter.

Those of LangChain, LlamaIndex and litellm that name a version were logged between client and
server: langchain-openai 1.7.3, llama-index-llms-openai-like 0.8.1, litellm 1.106.2, openai 2.54.0.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "json", "call", "call or json", "choice", "number"]
Json = dict[str, Any]

CITIES = ("Rome", "Oslo")
SCHEMA: Json = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": SCHEMA,
    },
}
OPEN_WEATHER = {
    **WEATHER,
    "function": {
        **WEATHER["function"],
        "parameters": {k: v for k, v in SCHEMA.items() if k != "additionalProperties"},
    },
}
"""As clients describe a Python function: other arguments are not ruled out."""
STRICT_WEATHER = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "Trip", "schema": SCHEMA}}
ARGUMENTS = '{"city": "Rome", "days": 1}'
USER = {"role": "user", "content": "How is the weather?"}


def called(arguments: Any = ARGUMENTS, **more: Any) -> Json:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **more}


def turns(*messages: Json) -> list[Json]:
    return [USER, *messages]


def parts(*content: Any) -> list[Json]:
    return [{"role": "user", "content": list(content)}]


def result(content: Any = "sunny", **more: Any) -> Json:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **more}


@dataclass(frozen=True)
class Accepted:
    """What the answer is, what of the request the model reads, and what is told to be ignored."""

    kind: Kind = "text"
    reads: tuple[str, ...] = ()
    reads_not: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Which parameter is blamed, and words of the reason."""

    param: str
    reason: str


@dataclass(frozen=True)
class Sent:
    """A request; without messages and prompt it asks an ordinary question."""

    client: str
    body: Json
    expected: Accepted | Refused = field(default_factory=Accepted)

    @property
    def is_chat(self) -> bool:
        return "prompt" not in self.body

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


TEXT = Accepted()
JSON = Accepted("json")
CALL = Accepted("call")

OPENAI = [
    Sent("openai: the shortest", {"messages": turns()}),
    Sent(
        "openai: everything null",
        dict.fromkeys(
            (
                *("audio", "frequency_penalty", "function_call", "functions", "logit_bias"),
                *("logprobs", "max_completion_tokens", "metadata", "modalities", "n"),
                *("parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key"),
                *("reasoning_effort", "response_format", "safety_identifier", "seed"),
                *("service_tier", "stop", "store", "stream", "stream_options", "temperature"),
                *("tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity"),
                *("web_search_options", "max_tokens", "extra_unknown"),
            )
        ),
    ),
    Sent(
        "openai: hints",
        {
            "reasoning_effort": "low",
            "verbosity": "low",
            "service_tier": "flex",
            "store": True,
            "metadata": {"run": "7"},
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "safety_identifier": "u",
            "user": "u",
            "prediction": {"type": "content", "content": "It is sunny."},
        },
    ),
    Sent("openai: stream with usage", {"stream": True, "stream_options": {"include_usage": True}}),
    Sent(
        "openai: stream without obfuscation",
        {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}},
    ),
    Sent("openai: options of a stream without one", {"stream_options": {"include_usage": True}}),
    Sent("openai: no top logprobs", {"logprobs": False, "top_logprobs": 0}),
    Sent("openai: top logprobs of nothing", {"top_logprobs": 0}),
    Sent("openai: logprobs", {"logprobs": True, "top_logprobs": 0, "n": 2, "seed": 3}),
    Sent(
        "openai: top logprobs without logprobs",
        {"top_logprobs": 3},
        Refused("top_logprobs", "needs logprobs"),
    ),
    Sent(
        "openai: parse",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Trip", "strict": True, "schema": SCHEMA},
            }
        },
        JSON,
    ),
    Sent("openai: parse, streamed", {"response_format": AS_SCHEMA, "stream": True}, JSON),
    Sent(
        "openai: what parse gave, sent back",
        {
            "messages": [
                USER,
                {
                    "content": '{"city": "Rome", "days": 1}',
                    "refusal": None,
                    "role": "assistant",
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                    "parsed": {"city": "Rome", "days": 1},
                },
                {"role": "user", "content": "and the other one"},
            ]
        },
        Accepted(reads=('{"city": "Rome", "days": 1}', "and the other one"), reads_not=("parsed",)),
    ),
    Sent(
        "openai: parsed calls, sent back",
        {
            "messages": turns(
                {
                    "content": None,
                    "refusal": None,
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "function": {
                                "arguments": ARGUMENTS,
                                "name": "get_weather",
                                "parsed_arguments": {"city": "Rome", "days": 1},
                            },
                            "type": "function",
                            "index": 0,
                        }
                    ],
                    "parsed": None,
                },
                result(),
            ),
            "tools": [STRICT_WEATHER],
            "tool_choice": "none",
        },
        Accepted(reads=(ARGUMENTS, "sunny"), reads_not=("parsed_arguments",)),
    ),
    Sent(
        "openai: annotations and citations, sent back",
        {
            "messages": turns(
                {
                    "role": "assistant",
                    "content": "Rome is sunny.",
                    "annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}],
                },
                {"role": "user", "content": "sure?"},
            )
        },
        Accepted(reads=("Rome is sunny.", "sure?"), reads_not=("url_citation",)),
    ),
    Sent(
        "openai: a refusal, sent back",
        {
            "messages": turns(
                {"role": "assistant", "content": None, "refusal": "I cannot."},
                {"role": "user", "content": "please"},
            )
        },
        Accepted(reads=("I cannot.", "please")),
    ),
    Sent(
        "openai: a part that refuses",
        {
            "messages": turns(
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
                {"role": "user", "content": "please"},
            )
        },
        Accepted(reads=("I cannot.",)),
    ),
    Sent(
        "openai: names on every role",
        {
            "messages": [
                {"role": "developer", "content": "Be brief.", "name": "boss"},
                {"role": "user", "content": "Hello.", "name": "ann"},
                {"role": "assistant", "content": "Hi.", "name": "bot"},
                {"role": "user", "content": "Well?", "name": "ann"},
            ]
        },
        Accepted(reads=("system\nBe brief.", "Hello.", "Hi.", "Well?"), reads_not=("ann", "boss")),
    ),
    Sent("openai: a format that is none", {"response_format": {"type": "text"}}),
    Sent(
        "openai: a tool that must be called",
        {"tools": [STRICT_WEATHER], "tool_choice": FORCED, "parallel_tool_calls": False},
        CALL,
    ),
    Sent(
        "openai: tools, streamed", {"tools": [WEATHER], "tool_choice": FORCED, "stream": True}, CALL
    ),
    Sent(
        "openai: tools and a format",
        {"tools": [WEATHER], "response_format": AS_SCHEMA, "parallel_tool_calls": False},
        Accepted("call or json"),
    ),
    Sent(
        "openai: a forced tool and a format",
        {"tools": [WEATHER], "tool_choice": FORCED, "response_format": AS_SCHEMA},
        CALL,
    ),
    Sent("openai: a call is optional", {"tools": [WEATHER], "tool_choice": "auto"}),
    Sent(
        "openai: a custom tool",
        {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
        Refused("tools[0].type", "function"),
    ),
    Sent(
        "openai: allowed tools",
        {
            "tools": [WEATHER, {"type": "function", "function": {"name": "wait"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [FORCED]},
            },
            "parallel_tool_calls": False,
        },
        CALL,
    ),
    Sent(
        "openai: allowed tools of the other API",
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FORCED]},
        },
        Refused("tool_choice", "give allowed_tools the mode auto or required"),
    ),
    Sent(
        "openai: functions, as of 2023",
        {"functions": [WEATHER["function"]], "function_call": "auto"},
        Refused("functions", "give tools instead"),
    ),
    Sent(
        "openai: a function by name, as of 2023",
        {"function_call": {"name": "get_weather"}},
        Refused("function_call", "tool_choice"),
    ),
    Sent(
        "openai: turns as of 2023",
        {
            "messages": turns(
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "get_weather", "arguments": ARGUMENTS},
                },
                {"role": "function", "name": "get_weather", "content": "sunny"},
            )
        },
        Accepted(reads=("get_weather", ARGUMENTS, "sunny")),
    ),
    Sent(
        "openai: a picture",
        {
            "messages": parts(
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            )
        },
        Refused("messages[0].content[1].type", "text only"),
    ),
    Sent(
        "openai: sound",
        {"messages": parts({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})},
        Refused("messages[0].content[0].type", "text only"),
    ),
    Sent(
        "openai: a file",
        {"messages": parts({"type": "file", "file": {"file_id": "f"}})},
        Refused("messages[0].content[0].type", "text only"),
    ),
    Sent(
        "openai: a spoken answer, sent back",
        {"messages": turns({"role": "assistant", "audio": {"id": "a"}}, USER)},
        Refused("messages[1].audio", "it is not supported"),
    ),
    Sent(
        "openai: speech",
        {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
        Refused("modalities[1]", "text"),
    ),
    Sent("openai: a search", {"web_search_options": {}}, Refused("web_search_options", "search")),
    Sent(
        "openai: text completion",
        {
            "prompt": "Once",
            "best_of": 1,
            "echo": False,
            "logprobs": None,
            "suffix": None,
            "n": 1,
            "stop": None,
        },
    ),
    Sent(
        "openai: fill in the middle",
        {"prompt": "a", "suffix": "b"},
        Refused("suffix", "before a suffix"),
    ),
]

LANGCHAIN = [
    Sent("langchain 1.7: invoke", {"max_completion_tokens": 8, "stream": False}),
    Sent(
        "langchain 1.7: invoke with log-probabilities",
        {
            "messages": [{"content": "Be brief.", "role": "system"}, USER],
            "logprobs": True,
            "max_completion_tokens": 8,
            "seed": 1,
            "stop": ["zzz"],
            "stream": False,
            "temperature": 0.0,
            "top_logprobs": 2,
        },
        Accepted(reads=("Be brief.",)),
    ),
    Sent(
        "langchain 1.7: stream",
        {
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    Sent(
        "langchain 1.7: a tool that must be called",
        {
            "max_completion_tokens": 200,
            "stream": True,
            "tool_choice": "required",
            "tools": [WEATHER],
        },
        CALL,
    ),
    Sent(
        "langchain 1.7: a tool loop",
        {
            "messages": turns(
                {"content": None, "role": "assistant", "tool_calls": [called()]}, result()
            ),
            "max_completion_tokens": 8,
            "stream": False,
            "tools": [OPEN_WEATHER],
        },
        Accepted(reads=(ARGUMENTS, "sunny")),
    ),
    Sent(
        "langchain: trimmed, so that a result lost its call",
        {"messages": [result(), {"role": "user", "content": "So?"}]},
        Accepted(reads=("sunny", "So?")),
    ),
    Sent(
        "langchain: blocks of content",
        {
            "messages": turns(
                {"role": "assistant", "content": [{"type": "text", "text": "Rome.", "index": 0}]},
                {"role": "user", "content": ["plain", {"type": "text", "text": " text"}]},
            )
        },
        Accepted(reads=("Rome.", "plain text")),
    ),
    Sent(
        "langchain 1.7: structured by a tool",
        {
            "max_completion_tokens": 200,
            "parallel_tool_calls": False,
            "stream": False,
            "tool_choice": FORCED,
            "tools": [{**WEATHER, "function": {**WEATHER["function"], "description": ""}}],
        },
        CALL,
    ),
    Sent(
        "langchain 1.7: structured by a schema",
        {
            "max_completion_tokens": 200,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "schema": {**SCHEMA, "title": "Trip"},
                    "name": "Trip",
                    "strict": True,
                },
            },
            "stream": True,
        },
        JSON,
    ),
    Sent(
        "langchain 1.7: json mode",
        {"max_completion_tokens": 8, "response_format": {"type": "json_object"}, "stream": False},
    ),
    Sent(
        "langchain 1.7: strict tools and a format",
        {
            "max_completion_tokens": 200,
            "parallel_tool_calls": False,
            "response_format": AS_SCHEMA,
            "stream": False,
            "tools": [STRICT_WEATHER],
        },
        Accepted("call or json"),
    ),
    Sent(
        "langchain 1.7: a text completion",
        {
            "prompt": "Once",
            "frequency_penalty": 0,
            "logprobs": None,
            "n": 1,
            "presence_penalty": 0,
            "seed": None,
            "stream": True,
            "temperature": 0.7,
            "top_p": 1,
        },
    ),
]

LLAMAINDEX = [
    Sent("llamaindex 0.8: chat", {"stream": False, "temperature": 0.1}),
    Sent(
        "llamaindex 0.8: a function agent",
        {
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "parallel_tool_calls": True,
            "stream": True,
            "temperature": 0.1,
            "tool_choice": "auto",
            "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": False}}],
        },
        Accepted("text", reads=("Be brief.",)),
    ),
    Sent(
        "llamaindex 0.8: a tool loop",
        {
            "messages": turns(
                {"role": "assistant", "content": None, "tool_calls": [called()]}, result()
            ),
            "parallel_tool_calls": False,
            "stream": False,
            "temperature": 0.1,
            "tool_choice": "auto",
            "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": False}}],
        },
        Accepted("text", reads=(ARGUMENTS, "sunny")),
    ),
    Sent(
        "llamaindex 0.8: structured by a tool",
        {
            "parallel_tool_calls": False,
            "stream": False,
            "temperature": 0.1,
            "tool_choice": "required",
            "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": False}}],
        },
        CALL,
    ),
    Sent(
        "llamaindex: a result in parts",
        {
            "messages": turns(
                {"role": "assistant", "content": "", "tool_calls": [called()]},
                result([{"type": "text", "text": "sunny"}], name="get_weather"),
            ),
        },
        Accepted(reads=(ARGUMENTS, "sunny")),
    ),
    Sent(
        "llamaindex: a function without arguments",
        {
            "messages": turns(
                {"role": "assistant", "content": None, "tool_calls": [called("")]}, result()
            )
        },
        Accepted(reads=('"arguments": {}', "sunny")),
    ),
    Sent("llamaindex: complete", {"prompt": "Once", "logprobs": None, "stream": False}),
]

LITELLM = [
    Sent(
        "litellm 1.106: a tool loop",
        {
            "messages": turns(
                {
                    "role": "assistant",
                    "tool_calls": [called()],
                    "provider_specific_fields": {"refusal": None},
                },
                result(name="get_weather"),
            ),
            "tools": [WEATHER],
        },
        Accepted(reads=(ARGUMENTS, "sunny"), reads_not=("provider_specific_fields",)),
    ),
    Sent(
        "litellm 1.106: a tool that must be called, as of hosted_vllm",
        {"stream": False, "tool_choice": "required", "tools": [WEATHER]},
        CALL,
    ),
    Sent("litellm 1.106: reasoning effort, as of hosted_vllm", {"reasoning_effort": "low"}),
    Sent(
        "litellm: an answer, sent back",
        {
            "messages": turns(
                {
                    "content": "Rome.",
                    "role": "assistant",
                    "tool_calls": None,
                    "function_call": None,
                    "images": [],
                    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
                    "provider_specific_fields": {"refusal": None, "citations": None},
                },
                {"role": "user", "content": "Why?"},
            )
        },
        Accepted(reads=("Rome.", "Why?"), reads_not=("hm", "citations")),
    ),
    Sent(
        "litellm: what is cached by others",
        {
            "messages": [
                {
                    "role": "system",
                    "content": [
                        {
                            "type": "text",
                            "text": "Be brief.",
                            "cache_control": {"type": "ephemeral", "ttl": "1h"},
                        }
                    ],
                    "cache_control": {"type": "ephemeral"},
                },
                USER,
            ],
            "tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}}],
            "tool_choice": FORCED,
        },
        Accepted("call", reads=("Be brief.",), reads_not=("ephemeral",)),
    ),
    Sent("litellm: no tools", {"tools": [], "tool_choice": "auto"}),
    Sent(
        "litellm: a tool is required of none",
        {"tools": [], "tool_choice": "required"},
        Refused("tool_choice", "no tools"),
    ),
    Sent("litellm: a proxy's marks", {"metadata": {"tags": ["a"], "n": 1}, "user": 5}),
]

VERCEL = [
    Sent(
        "vercel: a tool loop",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "I should look.",
                    "tool_calls": [called()],
                },
                result('{"temperature":21}'),
            ],
            "tools": [WEATHER],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        Accepted(reads=("Weather?", ARGUMENTS, '{"temperature":21}')),
    ),
    Sent(
        "vercel: generateObject",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "schema": {"$schema": "http://json-schema.org/draft-07/schema#", **SCHEMA},
                    "strict": False,
                    "name": "response",
                    "description": "A trip",
                },
            }
        },
        JSON,
    ),
    Sent(
        "vercel: tools with an output, streamed",
        {"tools": [WEATHER], "response_format": AS_SCHEMA, "stream": True},
        Accepted("call or json"),
    ),
    Sent(
        "vercel: a result without its call in the middle",
        {"messages": turns(result(), {"role": "assistant", "content": "Sunny."}, USER)},
        Accepted(reads=("sunny", "Sunny.")),
    ),
]

OTHERS = [
    Sent(
        "continue: chat",
        {"stream": True, "max_tokens": 8, "stop": ["<|im_end|>"], "messages": turns()},
    ),
    Sent(
        "continue: autocomplete",
        {"prompt": "def f(", "stop": ["\n\n", "```"], "stream": True, "raw": True},
        Accepted(ignored=("raw",)),
    ),
    Sent(
        "open webui: through a proxy",
        {
            "stream": True,
            "chat_id": "c",
            "session_id": "s",
            "features": {"web_search": False},
            "background_tasks": {},
            "files": None,
            "num_ctx": 4096,
        },
        Accepted(ignored=("chat_id", "session_id", "features", "background_tasks", "num_ctx")),
    ),
    Sent(
        "librechat: an agent",
        {
            "user": "65f0",
            "promptPrefix": "x",
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "top_p": 1,
            "stream": True,
        },
        Accepted(ignored=("promptPrefix",)),
    ),
    Sent(
        "openrouter's own fields",
        {
            "provider": {"order": ["a"]},
            "transforms": [],
            "usage": {"include": True},
        },
        Accepted(ignored=("provider", "transforms", "usage")),
    ),
    Sent(
        "openrouter's effort",
        {"reasoning": {"effort": "low"}},
        Refused("reasoning", "reasoning_effort"),
    ),
    Sent(
        "ollama: calls with an object of arguments and no id",
        {
            "messages": turns(
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
                    ],
                },
                {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
            ),
            "options": {"num_ctx": 2048},
            "keep_alive": "5m",
        },
        Accepted(reads=('{"city": "Rome"}', "sunny"), ignored=("options", "keep_alive")),
    ),
    Sent("ollama: the penalty by its other name", {"repeat_penalty": 1.0}),
    Sent(
        "ollama: a penalty by its other name",
        {"repeat_penalty": 1.1},
        Refused("repeat_penalty", "repetition_penalty"),
    ),
    Sent(
        "sillytavern: samplers at rest",
        {
            "min_p": 0.05,
            "top_k": 40,
            "repetition_penalty": 1.05,
            "typical_p": 1,
            "tfs_z": 1,
            "top_a": 0,
            "mirostat": 0,
            "dry_multiplier": 0,
            "xtc_probability": 0,
        },
    ),
    Sent(
        "sillytavern: another sampler", {"typical_p": 0.9}, Refused("typical_p", "sampling method")
    ),
    Sent("lm studio: as long as it takes", {"max_tokens": -1}, Refused("max_tokens", "-1")),
    Sent(
        "instructor: try again",
        {
            "messages": turns(
                {"role": "assistant", "content": None, "tool_calls": [called('{"city": "Bonn"}')]},
                result("Validation error: city", name="get_weather"),
            ),
            "tools": [WEATHER],
            "tool_choice": FORCED,
        },
        Accepted("call", reads=("Bonn", "Validation error")),
    ),
    Sent(
        "agents sdk: nothing chosen",
        {
            "messages": turns(
                {"role": "assistant", "tool_calls": [called()]},
                result([{"type": "text", "text": "sunny"}]),
            ),
            "store": None,
            "verbosity": None,
            "parallel_tool_calls": None,
            "tool_choice": None,
            "response_format": None,
        },
        Accepted(reads=("sunny",)),
    ),
    Sent(
        "a client of responses: its parts",
        {"messages": parts({"type": "input_text", "text": "Hello."})},
        Accepted(reads=("Hello.",)),
    ),
    Sent(
        "autogen: an empty answer in the history",
        {"messages": turns({"role": "assistant", "content": None, "name": "coder"}, USER)},
    ),
    Sent(
        "crewai: a call that was cut",
        {"messages": turns({"role": "assistant", "tool_calls": [called('{"city": "Ro')]})},
        Refused("messages", "not valid JSON"),
    ),
    Sent(
        "lm-eval: a text that is scored",
        {"prompt": "the abc", "echo": True, "logprobs": 1, "max_tokens": 0, "seed": 1234},
    ),
    Sent(
        "a gateway's long name", {"x" * 500 + "\r\nset-cookie: a": 1}, Accepted(ignored=("x" * 60,))
    ),
]

GRAMMAR = 'root ::= "Rome" | "Oslo"'
REGEX = "[0-9]{3}"

VLLM = [
    Sent("vllm: json", {"structured_outputs": {"json": SCHEMA}}, JSON),
    Sent("vllm: regex", {"structured_outputs": {"regex": REGEX}}, Accepted("number")),
    Sent("vllm: choice", {"structured_outputs": {"choice": [*CITIES]}}, Accepted("choice")),
    Sent("vllm: grammar", {"structured_outputs": {"grammar": GRAMMAR}}, Accepted("choice")),
    Sent(
        "vllm: grammar in Lark",
        {"structured_outputs": {"grammar": 'start: "Rome" | "Oslo"'}},
        Accepted("choice"),
    ),
    Sent(
        "vllm: choice, with all of its fields",
        {
            "structured_outputs": {
                "json": None,
                "regex": None,
                "choice": [*CITIES],
                "grammar": None,
                "json_object": None,
                "disable_fallback": False,
                "disable_any_whitespace": False,
                "whitespace_pattern": None,
                "structural_tag": None,
            },
            "stream": True,
        },
        Accepted("choice"),
    ),
    Sent("vllm: of a text", {"prompt": "a", "structured_outputs": {"json": SCHEMA}}, JSON),
    Sent("vllm: guided json", {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, JSON),
    Sent("vllm: guided json as text", {"guided_json": '{"enum": ["Rome"]}'}, Accepted("text")),
    Sent("vllm: guided regex", {"guided_regex": REGEX}, Accepted("number")),
    Sent("vllm: guided choice", {"guided_choice": [*CITIES]}, Accepted("choice")),
    Sent("vllm: guided grammar", {"prompt": "a", "guided_grammar": GRAMMAR}, Accepted("choice")),
    Sent(
        "vllm: two shapes in one",
        {"structured_outputs": {"regex": REGEX, "choice": [*CITIES]}},
        Refused("structured_outputs.choice", "leave one of them out"),
    ),
    Sent(
        "vllm: two shapes",
        {"guided_json": SCHEMA, "response_format": AS_SCHEMA},
        Refused("guided_json", "response_format"),
    ),
    Sent(
        "vllm: a grammar that is none",
        {"structured_outputs": {"grammar": "root ::= ("}},
        Refused("structured_outputs.grammar", "GBNF"),
    ),
    Sent(
        "vllm: compact json",
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Refused("structured_outputs.disable_any_whitespace", "only false is supported"),
    ),
    Sent(
        "vllm: tools and a choice",
        {"tools": [WEATHER], "structured_outputs": {"json": SCHEMA}},
        Accepted("call or json"),
    ),
    Sent(
        "vllm: hints",
        {
            "priority": 3,
            "request_id": "r",
            "length_penalty": 1.0,
            "use_beam_search": False,
            "spaces_between_special_tokens": True,
            "cache_salt": "s",
            "kv_transfer_params": {},
            "include_reasoning": True,
            "bad_words": [],
        },
        Accepted(ignored=("cache_salt", "kv_transfer_params", "include_reasoning")),
    ),
    Sent("vllm: beams", {"use_beam_search": True, "n": 4}, Refused("use_beam_search", "beam")),
    Sent("vllm: a penalty of beams", {"length_penalty": 2.0}, Refused("length_penalty", "beam")),
    Sent("vllm: words to avoid", {"bad_words": ["the"]}, Refused("bad_words", "logit_bias")),
    Sent(
        "vllm: a cut prompt",
        {"truncate_prompt_tokens": 5},
        Refused("truncate_prompt_tokens", "never cut"),
    ),
    Sent("vllm: scores of the prompt", {"prompt_logprobs": 1}, Refused("prompt_logprobs", "echo")),
    Sent(
        "sglang: a regular expression",
        {"regex": REGEX, "separate_reasoning": True},
        Refused("regex", "structured_outputs"),
    ),
    Sent(
        "llama.cpp: json_object with a schema",
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        JSON,
    ),
    Sent(
        "llama.cpp: json_schema with its schema beside it",
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        JSON,
    ),
    Sent(
        "tgi: a grammar as a format",
        {"response_format": {"type": "json", "value": SCHEMA}},
        Refused("response_format.type", "json_schema"),
    ),
]

REQUESTS = [*OPENAI, *LANGCHAIN, *LLAMAINDEX, *LITELLM, *VERCEL, *OTHERS, *VLLM]
