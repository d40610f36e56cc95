import gzip
import json
from dataclasses import replace

import pytest

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.measures import Measures
from blockdraft.bench.speed.bench import Measurement, SpeedBench
from blockdraft.bench.speed.figures import (
    ALL,
    DEFINITIONS,
    WITHOUT_LOOPS,
    Figures,
    figures_of,
    groups_of,
)
from blockdraft.bench.speed.report import LEGEND, table
from blockdraft.bench.workload import (
    BUNDLED,
    BenchPrompt,
    chosen,
    first_of_each_category,
    read_workload,
)
from blockdraft.core.errors import BlockdraftError, ConfigError, RequestError
from blockdraft.llm import LLM
from tests.bench_results import measurement
from tests.command_line import run, shown


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(*folders, dtype="float32")


def test_bundled_prompts_are_four_of_each_kind():
    prompts = read_workload(BUNDLED)
    assert len({prompt.id for prompt in prompts}) == 16
    kinds = [prompt.category for prompt in first_of_each_category(prompts, 2)]
    assert kinds == ["math"] * 2 + ["code"] * 2 + ["chat"] * 2 + ["rewriting"] * 2


def test_rows_may_hold_turns_or_a_prompt_and_be_compressed(tmp_path):
    rows = [{"id": 7, "category": "c", "turns": ["one", "two"]}, {"prompt": "three"}]
    path = tmp_path / "some.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert read_workload(path) == [
        BenchPrompt("7", "c", "one", ("two",)),
        BenchPrompt("some-2", "some", "three"),
    ]


