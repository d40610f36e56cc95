"""/openapi.json says what answers look like: of every route, and as they are."""

import jsonschema
import pytest

from tests.serving import chat_body

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANSWERS = [
    (CHAT, chat_body(max_tokens=3)),
    (CHAT, chat_body(max_tokens=1, num_draft_tokens=0)),
    (CHAT, chat_body(n=2, temperature=1, logprobs=True, top_logprobs=2, return_token_ids=True)),
    (CHAT, chat_body(tools=[TOOL], tool_choice="required", ignore_eos=False, max_tokens=100)),
    (TEXT, {"prompt": "abc", "max_tokens": 3}),
    (CHAT, chat_body(max_tokens=3, receipt=True)),
    (TEXT, {"prompt": "abc", "max_tokens": 3, "receipt": True}),
    (TEXT, {"prompt": ["abc", "the"], "echo": True, "logprobs": 2, "return_token_ids": True}),
    ("/tokenize", {"prompt": "abc"}),
    ("/tokenize", {"messages": chat_body()["messages"], "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/messages/count_tokens", {"messages": chat_body()["messages"]}),
    ("/v1/models", None),
    ("/v1/models/tiny", None),
    ("/health", None),
    ("/ready", None),
    ("/version", None),
]


@pytest.fixture(scope="module")
def document(server):
    return server.client.get("/openapi.json").json()


def operations(document):
    return {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_says_what_it_answers(document):
    found = operations(document)
    assert ("post", CHAT) in found
    for name, operation in found.items():
        content = operation["responses"]["200"]["content"]
        for schema in (media["schema"] for media in content.values()):
            assert "$ref" in schema or schema == {"type": "string"}, name


def closed(schema):
    """Allows no field but those that are named."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema else {}
    return {name: closed(one) for name, one in schema.items()} | more


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_answers_are_what_it_says(server, document, path, body):
    response = server.client.get(path) if body is None else server.post(path, **body)
    assert response.status_code == 200, response.text
    route = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    operation = document["paths"][route]["get" if body is None else "post"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    whole = closed({**schema, "components": document["components"]})
    jsonschema.validate(response.json(), whole)
