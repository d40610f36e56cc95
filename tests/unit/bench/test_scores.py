"""Task scores: which number an answer gives, and how many are right."""

import json
from dataclasses import replace
from decimal import Decimal

import pytest

from blockdraft.bench.outside.interface import Failure, OutsideOutput
from blockdraft.bench.scores.scores import given_number, right_number, score_lines, scores_of
from blockdraft.bench.speed.bench import Measurement
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.bench.workload import BenchPrompt
from tests.command_line import refusal, run
from tests.tiny import tiny_drafter_folder, tiny_target_folder


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is \\boxed{18}.", 18),
        ("\\boxed{3} or rather \\boxed{1,200} of 7", 1200),
        ("\\boxed{\\text{about } 4.50} dollars", "4.5"),
        ("\\boxed{\\frac{1}{2}}", 2),
        ("she has 16 - 3 = 13 eggs.", 13),
        ("it falls to -4", -4),
        ("3-4", 4),
        ("1,000,000 in all", 1000000),
        ("\\boxed{12", 12),
        ("\\boxed{none} of 7", None),
        ("no number", None),
    ],
)
def test_the_number_of_an_answer(text, number):
    assert given_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("reference", "number"),
    [
        ("16 - 3 = <<16-3=13>>13\n#### 13", 13),
        ("#### 1,450", 1450),
        ("70", 70),
        ("p - q", None),
        ("    for i in range(3):", None),
        (None, None),
    ],
)
def test_the_number_of_a_reference(reference, number):
    assert right_number(reference) == number


def test_right_answers_are_counted_by_set_and_way():
    texts = {1: "it is 5", 2: "it is 6", 3: "it is \\boxed{5}"}

    def sample(*token_ids):
        return TimedOutput(token_ids, 1.0, 0.5)

    prompt = BenchPrompt("a", "gsm8k", "?", reference="#### 5")
    outside = {"x": OutsideOutput(sample(3)), "y": Failure("died")}
    rows = [
        Measurement(prompt, sample(1), sample(1), None, outside=outside),
        Measurement(prompt, sample(2, 2), sample(2, 2), sample(1), outside=outside),
        Measurement(replace(prompt, reference="x"), sample(1), sample(1), None),
        Measurement(replace(prompt, later=("and?",)), sample(1), sample(1), None),
    ]
    scores = scores_of(rows, lambda ids: texts[ids[0]], max_tokens=2)
    assert list(scores) == ["gsm8k"]
    assert scores["gsm8k"].num_scored == 2
    assert scores["gsm8k"].num_cut == 1
    assert scores["gsm8k"].num_right == {"plain": 1, "drafted": 1, "x": 2, "transformers": 1}
    (line,) = score_lines(scores)
    assert line.startswith("gsm8k: correct answers of 2 (1 cut off by --max-tokens): plain 1, ")


def test_the_command_writes_and_prints_scores(tmp_path):
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text('{"prompt": "one and one", "reference": "2"}\n', encoding="utf-8")
    output = tmp_path / "speed.json"
    options = ["bench", "speed", "--prompts", prompts, "--no-transformers", "--output", output]
    options += [
        "--target",
        tiny_target_folder(tmp_path),
        "--drafter",
        tiny_drafter_folder(tmp_path),
    ]
    result = run(*options, "--dtype", "float32", "--max-tokens", 6, "--score")
    assert result.exit_code == 0, result.output
    assert "sums: correct answers of 1" in result.stdout
    written = json.loads(output.read_text(encoding="utf-8"))
    score = written["runs"][0]["scores"]["sums"]
    assert score["num_scored"] == 1
    assert score["num_right"]["plain"] == score["num_right"]["drafted"]
    assert "scores" in written["definitions"]


def test_what_cannot_be_scored_is_refused_before_anything_is_loaded(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    options = ["bench", "speed", "--prompts", prompts, "--target", "x", "--score"]
    assert "no prompt has a test or a number as its reference" in refusal(*options)
    assert "leave it out" in refusal(*options, "--force-acceptance", "0")
