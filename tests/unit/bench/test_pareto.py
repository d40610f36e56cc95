import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest

from blockdraft.bench import decode
from blockdraft.bench.config import ParetoConfig
from blockdraft.bench.load.curve import (
    CurvePoint,
    Reading,
    interactivity_at,
    no_faster_from,
    throughput_at,
)
from blockdraft.bench.load.pareto import ParetoBench, names_of, pareto_points, readings
from blockdraft.bench.load.pareto_report import (
    PARETO_LEGEND,
    crossing_lines,
    pareto_tables,
    reading_table,
)
from blockdraft.bench.load.repeats import RepeatJournal
from blockdraft.bench.measures import Spread
from blockdraft.core.errors import INTERRUPTED, ConfigError
from blockdraft.data.boxed import BOXED_LINE
from blockdraft.speculate.drafters.none import NoDrafter
from tests.bench_fakes import FakeLLM, run_bench
from tests.bench_results import PARETO, PROMPTS, SLOWDOWN
from tests.command_line import run_json, shown
from tests.tiny import tiny_drafter_folder, tiny_target_folder

SHORT = {
    "pareto": ["--repeats", "1"],
    "concurrency": ["--repeats", "1"],
    "never-slower": ["--pairs", "1", "--seconds", "1"],
}
CURVE = [CurvePoint(100.0, 100.0), CurvePoint(80.0, 300.0), CurvePoint(40.0, 500.0)]


@pytest.fixture
def llm(monkeypatch):
    return FakeLLM(slowdown=SLOWDOWN).patch_clock(monkeypatch)


def test_a_curve_is_read_between_its_points():
    assert throughput_at(CURVE, 100.0) == Reading(100.0)
    assert throughput_at(CURVE, 90.0) == Reading(200.0)
    assert throughput_at(CURVE, 50.0) == Reading(450.0)
    assert interactivity_at(CURVE, 400.0) == Reading(60.0)


def test_nothing_is_read_outside_of_what_was_measured():
    assert throughput_at(CURVE, 39.9) == Reading(None, "below")
    assert throughput_at(CURVE, 100.1) == Reading(None, "above")
    assert interactivity_at(CURVE, 501.0) == Reading(None, "above")
    assert throughput_at(CURVE[:1], 99.0) == Reading(None, "below")


def test_where_a_curve_has_several_points_the_best_counts():
    bent = [CurvePoint(50.0, 100.0), CurvePoint(60.0, 200.0), CurvePoint(40.0, 150.0)]
    assert throughput_at(bent, 50.0) == Reading(175.0)


def test_every_way_has_its_turn_and_parts_learn_for_themselves(llm):
    config = replace(PARETO, parts=True, concurrency=(1,), repeats=1)
    bench = ParetoBench({"drafter": llm}, parts=True)
    asked = []
    real = llm.generate
    llm.generate = lambda prompts, params: asked.append(params.drafters) or real(prompts, params)
    repeats = bench.run(PROMPTS, config, RepeatJournal())
    assert [way.name for way in bench.ways] == ["plain", "drafter", "dflash alone", "lookup alone"]
    assert asked == [None, None, ("dflash",), ("lookup",)] * 2
    assert list(repeats[0].runs) == [way.name for way in bench.ways]
    learned = {id(decoder._learned) for decoder, _ in bench.sides[1:]}
    assert len(learned) == 3


def test_several_drafters_are_compared_in_one_run(monkeypatch, llm):
    other = FakeLLM(slowdown=0.0)
    monkeypatch.setattr(decode, "perf_counter", lambda: llm.now + other.now)
    repeats = ParetoBench({"one": llm, "two": other}).run(PROMPTS, PARETO, RepeatJournal())
    assert list(repeats[0].runs) == ["plain", "one", "two"]
    at_four = {p.way: p for p in pareto_points(repeats) if p.concurrency == 4}
    assert at_four["two"].throughput.median > at_four["one"].throughput.median
    assert all(point.num_identical == point.num_outputs for point in at_four.values())


