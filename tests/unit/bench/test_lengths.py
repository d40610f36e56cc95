"""Answers of fixed lengths, and from which one on drafting saves time."""

import json

import pytest

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.report.sections import section_of
from blockdraft.bench.result import read_result
from blockdraft.bench.speed.lengths import BreakEvenLength, break_even_length, length_line
from blockdraft.bench.speed.report import json_report
from tests.bench_fakes import FakeLLM
from tests.bench_results import MEASURED
from tests.command_line import refusal, run
from tests.tiny import tiny_drafter_folder, tiny_target_folder


@pytest.mark.parametrize(
    ("speedups", "start", "sure"),
    [
        ([(0.8, 0.7), (1.0, 0.9), (1.2, 1.1), (1.3, 1.2)], 2, 4),
        ([(1.2, 1.1), (0.9, 0.8), (1.2, 1.1), (1.3, 0.9)], 4, None),
        ([(1.2, 1.1), (1.2, 1.1), (1.2, 1.1), (0.9, 0.8)], None, None),
        ([(1.2, None), (1.2, None), (1.2, None), (1.2, None)], 1, None),
    ],
)
def test_the_length_counts_from_which_on_every_longer_one_saves_time(speedups, start, sure):
    lengths = (1, 2, 4, 8)
    given = [{"value": value, "low": low} for value, low in speedups]
    found = break_even_length(dict(zip(lengths, given, strict=True)))
    has_bands = speedups[0][1] is not None
    assert found == BreakEvenLength(lengths, start, sure, has_bands)
    line = length_line(found)
    assert ("one prompt, no interval" in line) != has_bands
    # Of shorter ones nothing is said: at some of them drafting may save time.
    assert line.startswith("of 1, 2, 4, 8 tokens, drafted decoding takes ")
    assert ("takes longer at the longest" in line) == (start is None)
    assert (f"takes no longer from {start} on" in line) == (start is not None)
    assert (f"at least 1 from {sure} on" in line) == (sure is not None)


def test_without_a_speedup_there_is_no_length():
    assert break_even_length({1: None, 2: {"value": 2.0, "low": 1.5}}) == BreakEvenLength(
        (1, 2), 2, 2
    )
    assert break_even_length({1: None}) == BreakEvenLength((1,), None, None, has_bands=False)


@pytest.fixture
def options(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "the abc"}\n{"prompt": "ab the ab"}\n', encoding="utf-8")
    models = ["--target", tiny_target_folder(tmp_path), "--drafter", tiny_drafter_folder(tmp_path)]
    return ["bench", "speed", "--prompts", prompts, *models, "--dtype", "float32"]


def test_every_length_is_measured_and_reported(options, tmp_path):
    output = tmp_path / "short.json"
    result = run(*options, "--no-transformers", "--lengths", "1,2,9", "--output", output)
    assert result.exit_code == 0, result.output
    assert "greedy, 9 tokens" in result.stdout
    written = json.loads(output.read_text(encoding="utf-8"))
    found = BreakEvenLength(**written["break_even_length"])
    assert list(found.lengths) == [1, 2, 9]
    assert "break_even_length" in written["definitions"]
    for one, length in zip(written["runs"], found.lengths, strict=True):
        assert one["config"]["max_tokens"] == length
        for row in one["prompts"]:
            assert len(row["plain"]["token_ids"]) == len(row["drafted"]["token_ids"]) == length
    section = section_of(read_result(output))
    (grid,) = section.grids
    assert [row[0] for row in grid.rows] == ["1 token", "2 tokens", "9 tokens"]
    assert [row[-1] for row in grid.rows] == ["2/2"] * 3
    assert [bool(row[-2]) for row in grid.rows] == [False, True, True]  # one token has no tau
    assert all("(" in row[5] for row in grid.rows)
    assert any("drafted decoding takes" in fact for fact in section.facts)


def test_the_report_says_that_one_prompt_has_no_band(tmp_path):
    path = tmp_path / "short.json"
    runs = [(SpeedConfig(max_tokens=10, ignore_eos=True), MEASURED[:1])]
    path.write_text(json.dumps(json_report(FakeLLM(), runs)), encoding="utf-8")
    facts = section_of(read_result(path)).facts
    said = "Of 10 tokens, drafted decoding takes no longer from 10 on; one prompt, no interval."
    assert said in facts


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lengths", "2,1"], "lengths 2,1 is not a curve"),
        (["--lengths", "1,1"], "names a number twice"),
        (["--lengths", "0,1"], "lengths is 0"),
        (["--lengths", "some"], "lengths is 'some'"),
        (["--lengths", "1,2", "--against", "vllm"], "leave it out with --against"),
        (["--lengths", "1,2", "--ledger"], "leave it out with --against"),
        (["--lengths", "1,2", "--force-acceptance", "0"], "leave it out with --force-acceptance"),
    ],
)
def test_bad_lengths_are_refused(options, arguments, reason):
    assert reason in refusal(*options, *arguments)
