"""Receipts of the server: whole and streamed, of every choice, verified by another LLM."""

import asyncio
import json
import threading

import pytest

from blockdraft.core.receipt import read_answers
from blockdraft.server.receipts import Receipts
from tests.serving import PATIENCE, chat_body, error_of
from tests.small_llm import load_llm

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SAMPLED = {"temperature": 1.0, "n": 2, "top_k": 50, "presence_penalty": 0.5, "stop": ["zz"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def auditor(folders):
    return load_llm(folders)


def assert_all_genuine(auditor, choices, num):
    receipts = [choice["receipt"] for choice in choices if "receipt" in choice]
    assert len(receipts) == num
    for receipt in receipts:
        assert auditor.verify(receipt).verdict == "genuine"
        wrong = [*receipt["token_ids"][:-1], (receipt["token_ids"][-1] + 1) % 250]
        assert auditor.verify(receipt | {"token_ids": wrong}).verdict == "altered"


def test_whole_answers_have_a_receipt_for_every_choice(server, auditor, tmp_path):
    chat = server.chat(receipt=True, **SAMPLED).json()
    assert_all_genuine(auditor, chat["choices"], 2)
    assert chat["choices"][1]["receipt"]["index"] == 1
    assert chat["choices"][0]["receipt"]["text"] == chat["choices"][0]["message"]["content"]
    text = server.complete(["the abc", "ab"], receipt=True, **SAMPLED).json()
    assert_all_genuine(auditor, text["choices"], 4)
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(text), encoding="utf-8")
    assert read_answers(path) == [choice["receipt"] for choice in text["choices"]]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (TEXT, {"prompt": "the abc"})])
def test_a_stream_has_it_in_the_last_chunk_of_a_choice(server, auditor, path, body):
    events = server.events(path, **{**body, **SAMPLED, "receipt": True})
    choices = [choice for event in events for choice in event["choices"]]
    assert_all_genuine(auditor, choices, 2)
    for choice in choices:
        assert ("receipt" in choice) == (choice["finish_reason"] is not None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "the abc", "max_output_tokens": 24}),
        (MESSAGES, {"messages": chat_body()["messages"], "max_tokens": 24}),
    ],
)
def test_the_other_chats_have_it_beside_the_answer(server, auditor, path, body, tmp_path):
    body = {**body, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    assert "receipt" not in server.post(path, **body).json()
    answer = server.post(path, **body, receipt=True).json()
    assert_all_genuine(auditor, [answer], 1)
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer), encoding="utf-8")
    assert read_answers(file) == [answer["receipt"]]
    lines = server.post(path, **body, receipt=True, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    holders = [event.get("response", event) for event in events]
    assert [one["receipt"] for one in holders if "receipt" in one] == [answer["receipt"]]


def test_tool_calls_and_formats_are_genuine(server, auditor):
    options = {"tools": [TOOL], "tool_choice": "required", "ignore_eos": False, "max_tokens": 60}
    assert_all_genuine(auditor, server.chat(receipt=True, **options).json()["choices"], 1)
    schema = {"type": "json_object"}
    answer = server.chat(receipt=True, response_format=schema, ignore_eos=False, max_tokens=30)
    assert_all_genuine(auditor, answer.json()["choices"], 1)


def test_there_is_none_unless_it_is_asked_for(server):
    for fields in ({}, {"receipt": False}, {"receipt": None}):
        assert "receipt" not in server.chat(**fields).json()["choices"][0]


def test_a_prompt_that_is_only_scored_has_none(server):
    refused = server.complete("abc", echo=True, max_tokens=0, logprobs=1, receipt=True)
    assert "leave out receipt" in error_of(refused, 400)["message"]
    assert error_of(server.chat(receipt="yes"), 400)["param"] == "receipt"


def test_an_echo_is_no_part_of_it(server, auditor):
    choices = server.complete("the abc", echo=True, receipt=True).json()["choices"]
    assert_all_genuine(auditor, choices, 1)
    assert choices[0]["text"] == "the abc" + choices[0]["receipt"]["text"]


def test_the_environment_is_found_out_once_however_many_requests_leave():
    asked, gate = [], threading.Event()

    def find():
        asked.append(True)
        assert gate.wait(PATIENCE)
        if len(asked) == 1:
            raise OSError("the disk")
        return "the environment"

    async def story():
        receipts = Receipts("tiny", find)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(receipts.prepare(), 0.01)
        waiting = asyncio.gather(receipts.prepare(), receipts.prepare(), return_exceptions=True)
        await asyncio.sleep(0)
        gate.set()
        assert [str(error) for error in await waiting] == ["the disk"] * 2
        for _ in range(2):  # a fault may pass
            await receipts.prepare()
        assert (len(asked), receipts._environment) == (2, "the environment")

    asyncio.run(asyncio.wait_for(story(), PATIENCE))
