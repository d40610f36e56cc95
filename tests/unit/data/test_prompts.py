"""Prompts of files and of data sets: what a row may be, and which prompts are the same."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from blockdraft.core.errors import ConfigError
from blockdraft.data.config import DataConfig
from blockdraft.data.gathering import gather_prompts
from blockdraft.data.generate import generate_data
from blockdraft.data.prompts import Prompt, distinct, read_prompts
from blockdraft.data.shards import read_manifest, read_rows
from tests.rows import write_rows
from tests.tiny import tiny_target_folder


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    return write_rows(path, rows)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "text"}, "not a list of objects"),
        ({"messages": [{"role": "user"}]}, "a message has no text"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"has the role user \(roles: bot\)"),
        ({"messages": [{"role": "user", "content": " "}]}, "every user message is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "parts that are not text",
        ),
        ({"text": " "}, "its text is empty"),
        ({"turns": ["one", " "]}, "a turn after the first is empty or not text"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        read_prompts(write(tmp_path / "p.jsonl", [row]))
    assert "p.jsonl, line 1" in str(error.value)


def test_all_bad_rows_of_a_file_are_named(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": 1}, {"prompt": "b"}, {"text": ""}]
    with pytest.raises(ConfigError, match=r"2 lines are bad: .*line 2: .*line 4: ") as error:
        read_prompts(write(tmp_path / "p.jsonl", rows))
    assert "line 3" not in str(error.value)


@pytest.mark.parametrize("text", ["Explain rain.\nWhat?\n", '{\n  "prompt": "a"\n}\n', "p\n1\n"])
def test_a_file_of_another_form_is_told_the_right_one(tmp_path, text):
    path = tmp_path / "p.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r'none of the . lines of .*such as {"prompt": ') as error:
        read_prompts(path)
    assert "mend" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "why", "answer": "so"}, "why"),
        ({"instruction": "add", "input": "1 and 2", "output": "3"}, "add\n\n1 and 2"),
        ({"instruction": "add 1 and 2", "input": " ", "text": "### add"}, "add 1 and 2"),
        ({"problem": "p", "input": "x"}, "p"),
        ({"query": "q", "question": None}, "q"),
        ({"turns": None, "prompt": None, "question": "q"}, "q"),
        ({"prompt": "one", "question": "two"}, "one"),
        ({"turns": ["one"], "problem": "two"}, "one"),
    ],
)
def test_questions_as_data_sets_name_them(tmp_path, row, text):
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", [row]))
    assert (prompt.text, prompt.later, prompt.is_plain) == (text, (), False)


def test_a_chat_with_calls_of_tools_is_read(tmp_path):
    chat = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]},
        {"role": "tool", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "thanks"},
    ]
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", [{"messages": chat}]))
    assert prompt.turns == ("weather?", "thanks")


def test_openai_messages_of_parts_and_of_developers_are_read(tmp_path):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", [{"messages": chat}]))
    assert (prompt.system, prompt.turns) == ("be kind", ("one two",))


def test_a_prompt_of_messages_is_a_chat(tmp_path):
    told, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
    rows = [{"prompt": [told, asked]}, {"turns": ["How?"], "prompt": [asked]}, {"prompt": "Who?"}]
    path = tmp_path / "trl.jsonl"
    write_rows(path, rows)
    found = [(prompt.system, prompt.text) for prompt in read_prompts(path)]
    assert found == [("Be brief.", "Why?"), (None, "How?"), (None, "Who?")]


def test_an_id_of_null_is_none(tmp_path):
    rows = [{"id": None, "prompt": "one"}, {"id": None, "prompt": "two"}]
    assert [p.id for p in read_prompts(write(tmp_path / "p.jsonl", rows))] == ["p-0", "p-1"]


def test_prompts_under_different_system_messages_are_different():
    prompt = Prompt(id="a", set="s", text="Say  a")
    kind = replace(prompt, system="be kind")
    others = [
        replace(prompt, text="say A"),
        kind,
        replace(kind, system="Be kind"),
        replace(kind, system="be rude"),
        replace(prompt, is_plain=True),
    ]
    assert distinct([prompt, *others]) == [prompt, kind, others[3], others[4]]


def test_prompts_of_one_id_and_other_texts_are_told_apart(tmp_path):
    one = write(tmp_path / "a" / "p.jsonl", [{"id": 0, "prompt": "x"}, {"id": 0, "prompt": "y"}])
    two = write(tmp_path / "b" / "p.jsonl", [{"id": 0, "prompt": "X"}, {"id": 1, "prompt": "z"}])
    prompts, _ = gather_prompts(DataConfig(output=tmp_path / "out", prompts=(one, two)))
    assert [p.text for p in prompts] == ["x", "y", "z"]
    ids = [p.id for p in prompts]
    assert (ids[0], ids[2], len(set(ids))) == ("0", "1", 3)
    again, _ = gather_prompts(DataConfig(output=tmp_path / "out", prompts=(one,)))
    assert [p.id for p in again] == ids[:2]


@pytest.fixture
def asked(monkeypatch):
    """What a stand-in for the package datasets is asked for; `rows` is what it answers."""
    calls = SimpleNamespace(rows=[], loaded=[])

    def load_dataset(path, config, *, split, revision):
        calls.loaded.append((path, config, split) + ((revision,) if revision else ()))
        return calls.rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.delitem(sys.modules, "blockdraft.data.hub_datasets", raising=False)
    yield calls
    sys.modules.pop("blockdraft.data.hub_datasets", None)


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("org/name", ("org/name", None, "train")),
        ("name:test", ("name", None, "test")),
        ("org/name@v1", ("org/name", None, "train", "v1")),
        ("name@refs/pr/3:main:test", ("name", "main", "test", "refs/pr/3")),
        ("name:train[:100]", ("name", None, "train[:100]")),
        ("gsm8k:main:test", ("gsm8k", "main", "test")),
        ("gsm8k:main:", ("gsm8k", "main", "train")),
        ("gsm8k:main:train[5:9]", ("gsm8k", "main", "train[5:9]")),
    ],
)
def test_a_data_set_has_a_split_and_a_configuration(tmp_path, asked, name, loaded):
    asked.rows = [{"id": None, "prompt": "one"}]
    (prompt, *_), _ = gather_prompts(DataConfig(output=tmp_path / "out", datasets=(name,)))
    assert asked.loaded == [loaded]
    assert prompt.id == f"{loaded[0].split('/')[-1]}-0"


def test_a_data_set_of_too_many_parts_is_refused(tmp_path, asked):
    with pytest.raises(ConfigError, match="give NAME:CONFIG:SPLIT"):
        gather_prompts(DataConfig(output=tmp_path / "out", datasets=("a:b:c:d",)))
    assert not asked.loaded


@pytest.mark.parametrize("text", ["1 + 1?", "Add. Your code should pass these tests: ..."])
def test_each_prompt_is_asked_once_as_it_is_written(tmp_path, asked, text):
    """Whatever the set is called, and whatever the prompt says."""
    asked.rows = [{"prompt": text}]
    config = DataConfig(output=tmp_path / "out", datasets=("gsm8k_own",))
    prompts, counts = gather_prompts(config)
    assert [(p.id, p.text) for p in prompts] == [("gsm8k_own-0", text)]
    assert counts["prompts"] == 1


def test_rows_of_a_data_set_without_a_prompt_are_counted(tmp_path, asked):
    asked.rows = [{"text": "once"}, {"text": " "}, {"text": None}, {"text": "upon"}]
    config = DataConfig(output=tmp_path / "out", datasets=("name",))
    prompts, counts = gather_prompts(config)
    assert [p.id for p in prompts] == ["name-0", "name-3"]
    assert counts["rows_without_prompt"] == 2
    asked.rows = [{"label": 3, "caption": "x"}]
    with pytest.raises(ConfigError, match="its columns are label, caption"):
        gather_prompts(config)


def config_of(tmp_path, name):
    target = str(tiny_target_folder(tmp_path))
    settings = {"output": tmp_path / "out", "target": target, "datasets": (str(name),)}
    return DataConfig(**settings, max_tokens=4, dtype="float32")


def test_a_data_set_in_a_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "one"}, {"prompt": None}, {"prompt": "two"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    config = config_of(tmp_path, tmp_path / "saved")
    generate_data(config)
    ids = {row["id"] for _, row in read_rows(config.output / "answers.jsonl")}
    assert ids == {"saved-0", "saved-2"}
    assert read_manifest(config.output)["counts"]["rows_without_prompt"] == 1
    with pytest.raises(ConfigError, match="cannot load the data set"):
        generate_data(replace(config, datasets=(str(tmp_path / "none"),)))


def test_a_folder_of_data_files_with_configurations(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "mine" / "a.jsonl", [{"question": "one"}, {"question": "two"}])
    write(tmp_path / "mine" / "b.jsonl", [{"question": "three"}])
    card = "---\nconfigs:\n"
    for name, file in (("main", "a"), ("more", "b")):
        card += f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {file}.jsonl\n"
    (tmp_path / "mine" / "README.md").write_text(card + "---\n", encoding="utf-8")
    config = config_of(tmp_path, f"{tmp_path / 'mine'}:main:test[:1]")
    assert [p.text for p in gather_prompts(config)[0]] == ["one"]
    with pytest.raises(ConfigError, match="more"):
        gather_prompts(replace(config, datasets=(f"{tmp_path / 'mine'}:test",)))