def test_where_plain_decoding_gives_as_much_is_said(llm):
    points = pareto_points(ParetoBench({"drafter": llm}).run(PROMPTS, PARETO, RepeatJournal()))
    assert crossing_lines(points) == ["drafter: no more than plain in total from concurrency 4 on"]
    points = [point for point in points if point.concurrency < 4]
    # Of fewer requests nothing is said: drafting may have lost there.
    assert crossing_lines(points) == ["drafter: still more than plain in total at concurrency 2"]


@pytest.mark.parametrize(
    ("speedups", "limit"),
    [
        ({1: 2.0, 2: 1.0, 4: 0.9}, 2),
        ({1: 2.0, 2: 0.9, 4: 1.1}, None),
        ({1: 0.9, 2: 1.1, 4: 0.8}, 4),
        ({1: 0.5}, 1),
    ],
)
def test_from_where_on_a_way_is_no_faster(speedups, limit):
    assert no_faster_from(speedups) == limit


def test_figures_of_a_point(llm):
    repeats = ParetoBench({"drafter": llm}).run(PROMPTS, PARETO, RepeatJournal())
    points = {(point.way, point.concurrency): point for point in pareto_points(repeats)}
    # Two sets of two requests, each 0.5 s and 40 tokens at 0.1 s, 10 % slower by the neighbor.
    plain = points["plain", 2]
    assert plain.throughput.median == pytest.approx(4 * 41 / (2 * 4.5 * 1.1))
    assert plain.interactivity.median == pytest.approx(10 / 1.1)
    assert plain.mean_running == pytest.approx(2.0)
    assert plain.measures.prompt_seconds.mean == pytest.approx(0.5 * 1.1)
    assert plain.measures.first_token_seconds.p99 > 4.5  # the second set waited
    drafted = points["drafter", 2]
    assert drafted.speedup_over_plain.median == pytest.approx(4.5 * 1.1 / (2.1 * 1.6))
    assert drafted.measures.share_equal == 1.0
    assert drafted.measures.tau_macro == pytest.approx(2.0)
    # Asked again in the second repeat.
    assert drafted.measures.speedup.num_prompts == len(PROMPTS) < drafted.num_outputs
    # Requests that run together share their steps, so they have no band.
    bands = {n: points["drafter", n].measures.speedup.low for n in PARETO.concurrency}
    assert [n for n, low in bands.items() if low is not None] == [1]
    # Every output repeats one token.
    assert drafted.without_loops is None


def test_readings_are_ratios_at_the_levels_of_plain_decoding(llm):
    config = replace(PARETO, concurrency=(1, 2, 3, 4), num_requests=12)
    repeats = ParetoBench({"drafter": llm}).run(PROMPTS, config, RepeatJournal())
    equally_fast, equally_much = readings(repeats)
    assert [row.plain_concurrency for row in equally_fast] == [1, 2, 3, 4]
    # 10 tokens per second per user plainly; drafted they are 25, 15.6, 11.4 and 8.9.
    row = equally_fast[0]
    assert row.level == pytest.approx(10)
    low, high = (12 * 41 / (12 / n * 2.1 * (1 + 0.6 * (n - 1))) for n in (3, 4))
    share = (25 / 2.2 - 10) / (25 / 2.2 - 25 / 2.8)
    read = low + share * (high - low)
    assert row.ratio.median == pytest.approx(read / (41 / 4.5))
    assert row.outside is None
    # As fast as with four at once plainly, 7.7, drafted users never were.
    assert equally_fast[3].ratio is None
    assert equally_fast[3].outside == "below"
    assert [row.outside for row in equally_much] == ["below", "below", None, "above"]


def test_a_reading_compares_with_the_best_of_plain_decoding(llm):
    """Two requests at once that slow nobody down: one alone is no fair level to be faster than."""
    llm.slowdown = 0.0
    config = replace(PARETO, concurrency=(1, 2, 4), num_requests=12, repeats=1)
    repeats = ParetoBench({"drafter": llm}).run(PROMPTS, config, RepeatJournal())
    for repeat in repeats:
        repeat.runs["drafter"] = repeat.runs["plain"]
    for rows in readings(repeats):
        assert [row.ratio.median for row in rows] == [1.0] * 3


