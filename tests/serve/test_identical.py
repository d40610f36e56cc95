"""The same prompts, streamed or not, drafted or plain, alone or in a batch of 32: same texts."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.pair import default_llm, prompts
from tests.serving import Running, chat_body, running_server

pytestmark = [pytest.mark.slow, pytest.mark.model]

CHAT = "/v1/chat/completions"
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def server():
    with running_server(default_llm(), patience=None, request_seconds=3600.0) as running:
        yield running


def whole(server: Running, prompt: str, **fields: Any) -> tuple[str, str]:
    choice = server.chat(prompt, ignore_eos=False, **fields).json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def streamed(server: Running, prompt: str, **fields: Any) -> tuple[str, str]:
    text, end = "", ""
    for event in server.events(CHAT, **chat_body(prompt, ignore_eos=False, **fields)):
        (choice,) = event["choices"]
        text += choice["delta"].get("content") or ""
        end = choice["finish_reason"] or end
    return text, end


def in_a_batch(ask: Any, server: Running, **fields: Any) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(len(prompts())) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, **fields), prompts()))


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "seed": 11}], ids=["greedy", "0.7"])
def test_texts_are_identical(server, fields):
    fields = {**fields, "max_tokens": MAX_TOKENS}
    alone = [whole(server, prompt, **fields, num_draft_tokens=0) for prompt in prompts()]
    assert len({text for text, _ in alone}) > len(alone) // 2
    for ask in (whole, streamed):
        for most in (None, 0, 3):
            assert in_a_batch(ask, server, **fields, num_draft_tokens=most) == alone
    assert [streamed(server, prompt, **fields) for prompt in prompts()] == alone