def test_empty_lines_are_no_rows(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('\n\n{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_workload(path)] == ["a", "b"]


BAD_ROWS = ["", "{", '{"turns": []}', '{"turns": "hello"}', '{"prompt": " "}', "[1]", '{"a": 1}']


@pytest.mark.parametrize("text", BAD_ROWS)
def test_bad_rows_are_refused(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        read_workload(path)


def test_turns_of_a_conversation_are_drawn_together():
    first, second = measurement("chat", 10, 4.0, 1.0), measurement("chat", 20, 4.0, 3.0)
    other = measurement("chat", 30, 4.0, 2.0)
    together = replace(second, prompt=first.prompt, turn=2)
    bands = figures_of([first, together]).speedup_bands
    assert list(bands) == ["plain", "plain_decode", "transformers"]
    assert {(band.low, band.num_prompts) for band in bands.values()} == {(None, 1)}
    three = figures_of([first, together, other])
    assert (three.num_prompts, three.speedup_bands["plain"].num_prompts) == (3, 2)
    assert figures_of([first, second, other]).speedup_bands["plain"].num_prompts == 3


def test_totals_are_the_headline_and_prompts_give_the_spread():
    groups = groups_of(
        [
            measurement("a", 10, 4.0, 1.0),
            measurement("a", 30, 4.0, 4.0, identical=False),
            measurement("b", 40, 2.0, 1.0, looping=True),
        ]
    )
    assert list(groups) == ["a", "b", ALL, WITHOUT_LOOPS]
    both = groups["a"]
    assert both.plain.tokens_per_second == pytest.approx(39 / 8)
    assert both.drafted.tokens_per_second == pytest.approx(40 / 5)
    assert both.drafted.decode_tokens_per_second == pytest.approx(38 / 2.5)
    assert both.speedup_over_plain == pytest.approx(8 / (39 / 8))
    assert both.speedup_over_transformers == pytest.approx(8 / (40 / 16))
    assert both.per_prompt_speedup[1] == pytest.approx((4 + 30 / 29) / 2)
    assert (both.num_identical, both.num_prompts, both.num_looping) == (1, 2, 0)
    assert both.acceptance_length == 2.0
    assert groups[ALL].num_looping == 1
    assert groups[WITHOUT_LOOPS].num_prompts == 2


def test_every_definition_is_a_figure():
    assert set(DEFINITIONS) <= {*Figures.__dataclass_fields__, *Measures.__dataclass_fields__}


def test_the_table_fits_80_columns():
    one = measurement("rewriting", 10, 0.04, 0.01)
    straight = [replace(one, prompt=replace(one.prompt, id=str(n))) for n in range(16)]
    text = shown(table("title", groups_of(straight)))
    assert "4.00-4.00" in text
    assert "16/16" in text
    assert WITHOUT_LOOPS not in text
    looping = measurement("a", 40, 2, 1, looping=True)
    assert WITHOUT_LOOPS in shown(table("title", groups_of([*straight, looping])))
    assert max(map(len, LEGEND.splitlines())) <= 80


def test_single_tokens_have_no_tau_in_the_table():
    rows = [measurement("one", 1, 0.9, 0.5), measurement("two", 2, 0.9, 0.5)]
    lines = shown(table("title", groups_of(rows))).splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()}
    assert "0.00" not in rows["one"]
    assert "2.00" in rows["two"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_way_decodes_every_prompt(llm, temperature):
    bench = SpeedBench(llm)
    config = SpeedConfig(max_tokens=12, temperature=temperature)
    prompts = read_workload(BUNDLED)[:3]
    seen = []
    results = bench.run(prompts, config, seen.append)
    assert results == seen
    for result in results:
        assert result.identical
        assert result.transformers is not None
        assert 0 < result.drafted.decode_seconds <= result.drafted.total_seconds
        assert 0 < result.transformers.decode_seconds <= result.transformers.total_seconds
        if temperature == 0.0:
            assert result.transformers.token_ids == result.plain.token_ids


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(llm, monkeypatch):
    bench = SpeedBench(llm, with_transformers=False)
    monkeypatch.setattr(bench, "_drafted", None)
    prompts = [*read_workload(BUNDLED)[:1], BenchPrompt("long", "c", "x" * 600)]
    with pytest.raises(RequestError, match="prompt long of c"):
        bench.run(prompts, SpeedConfig(max_tokens=6))


def test_a_bench_needs_a_drafter(folders):
    with pytest.raises(ConfigError, match="no drafter"):
        SpeedBench(LLM(folders[0], None, dtype="float32"))


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"temperature": -1.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(BlockdraftError):
        _ = SpeedConfig(**options).params


def test_speed_writes_a_whole_report(pair, tmp_path):
    output = tmp_path / "report.json"
    options = [*pair, "--limit", "2", "--max-tokens", "6", "--no-transformers"]
    options += ["--output", str(output)]
    result = run("bench", "speed", "--prompts", BUNDLED, *options)
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text(encoding="utf-8"))
    assert {"command", "git_commit", "versions", "machine", "threads", "definitions"} <= set(report)
    assert report["config"]["dtype"] == "float32"
    (only,) = report["runs"]
    assert only["figures"][ALL]["num_identical"] == 2
    asked = chosen(read_workload(BUNDLED), 2, seed=0)
    assert all(prompt.category in result.stdout for prompt in asked)
    assert [prompt["id"] for prompt in only["prompts"]] == [prompt.id for prompt in asked]
    assert only["figures"][ALL]["transformers"] is None


def test_a_report_that_could_not_be_written_is_refused_at_once(tmp_path):
    for output in (tmp_path, tmp_path / "none" / "report.json"):
        result = run("bench", "demo", "--output", output)
        assert result.exit_code == 2
        assert "cannot write" in result.stderr


def test_the_demo_fails_if_an_output_differs(pair, monkeypatch):
    monkeypatch.setattr(Measurement, "identical", property(lambda self: False))
    options = [*pair, "--per-kind", "1", "--max-tokens", "4", "--no-transformers", "--json"]
    result = run("bench", "demo", *options)
    assert result.exit_code == 1
    temperatures = [run["config"]["temperature"] for run in json.loads(result.stdout)["runs"]]
    assert temperatures == [0.0, 0.7]