def test_single_tokens_have_no_speed_to_compare(llm):
    """As where every answer ends at once."""
    repeats = ParetoBench({"drafter": llm}).run(PROMPTS, PARETO, RepeatJournal())

    def ended(repeat):
        plain = repeat.runs["plain"]
        cut = [replace(one, token_ids=(1,), decode_seconds=0.0) for one in plain.samples]
        return replace(repeat, runs=dict.fromkeys(repeat.runs, replace(plain, samples=tuple(cut))))

    equally_fast, equally_much = readings(list(map(ended, repeats)))
    assert all(row.ratio.median >= 1 for row in equally_fast)
    assert shown(reading_table("title", "in total", equally_much)).count("single tokens") == 3


def test_a_run_goes_on_where_it_was_ended(monkeypatch, llm, tmp_path):
    path, whole = tmp_path / "j.jsonl", None
    settings = {"options": {"concurrency": [1, 2, 4]}}
    bench = ParetoBench({"drafter": llm})
    whole = bench.run(PROMPTS, PARETO, RepeatJournal(path, settings))
    kept = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(kept) == 1 + 3 * 2
    path.write_text("".join(kept[:4]) + kept[4][:100], encoding="utf-8")  # ended while writing
    journal = RepeatJournal(path, settings)
    assert list(journal.done) == [(1, 0), (1, 1), (2, 0)]
    llm.calls.clear()
    again = ParetoBench({"drafter": llm}).run(PROMPTS, PARETO, journal)
    assert {at_once for _, at_once, _, _ in llm.calls} == {2, 4}
    assert pareto_points(again)[0] == pareto_points(whole)[0]
    first = [(repeat.concurrency, repeat.number) for repeat in again]
    assert first == [(repeat.concurrency, repeat.number) for repeat in whole]
    assert again[0].runs["drafter"].samples == whole[0].runs["drafter"].samples
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(kept)
    journal.remove()
    assert not path.exists()


