"""The tool that lets a target answer thousands of prompts at once writes what the target would."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft.core.errors import ConfigError
from blockdraft.data.dataset import read_examples
from blockdraft.text.tokenizer import load_tokenizer
from tests.rows import write_rows
from tests.tiny import tiny_target, tiny_target_folder
from tools import sample_answers

VOCAB, END, OTHER_END = 40, 2, 11


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config).eval()


def prompts(number: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB, (2 + index % 7,), generator=draw).tolist()
        for index in range(number)
    ]


def test_greedy_answers_are_those_of_transformers(model: LlamaForCausalLM) -> None:
    texts = prompts(30)
    writer = sample_answers.LlamaWriter(model)
    with patch.multiple(sample_answers, COMPACT_STEPS=3, PREFILL_TEXTS=7, ROOM=4):
        found = sample_answers.write(writer, texts, 0.0, 24, {END, OTHER_END})
    lengths = set()
    for prompt, answer in zip(texts, found, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=END,
            eos_token_id=[END, OTHER_END],
        )[0, len(prompt) :].tolist()
        assert answer == expected
        lengths.add(len(answer))
    assert len(lengths) > 2, "without answers that end early no row is taken out"


def test_samples_have_the_target_s_distribution(model: LlamaForCausalLM) -> None:
    prompt, number, temperature = prompts(1)[0], 4000, 0.8
    torch.manual_seed(3)
    writer = sample_answers.LlamaWriter(model)
    found = sample_answers.write(writer, [prompt] * number, temperature, 1, {END})
    counts = torch.bincount(torch.tensor(found)[:, 0], minlength=VOCAB) / number
    logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits / temperature, -1)
    assert (counts - expected).abs().sum() < 0.12
    assert (counts - torch.softmax(logits / 0.4, -1)).abs().sum() > 0.2


def test_groups_hold_each_prompt_once_and_fit_the_room(tmp_path: Path) -> None:
    rows = [
        {"id": str(number), "set": "s", "prompt_ids": ids, "response_ids": [5, number]}
        for number, ids in enumerate([*prompts(40), *prompts(3)])
    ]
    path = tmp_path / "answers.jsonl"
    write_rows(path, rows)
    known = sample_answers._prompts([path])
    found = sample_answers.groups(known, 60, 4)
    longest = [max(len(own.prompt_ids) for own in group) for group in found]
    assert all(len(group) * (most + 4) <= 60 for group, most in zip(found, longest, strict=True))
    together = sorted(own.prompt_ids for group in found for own in group)
    assert together == sorted({tuple(ids) for ids in prompts(40)})


def run(target: Path, given: Path, output: Path, *more: str) -> None:
    told = [str(given), "--output", str(output), "--target", str(target), "--device", "cpu", *more]
    with patch.object(sys, "argv", ["sample_answers.py", *told]):
        sample_answers.main()


def given_answer(folder: Path, prompt_ids: list[int]) -> Path:
    path = folder / "given.jsonl"
    row = {"id": "a", "set": "s", "prompt_ids": prompt_ids, "response_ids": [5, 6]}
    path.write_text(json.dumps(row))
    return path


def test_rows_are_those_of_answers_that_can_be_trained_on(tmp_path: Path) -> None:
    target, output = tiny_target_folder(tmp_path), tmp_path / "answers.jsonl"
    given = given_answer(tmp_path, [3, 4, 5])
    run(target, given, output, "--max-tokens", "9", "--temperatures", "1.0", "0.5")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["temperature"], row["sample"]) for row in rows] == [(1.0, 1), (0.5, 2)]
    eos_ids = load_tokenizer(target).eos_ids
    for row in rows:
        is_over = row["response_ids"][-1] in eos_ids
        assert row["finish"] == ("stop" if is_over else "length")
        assert is_over or len(row["response_ids"]) == 9
    assert len(read_examples([output], min_response_len=1, max_len=100)) >= 1


def test_prompts_that_are_too_long_are_refused_before_the_file_is_emptied(tmp_path: Path) -> None:
    target, output = tiny_target_folder(tmp_path), tmp_path / "answers.jsonl"
    output.write_text("before")
    given = given_answer(tmp_path, [3] * (sample_answers.MAX_PROMPT + 1))
    with pytest.raises(ConfigError, match="no prompt holds 2 to 380 tokens"):
        run(target, given, output)
    assert output.read_text() == "before"


def test_other_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="has other layers or rotations than Llama"):
        sample_answers.LlamaWriter(tiny_target("qwen3"))


def test_what_is_refused_is_a_line_before_the_work_begins(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("kept")
    told = ["sample_answers.py", str(answers), "--output", str(answers)]
    with (
        patch.object(sys, "argv", told),
        pytest.raises(SystemExit, match=r"^sample_answers.py: .*; "),
    ):
        runpy.run_path(sample_answers.__file__, run_name="__main__")
    assert answers.read_text() == "kept"
