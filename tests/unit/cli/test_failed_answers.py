"""What commands do with an answer that ended with an error, and with input that is no text."""

import json
from types import SimpleNamespace

import pytest
import torch

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import FAILED, INTERRUPTED, MISTAKE, Refusal
from blockdraft.engine.completion import Chunk, Completion, Generation, Timings
from blockdraft.measure.acceptance import AcceptanceStats
from tests.command_line import run

FAULT = "the token at position 3 could not be chosen"
TIMES = Timings(first_token=1.0, decode=1.0, total=2.0, tokens_per_second=1.0)


def answered(error=None):
    reason = "stop" if error is None else "error"
    return Completion(0, (1, 2), "half", reason, 7, None, AcceptanceStats(), TIMES, error=error)


class FailingLLM:
    """Each of its answers but the last ends with an error."""

    config = LLMConfig()
    drafter_folder = None
    dtype = torch.float32
    device = "cpu"
    tokenizer = SimpleNamespace(
        encode=lambda text, most: list(text),
        encode_chat=lambda messages, most: messages,
        chat_template="",
        thinks=False,
    )
    engine = SimpleNamespace(limits=SimpleNamespace(max_tokens=100))

    def __init__(self, *errors):
        self.answers = [*map(answered, errors), answered()]
        self.asked = []

    def generate(self, prompt, params, *, stream=False):
        self.asked.append(prompt)
        answer = self.answers.pop(0)
        chunk = Chunk(0, 0, answer.text, answer.token_ids, answer)
        return iter([chunk]) if stream else Generation((1,), (answer,), params)

    chat = generate


def served(monkeypatch, *errors):
    llm = FailingLLM(*errors)
    monkeypatch.setattr("blockdraft.cli.options.load_llm", lambda config, check: llm)
    return llm


@pytest.mark.parametrize("options", [[], ["--smooth"]])
def test_what_is_said_of_an_interrupted_answer_has_its_own_line(monkeypatch, options):
    def interrupted(prompt, params, *, stream):
        yield Chunk(0, 0, "half", (1, 2), None)
        raise KeyboardInterrupt

    monkeypatch.setattr(served(monkeypatch), "generate", interrupted)
    result = run("generate", "hi", *options)
    assert (result.stdout, result.stderr) == ("half\n", "blockdraft: interrupted\n")
    assert result.exit_code == INTERRUPTED


@pytest.mark.parametrize(("error", "status"), [(FAULT, FAILED), (Refusal("too complex"), MISTAKE)])
@pytest.mark.parametrize("options", [[], ["--smooth"]])
def test_generate_prints_what_there_is_and_fails(monkeypatch, tmp_path, error, status, options):
    served(monkeypatch, error)
    receipt = tmp_path / "receipt.json"
    result = run("generate", "hi", "--receipt", receipt, *options)
    assert result.exit_code == status
    assert result.stdout == "half\n"
    last = result.stderr.splitlines()[-1]
    assert last == f"blockdraft: sample 0 ended with an error: {error}"
    assert not receipt.exists()


def test_generate_tells_the_error_as_json_too(monkeypatch):
    served(monkeypatch, FAULT)
    result = run("generate", "hi", "--json")
    assert result.exit_code == FAILED
    found = json.loads(result.stdout)
    assert (found["text"], found["finish_reason"], found["error"]) == ("half", "error", FAULT)
    assert found["completions"][0]["error"] == FAULT


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_chat_forgets_a_turn_that_failed(monkeypatch, options):
    llm = served(monkeypatch, FAULT)
    result = run("chat", *options, input="one\ntwo\n")
    assert result.exit_code == 0, result.output
    assert f"[{FAULT}; this turn is forgotten]" in result.stderr
    assert [[turn["content"] for turn in asked] for asked in llm.asked] == [["one"], ["two"]]
    if options:
        failed, answered = map(json.loads, result.stdout.splitlines())
        assert failed["error"] == FAULT
        assert "error" not in answered


def test_chat_refuses_what_is_no_text(monkeypatch):
    served(monkeypatch)
    result = run("chat", input=b"caf\xe9\n")
    assert result.exit_code == MISTAKE
    assert "bytes that are not UTF-8" in result.stderr.splitlines()[-1]
