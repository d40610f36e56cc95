"""Files of prompts: every command reads the same rows, and asks the same of the target."""

import json

import pytest
from transformers import AutoTokenizer

from blockdraft.bench.decode import encode_prompt
from blockdraft.bench.workload import read_workload
from blockdraft.core.conversations import Conversation, holds_conversation, read_conversation
from blockdraft.core.errors import ConfigError
from blockdraft.core.request import SamplingParams
from blockdraft.data.prompts import prompt_ids, read_prompts
from blockdraft.diagnose.explain.prompts import read_questions
from blockdraft.diagnose.explain.report import encode_question
from blockdraft.proof.cases import encode
from blockdraft.proof.corpus import read_prompts as read_proof_prompts
from blockdraft.text.tokenizer import load_tokenizer
from tests.tiny import tiny_target_folder

SYSTEM = {"role": "system", "content": "the abc"}
FIRST, SECOND = {"role": "user", "content": "abc"}, {"role": "user", "content": "the end"}
ANSWER = {"role": "assistant", "content": "fox"}


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"prompt": "a"}, Conversation(("a",))),
        ({"turns": ["a", "b"], "prompt": "c"}, Conversation(("a", "b"))),
        (
            {"messages": [SYSTEM, FIRST, ANSWER, SECOND]},
            Conversation(("abc", "the end"), "the abc"),
        ),
        ({"conversations": [{"from": "human", "value": "a"}]}, Conversation(("a",))),
        ({"prompt": [FIRST]}, Conversation(("abc",))),
        ({"messages": None, "question": "a"}, Conversation(("a",))),
        ({"instruction": "a", "input": "b"}, Conversation(("a\n\nb",))),
        ({"problem": "a", "query": "b"}, Conversation(("a",))),
        ({"question": "a", "system": "s"}, Conversation(("a",), "s")),
        ({"messages": [SYSTEM, FIRST], "system": "s"}, Conversation(("abc",), "the abc")),
        ({"prompt": "a", "system": " "}, Conversation(("a",))),
    ],
)
def test_the_first_form_that_a_row_has_counts(tmp_path, row, read):
    assert holds_conversation(row)
    assert read_conversation(row, tmp_path, 1) == read


def test_a_row_without_a_conversation_is_refused_with_its_line(tmp_path):
    assert not holds_conversation({"text": "a"})
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 7: it holds no prompt"):
        read_conversation({"text": "a"}, tmp_path / "p.jsonl", 7)


def test_what_is_null_counts_as_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    names = ("id", "category", "kind", "raw", "take", "thinking", "system", "turns", "tools")
    row = dict.fromkeys(names) | {"prompt": "abc"}
    path.write_text(json.dumps(row), encoding="utf-8")
    (measured,), (proven,), (asked,) = (
        read(path) for read in (read_workload, read_proof_prompts, read_questions)
    )
    assert (measured.id, measured.category) == (proven.id, proven.kind) == ("rows-1", "rows")
    assert (asked.id, asked.category) == ("1", None)
    assert not proven.raw


ROWS = [
    {"messages": [SYSTEM, FIRST, ANSWER, SECOND]},
    {"turns": ["abc", "the end"], "system": "the abc"},
]


@pytest.mark.parametrize("row", ROWS, ids=["in the chat", "beside the turns"])
@pytest.mark.parametrize("has_template", [True, False], ids=["chat", "no template"])
def test_a_system_message_is_asked_by_every_command(tmp_path, row, has_template):
    folder = tiny_target_folder(tmp_path)
    if not has_template:
        (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(folder)
    expected = (
        tokenizer.encode_chat([SYSTEM, FIRST])
        if has_template
        else tokenizer.encode("the abc\n\nabc")
    )
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    params = SamplingParams()

    def check(ids, params):
        """Everything fits."""

    (measured,), (asked,) = read_workload(path), read_questions(path)
    (proven,) = read_proof_prompts(path)
    assert measured.later == ("the end",)
    assert encode_prompt(tokenizer, check, measured, params) == expected
    assert encode_question(tokenizer, check, asked, params, raw=False).prompt_ids == expected
    assert list(encode(tokenizer, proven)) == expected
    if has_template:  # answers to train on need one
        (trained,) = read_prompts(path)
        assert list(prompt_ids(AutoTokenizer.from_pretrained(folder), trained)) == expected