def test_a_journal_of_another_run_is_refused(tmp_path):
    path = tmp_path / "j.jsonl"
    RepeatJournal(path, {"options": {"max_tokens": 1}, "prompts": "a"})
    with pytest.raises(ConfigError, match="with different max_tokens and cannot be resumed"):
        RepeatJournal(path, {"options": {"max_tokens": 2}, "prompts": "a"})
    path.write_text('{"prompt": "x"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="not a journal of bench pareto"):
        RepeatJournal(path, {}, "bench pareto")
    path.write_text('{"settings": {}}\n{"concurrency": 1}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="damaged"):
        RepeatJournal(path, {})


def test_the_command_writes_a_whole_result_and_no_journal(monkeypatch, llm, tmp_path):
    output = tmp_path / "pareto.json"
    arguments = ["--concurrency", "1,2", "--max-tokens", 11, "--repeats", 2, "--output", output]
    result = run_bench(monkeypatch, llm, "pareto", *arguments, "--parts")
    assert result.exit_code == 0, result.output
    assert "total throughput over plain, at equal speed per user" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["pareto.json"]
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["result"] == "pareto"
    assert {"command", "git_commit", "versions", "machine", "definitions", "memory"} <= set(report)
    assert len(report["ways"]) == 4
    assert len(report["points"]) == 4 * 2
    assert len(report["at_equal_interactivity"]) == 3 * 2
    assert report["ways"][2]["drafters"] == ["dflash"]
    assert report["memory"]["most_process_bytes"] > 2**20


def test_an_ended_command_goes_on(monkeypatch, llm, tmp_path):
    arguments = ["pareto", "--concurrency", "1,2", "--max-tokens", 11, "--repeats", 1, "--output"]
    output = tmp_path / "pareto.json"
    with llm.interrupted(at_once=2):
        assert run_bench(monkeypatch, llm, *arguments, output).exit_code == INTERRUPTED
    assert (tmp_path / "pareto.json.part.jsonl").exists()
    llm.calls.clear()
    assert run_bench(monkeypatch, llm, *arguments, output).exit_code == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["num_resumed"] == 1
    assert report["definitions"]["num_resumed"].startswith("repeats of a point measured by")
    assert {at_once for _, at_once, _, _ in llm.calls} == {2}
    other = run_bench(monkeypatch, llm, *arguments, tmp_path / "other.json")
    assert other.exit_code == 0


@pytest.mark.parametrize(("exact", "status"), [("on", 1), ("off", 0)])
def test_an_output_that_differs_fails_where_exactness_is_promised(monkeypatch, exact, status):
    llm = FakeLLM(broken=("adaptive",)).patch_clock(monkeypatch)
    arguments = ["--concurrency", 2, "--max-tokens", 5, "--exact", exact, "--json"]
    result = run_bench(monkeypatch, llm, "pareto", *arguments)
    assert result.exit_code == status
    assert [p["num_identical"] for p in json.loads(result.stdout)["points"]] == [6, 0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--concurrency", "2,1"], "2,1 is not a curve; give increasing numbers"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--repeats", "0"], "repeats is 0"),
        (["--requests", "0"], "requests is 0"),
        (["--max-tokens", "1"], "--max-tokens is 1; give 2 or more"),
        (["--also-drafter", "auto"], "names a drafter twice"),
    ],
)
def test_bad_options_are_refused_before_loading(monkeypatch, arguments, reason):
    result = run_bench(monkeypatch, None, "pareto", *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_a_real_pair_and_its_parts_give_equal_outputs(tmp_path):
    pair = ["--target", tiny_target_folder(tmp_path), "--drafter", tiny_drafter_folder(tmp_path)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the abc of the abc"}\n{"prompt": "b"}\n', encoding="utf-8")
    arguments = [*pair, "--dtype", "float32", "--threads", 1, "--prompts", prompts]
    arguments += ["--concurrency", "1,2", "--repeats", 1, "--max-tokens", 12, "--parts"]
    arguments += ["--also-drafter", copytree(pair[3], tmp_path / "other")]
    report = run_json("bench", "pareto", *arguments)
    ways = [way["name"] for way in report["ways"]]
    assert ways[0] == "plain"
    assert {"dflash alone", "lookup alone"} <= set(ways)
    assert len(ways) >= 5
    for point in report["points"]:
        assert point["num_identical"] == point["num_outputs"] == 2
        assert point["measures"]["share_equal"] == 1.0
        assert point["measures"]["largest_gap"]["p50"] > 0
        assert 0.5 < point["mean_running"] <= point["concurrency"]


def test_what_proposes_nothing_is_no_part(llm):
    drafters = [SimpleNamespace(kind="lookup"), SimpleNamespace(kind="ngram"), NoDrafter()]
    llm.engine.proposer.drafters = drafters
    names = [way.name for way in ParetoBench({"lookup": llm}, parts=True).ways]
    assert names == ["plain", "lookup", "lookup alone", "ngram alone"]


def test_ways_are_called_as_short_as_tells_them_apart():
    assert names_of([Path("runs/a"), Path("runs/b")]) == ["runs/a", "runs/b"]
    assert names_of([None]) == ["lookup"]


def test_the_tables_fit_80_columns(llm):
    config = ParetoConfig(concurrency=(1, 32), num_requests=4, repeats=2, max_tokens=41)
    repeats = ParetoBench({"smollm2-135m-dflash": llm}).run(PROMPTS, config, RepeatJournal())
    points = [
        replace(point, throughput=Spread(1234.0, 1200.0, 1299.0), num_outputs=96, num_identical=96)
        for point in pareto_points(repeats)
    ]
    fast = reading_table("title", "per user", readings(repeats)[0])
    text = shown(*pareto_tables("title", points), fast)
    assert "1200-1299" in text
    assert "below its range" in text or "above its range" in text
    assert max(map(len, PARETO_LEGEND.splitlines())) <= 80


@pytest.mark.parametrize("command", ["pareto", "concurrency", "never-slower"])
def test_a_set_by_name_is_asked_with_many_at_once(monkeypatch, llm, tmp_path, command):
    row = {"id": "1", "turns": ["how much?"]}
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    arguments = [command, "--prompts", "gsm8k", "--concurrency", "1", "--max-tokens", "4"]
    missing = run_bench(monkeypatch, llm, *arguments)
    assert "name the folder" in missing.stderr
    arguments += ["--sets", str(tmp_path)]
    result = run_bench(monkeypatch, llm, *arguments, *SHORT[command])
    assert result.exit_code == 0, result.output
    asked = {"".join(map(chr, prompt)) for _, _, prompts, _ in llm.calls for prompt in prompts}
    assert asked == {"how much?" + BOXED_LINE}
