"""Token shards: what is kept, read back, joined and refused; chats, plain text and overlaps."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoTokenizer

from blockdraft.core.errors import ConfigError
from blockdraft.data.answer_file import PriorAnswer
from blockdraft.data.config import DataConfig
from blockdraft.data.dataset import read_examples
from blockdraft.data.generate import generate_data
from blockdraft.data.prompts import Prompt, check_template, prompt_ids
from blockdraft.data.shards import (
    ANSWERS,
    join_data,
    read_manifest,
    read_rows,
    write_manifest,
    write_shards,
)
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.train.trainer import train
from tests.rows import write_rows
from tests.tiny import TEXT_VOCAB_SIZE, tiny_target_folder
from tests.train_runs import small_config


def data_config(folder, tmp_path, rows, **changes):
    settings = {"output": tmp_path / "out", "target": str(folder), "max_tokens": 8, "slots": 4}
    prompts = (write_rows(tmp_path / "prompts.jsonl", rows),)
    return DataConfig(**settings | {"prompts": prompts, "dtype": "float32"} | changes)


def answer(number, response, **changes):
    row = {"id": f"p{number}", "set": "s", "temperature": 0.0, "sample": 0, "finish": "stop"}
    return row | {"prompt_ids": [1, 2, number], "response_ids": response} | changes


GOOD = list(range(10, 40))


def test_shards_hold_what_is_fit_and_count_the_rest(tmp_path):
    rows = [
        answer(0, GOOD),
        answer(1, GOOD[:9], finish="length"),
        answer(2, [5, 6] * 40),
        answer(3, GOOD, finish="loop"),
        answer(0, GOOD, sample=1),
        answer(4, [70_000, 3]),
    ]
    written = write_shards(tmp_path, rows, rows_per_shard=2, drop_truncated=True)
    assert written["counts"] == {
        "answers": 6,
        "kept": 2,
        "truncated": 1,
        "loops": 2,
        "repeated": 1,
        "kept_answer_tokens": 32,
    }
    (shard,) = written["shards"]
    read = [row for _, row in read_rows(tmp_path / shard["name"])]
    assert read == [rows[0], rows[5]]
    again = write_shards(tmp_path, rows, rows_per_shard=1, drop_truncated=False)
    assert [s["num_answers"] for s in again["shards"]] == [1, 1, 1]
    write_shards(tmp_path, rows[:1], rows_per_shard=1, drop_truncated=False)
    assert len(list(tmp_path.glob("answers-*.safetensors"))) == 1


def test_shards_are_smaller_than_the_lines_that_they_stand_for(tmp_path):
    rows = [answer(n, list(range(1000 + n, 1200 + n))) for n in range(50)]
    written = write_shards(tmp_path, rows, rows_per_shard=50, drop_truncated=False)
    lines = write_rows(tmp_path / "a.jsonl", rows).stat().st_size
    assert (tmp_path / written["shards"][0]["name"]).stat().st_size < 0.4 * lines


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["cut", "list", "nested"])
def test_a_damaged_manifest_is_named(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged .*; give another folder"):
        read_manifest(tmp_path)


def test_a_damaged_shard_is_named(tmp_path):
    (tmp_path / "answers-00000.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"answers-00000.*copy the shard again"):
        list(read_rows(tmp_path / "answers-00000.safetensors"))


def test_answers_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder or file of answers .*x; .*`blockdraft data`"):
        list(read_rows(tmp_path / "x"))


def test_chats_are_answered_turn_by_turn_with_the_targets_own_answers(folder, tmp_path):
    chat = {
        "id": "c",
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "somebody else said this"},
            {"role": "user", "content": "two"},
            {"role": "user", "content": "three"},
        ],
    }
    shared = {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}
    config = data_config(folder, tmp_path, [chat, shared], temperatures=(0.0,), max_turns=2)
    # The tiny target never ends by itself.
    with pytest.MonkeyPatch.context() as patch:
        said = PriorAnswer.of
        patch.setattr(PriorAnswer, "of", lambda row: said(row | {"finish": "stop"}))
        generate_data(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = {row["id"]: row for _, row in read_rows(config.output / "answers.jsonl")}
    assert set(rows) == {"c", "c+turn2", "prompts-1"}
    first = tokenizer.decode(rows["c"]["response_ids"], skip_special_tokens=True)
    expected = (
        "<|start|>system\nbe kind<|end|>\n<|start|>user\none<|end|>\n"
        f"<|start|>assistant\n{first}<|end|>\n<|start|>user\ntwo<|end|>\n<|start|>assistant\n"
    )
    assert tokenizer.decode(rows["c+turn2"]["prompt_ids"]) == expected


def test_chats_that_end_at_an_answer_without_an_end_are_told_of(folder, tmp_path, caplog):
    """Their later turns are not asked: the target would be given half an answer of its own."""
    chats = [{"turns": ["one", "two", "three"]}, {"turns": ["alone"]}]
    config = data_config(folder, tmp_path, chats, temperatures=(0.0, 1.0))
    generate_data(config)
    assert "end before their last turn, at an answer that was cut off" in caplog.text
    assert "loops: 2; raise max_tokens (it is 8)" in caplog.text
    caplog.clear()
    generate_data(dataclasses.replace(config, max_turns=1))
    assert "before their last turn" not in caplog.text


def test_plain_text_is_continued_without_a_template(folder, tmp_path):
    config = data_config(folder, tmp_path, [{"text": "the abc " * 60}], temperatures=(0.0,))
    generate_data(config)
    ((_, row),) = read_rows(config.output)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert ("the abc " * 60).startswith(tokenizer.decode(row["prompt_ids"]))
    assert len(row["prompt_ids"]) == 48


def test_manifest_names_target_template_sampling_and_counts(folder, tmp_path):
    rows = [{"prompt": "say  A"}, {"prompt": "Say a"}, {"prompt": "b"}]
    config = data_config(folder, tmp_path, rows, temperatures=(0.0, 1.0), samples=2)
    generate_data(config)
    manifest = read_manifest(config.output)
    assert len(manifest["target"]["sha256"]) == len(manifest["template"]["sha256"]) == 64
    assert manifest["target"]["weights_sha256"] == weights_sha256(folder)
    assert manifest["runs"][0]["config"]["temperatures"] == [0.0, 1.0]
    counts = manifest["counts"]
    assert (counts["prompts"], counts["repeated_prompts"], counts["answers"]) == (3, 1, 6)
    other = dataclasses.replace(config, target=str(tiny_target_folder(tmp_path, seed=5)))
    with pytest.raises(ConfigError, match="another target"):
        generate_data(other)


LONG = "Alice has three apples and gives one of them to Bob, so how many are left for her now?"


def test_prompts_that_overlap_a_benchmark_are_left_out(folder, tmp_path):
    exclude = write_rows(tmp_path / "bench.jsonl", [{"prompt": LONG}, {"prompt": "Short one."}])
    rows = [{"prompt": "Please solve: " + LONG.upper()}, {"prompt": "short ONE"}, {"prompt": "ok"}]
    config = data_config(folder, tmp_path, rows, exclude=(exclude,), temperatures=(0.0,))
    generate_data(config)
    assert [row["id"] for _, row in read_rows(config.output / "answers.jsonl")] == ["prompts-2"]
    assert read_manifest(config.output)["counts"]["overlapping_prompts"] == 2


def test_folders_made_apart_are_joined(folder, tmp_path):
    outputs = []
    for name, prompts in (("a", ["one", "two"]), ("b", ["two", "three"])):
        (tmp_path / name).mkdir()
        rows = [{"id": text, "prompt": text} for text in prompts]
        config = data_config(folder, tmp_path / name, rows, temperatures=(0.0,))
        outputs.append(generate_data(config))
    joined = join_data(outputs, tmp_path / "joined", rows_per_shard=2)
    ids = [row["id"] for _, row in read_rows(joined)]
    assert sorted(ids) == ["one", "three", "two"]
    assert len(read_manifest(joined)["runs"]) == 2
    first = read_manifest(outputs[0])
    target = {name: first["target"][name] for name in ("folder", "sha256")}  # as older ones are
    write_manifest(outputs[0], first | {"target": target})
    join_data(outputs, joined, rows_per_shard=2)
    assert read_manifest(joined)["target"] == first["target"]
    with pytest.raises(ConfigError, match="one of the folders to join"):
        join_data(outputs, outputs[0], rows_per_shard=2)
    with pytest.raises(ConfigError, match=r"has no manifest\.json"):
        join_data([tmp_path], tmp_path / "x", rows_per_shard=2)
    manifest = json.loads((outputs[1] / "manifest.json").read_text())
    manifest["template"]["sha256"] = "other"
    (outputs[1] / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ConfigError, match="different template"):
        join_data(outputs, tmp_path / "x", rows_per_shard=2)


def test_an_unfinished_folder_is_told_of_where_it_is_read(folder, tmp_path, caplog):
    config = data_config(folder, tmp_path, [{"prompt": "one"}, {"prompt": "two"}])
    finished = generate_data(config)
    assert len(read_examples([finished], min_response_len=1, max_len=None)) == 2
    assert "unfinished" not in caplog.text
    part = tmp_path / "part"
    part.mkdir()
    manifest = read_manifest(finished)
    del manifest["shards"]
    write_manifest(part, manifest)
    first = (finished / ANSWERS).read_text().splitlines()[0]
    (part / ANSWERS).write_text(f"{first}\n")
    told = f"the answers in {part} are unfinished, and only those so far are read"
    assert len(read_examples([part], min_response_len=1, max_len=None)) == 1
    assert told in caplog.text
    caplog.clear()
    joined = join_data([finished, part], tmp_path / "joined", rows_per_shard=2)
    assert told in caplog.text
    assert len(list(read_rows(joined))) == 2


def test_a_joined_folder_is_unfinished_while_it_is_joined_again(tmp_path):
    """Old and new shards passed for all answers, where a folder turned out to be damaged."""
    manifest = {"target": {"sha256": "t"}, "template": {"sha256": "c"}, "runs": []}
    sources = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [answer(10 * number + n, GOOD) for n in range(2)]
        written = write_shards(folder, rows, rows_per_shard=1, drop_truncated=False)
        write_manifest(folder, manifest | written)
        sources.append(folder)
    joined = join_data(sources[:2], tmp_path / "joined", rows_per_shard=1)
    (sources[2] / "answers-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="cannot read"):
        join_data(sources[2:], joined, rows_per_shard=1)
    assert "shards" not in read_manifest(joined)
    join_data(sources[1:2], joined, rows_per_shard=1)
    assert [row["id"] for _, row in read_rows(joined)] == ["p10", "p11"]


def test_prompts_of_one_name_and_other_texts_are_not_one(folder, tmp_path):
    outputs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        config = data_config(folder, tmp_path / name, [{"prompt": name}, {"prompt": "same"}])
        outputs.append(generate_data(config))
        num_rows = len(list(read_rows(outputs[0])))
    joined = join_data(outputs, tmp_path / "joined", rows_per_shard=9)
    # Of the three texts one is in both.
    assert len(list(read_rows(joined))) == num_rows * 3 // 2

    with pytest.raises(
        ConfigError, match="an answer to a different prompt with the id 'prompts-0'"
    ):
        generate_data(dataclasses.replace(config, output=outputs[0]))
    with pytest.raises(ConfigError, match="holds joined answers"):
        generate_data(dataclasses.replace(config, output=joined))
    with pytest.raises(ConfigError, match="holds answers of its own"):
        join_data(outputs[1:], outputs[0], rows_per_shard=9)
    assert len(list(read_rows(joined))) == num_rows * 3 // 2
    assert len(list(read_rows(outputs[0]))) == num_rows


def test_a_prompt_may_be_answered_at_one_of_several_temperatures(folder, tmp_path):
    rows = [{"prompt": f"say {n}", "id": str(n)} for n in range(90)]
    config = data_config(
        folder, tmp_path, rows, temperatures=(0.7, 0.7, 0.0), mix_temperatures=True, max_tokens=2
    )
    order = [row["id"] for row in read_jsonl_rows(generate_data(config) / ANSWERS)]
    found = {row["id"]: row["temperature"] for row in read_jsonl_rows(config.output / ANSWERS)}
    assert len(order) == len(found) == 90, "one answer each"
    assert 15 < sum(t == 0.0 for t in found.values()) < 45
    # Any part is a fair sample: neither the order of the file, nor one temperature after another.
    half = [found[name] for name in order[:45]]
    assert 5 < half.count(0.0) < 25
    assert order != sorted(order, key=int)
    other = dataclasses.replace(config, output=tmp_path / "again")
    again = {
        row["id"]: row["temperature"] for row in read_jsonl_rows(generate_data(other) / ANSWERS)
    }
    assert again == found


def read_jsonl_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_of_answers_trains_its_own_target_only(tmp_path):
    config = small_config(tmp_path, max_steps=1, held_out_share=0.3)
    rows = [{"prompt": f"say {n}"} for n in range(12)]
    made = data_config(config.target, tmp_path, rows, temperatures=(1.0,), max_tokens=20)
    config = dataclasses.replace(config, data=(generate_data(made),))
    examples = read_examples(config.data, min_response_len=2, max_len=99)
    used = {token for example in examples for token in example.response_ids}
    mask_token_id = max(set(range(TEXT_VOCAB_SIZE)) - used)
    config = dataclasses.replace(config, mask_token_id=mask_token_id)
    train(dataclasses.replace(config, min_response_len=2))
    (tmp_path / "other").mkdir()
    other = tiny_target_folder(tmp_path / "other", seed=9)
    with pytest.raises(ConfigError, match=f"another target, {made.target}, whose .* of {other}"):
        train(dataclasses.replace(config, target=other, out=tmp_path / "x"))


def test_a_template_that_opens_no_answer_is_refused(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_template(tokenizer)
    with pytest.raises(ConfigError, match="does not know enable_thinking"):
        check_template(tokenizer, "on")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="no generation prompt"):
        check_template(tokenizer)


def test_the_template_is_told_about_thinking(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template += "{% if not enable_thinking | default(true) %}!{% endif %}"
    prompt = Prompt(id="a", set="s", text="hi")
    plain, on, off = (prompt_ids(tokenizer, prompt, (), t) for t in ("template", "on", "off"))
    assert plain == on
    assert off == (*on, *tokenizer("!")["input_ids"])


def test_large_vocabularies_need_more_bytes(tmp_path):
    rows = [answer(0, [TEXT_VOCAB_SIZE + 2**16, 5, 7])]
    written = write_shards(tmp_path, rows, rows_per_shard=1, drop_truncated=False)
    ((_, row),) = read_rows(tmp_path / written["shards"][0]["name"])
    assert torch.tensor(row["response_ids"]).max() == TEXT_VOCAB_SIZE + 2**16
