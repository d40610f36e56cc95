import json
from dataclasses import replace

import pytest

from blockdraft.bench.config import WARM_UP_TOKENS, ConcurrencyConfig, warm_up_of
from blockdraft.bench.decode import ADAPTIVE, PLAIN, Decoder, check_drafts, fixed, in_turn
from blockdraft.bench.load.concurrency import (
    CONCURRENCY_DEFINITIONS,
    KeepingUp,
    PointFigures,
    keeping_up,
    measure_concurrency,
    point_figures,
)
from blockdraft.bench.load.concurrency_report import (
    CONCURRENCY_LEGEND,
    concurrency_table,
    depth_lines,
    keeping_up_lines,
)
from blockdraft.bench.measures import Measures, Spread
from blockdraft.bench.workload import BenchPrompt, mixed_prompts
from blockdraft.cache.pages import Pages
from blockdraft.core.errors import INTERRUPTED, MISTAKE, ConfigError, RequestError
from blockdraft.core.plan import Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.run import check_explains
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.phases import PhaseTimer
from tests.bench_fakes import SECONDS_PER_TOKEN, FakeLLM, run_bench
from tests.bench_results import PROMPTS
from tests.command_line import shown

SMALL = ConcurrencyConfig(concurrency=(1, 2), num_requests=4, repeats=3, max_tokens=41)


@pytest.fixture
def llm(monkeypatch):
    return FakeLLM().patch_clock(monkeypatch)


def test_prompts_are_mixed_and_repeated():
    assert [p.id for p in mixed_prompts(PROMPTS, 6)] == ["a1", "b1", "a2", "a3", "a1", "b1"]


def test_the_ways_take_turns_every_few_requests(llm):
    prompts = [BenchPrompt(f"a{i}", "a", f"p{i}") for i in range(9)]
    config = ConcurrencyConfig(concurrency=(1,), num_requests=9, repeats=1, max_tokens=5)
    runs = measure_concurrency(llm, prompts, config)
    timed = llm.calls[3:]
    assert [(depth, len(prompts)) for depth, _, prompts, _ in timed] == [
        *((0, 4), (15, 4), ("adaptive", 4)),
        *((15, 4), ("adaptive", 4), (0, 4)),
        *(("adaptive", 1), (0, 1), (15, 1)),
    ]
    assert [len(measured.run.samples) for measured in runs] == [9, 9, 9]
    assert [measured.num_identical for measured in runs] == [9, 9, 9]


def test_every_item_has_its_turn_to_be_first():
    assert [in_turn("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


@pytest.mark.parametrize(("way", "seconds"), [(PLAIN, 0.9), (fixed(15), 0.7), (ADAPTIVE, 0.66)])
def test_a_run_is_one_closed_loop(llm, way, seconds):
    run = Decoder(llm).run([[1], [2], [3]], SamplingParams(max_tokens=5), way, 2)
    assert llm.calls == [(way.num_draft_tokens, 2, [[1], [2], [3]], 5)]
    assert run.outputs == [(1,) * 5, (2,) * 5, (3,) * 5]
    assert run.wall_seconds == pytest.approx(2 * seconds)  # two rounds of at most two requests
    assert run.tokens_per_second == pytest.approx(15 / (2 * seconds))


def test_a_warm_up_is_short_also_where_an_answer_must_be_long():
    short = warm_up_of(SamplingParams(max_tokens=64, min_tokens=60, seed=3))
    assert short == SamplingParams(max_tokens=WARM_UP_TOKENS, min_tokens=WARM_UP_TOKENS, seed=3)
    assert warm_up_of(SamplingParams(max_tokens=3)).max_tokens == 3


def test_a_run_has_the_phases_of_its_own_steps(llm):
    params = SamplingParams(max_tokens=5)
    Decoder(llm).run([[1]], params, PLAIN)
    run = Decoder(llm).run([[1]], params, PLAIN)
    assert run.phases.num_steps == 1
    assert run.phases.seconds["forward"] == pytest.approx(run.wall_seconds)


def test_work_is_counted_if_asked_for(llm):
    llm.engine.timer = usual = PhaseTimer(measures=False)
    counted, real = [], llm.generate

    def generate(*args):
        counted.append(llm.engine.timer.measures)
        return real(*args)

    llm.generate = generate
    config = ConcurrencyConfig(concurrency=(1,), num_requests=2, repeats=1, max_tokens=5)
    for ledger in (False, True):
        counted.clear()
        runs = measure_concurrency(llm, PROMPTS, replace(config, ledger=ledger))
        assert {run.run.phases.num_steps for run in runs} == {1}
        assert set(counted) == {ledger}
        assert llm.engine.timer is usual


def test_adaptive_depth_keeps_what_it_has_learned(llm):
    decoder = Decoder(llm)
    learned = []
    for way in (ADAPTIVE, ADAPTIVE, PLAIN, ADAPTIVE):
        decoder.run([[1]], SamplingParams(max_tokens=5), way)
        learned.append(llm.engine.allocator.policy)
    assert learned[0] is learned[1] is learned[3]
    assert [call[0] for call in llm.calls] == ["adaptive", "adaptive", 0, "adaptive"]


def test_no_prompt_is_reused(llm):
    llm.engine.target.memory = Pages(4)
    Decoder(llm).run([[1]], SamplingParams(max_tokens=5), PLAIN)
    assert not llm.engine.target.memory.reuse


def test_outputs_are_compared_one_by_one_with_repeated_ones(llm):
    run = Decoder(llm).run([[1], [2], [1], [3]], SamplingParams(max_tokens=5), PLAIN)
    assert run.num_equal([(1,) * 5, (2,) * 5]) == 3
    assert run.num_equal([(2,) * 5, (1,) * 5]) == 0


def test_each_point_runs_all_requests_the_ways_in_turns(llm):
    runs = measure_concurrency(llm, PROMPTS, SMALL)
    warm_ups = [call for call in llm.calls if call[3] == WARM_UP_TOKENS]
    assert [(depth, len(prompts)) for depth, _, prompts, _ in warm_ups] == [
        *((depth, at_once) for at_once in (1, 2) for depth in (0, 15, "adaptive")),
    ]
    timed = [call for call in llm.calls if call not in warm_ups]
    assert {tuple(map(tuple, prompts)) for _, _, prompts, _ in timed} == {
        tuple(tuple(map(ord, name)) for name in ("a1", "b1", "a2", "a3"))
    }
    assert [at_once for _, at_once, _, _ in timed] == [1] * 9 + [2] * 9
    depths = [depth for depth, *_ in timed]
    assert depths[:9] == depths[9:]
    assert depths[:6] == [0, 15, "adaptive", 15, "adaptive", 0]
    assert [run.way.num_draft_tokens for run in runs] == [0, 15, "adaptive"] * 6


def test_figures_of_a_point(llm):
    rows = point_figures(measure_concurrency(llm, PROMPTS, SMALL))
    assert [(row.concurrency, row.way) for row in rows] == [
        *((at_once, way) for at_once in (1, 2) for way in ("plain", "fixed 15", "adaptive")),
    ]
    plain, adaptive = rows[3], rows[5]
    # Two rounds of 0.5 s + 40 tokens at 0.1 s or 0.04 s.
    assert plain.tokens_per_second.median == pytest.approx(4 * 41 / 9)
    assert adaptive.tokens_per_second.low == pytest.approx(4 * 41 / 4.2)
    assert adaptive.speedup_over_plain.median == pytest.approx(9 / 4.2)
    assert plain.speedup_over_plain == Spread(1.0, 1.0, 1.0)
    assert adaptive.tokens_per_second_per_user.high == pytest.approx(25)
    assert adaptive.mean_decoding == pytest.approx(2 * 1.6 / 2.1)
    assert (plain.acceptance_length, plain.mean_depth) == (1.0, 0.0)
    assert (adaptive.acceptance_length, adaptive.mean_depth) == (2.0, 3.0)
    assert adaptive.mean_drafted == 3.0
    assert adaptive.num_passes_of_depth == {3: 4 * 20 * 3}
    assert adaptive.acceptance_rate == pytest.approx(1 / 3)
    assert all((row.num_identical, row.num_outputs) == (12, 12) for row in rows)


def test_what_is_asked_again_is_no_other_prompt(llm):
    runs = measure_concurrency(llm, PROMPTS, replace(SMALL, num_requests=6))
    found = point_figures(runs)[-1].measures
    assert (found.num_outputs, found.speedup.num_prompts) == (18, len(PROMPTS))


def test_requests_that_share_their_steps_have_no_band(llm):
    for row in point_figures(measure_concurrency(llm, PROMPTS, SMALL)):
        for speedup in (row.measures.speedup, row.measures.decode_speedup):
            assert (speedup.low is not None) == (row.concurrency == 1)


def test_a_speedup_is_taken_within_a_repeat(llm, monkeypatch):
    seconds = llm._seconds
    # A machine that gets slower and slower: every call takes twice as long as the one before.
    monkeypatch.setattr(llm, "_seconds", lambda n: seconds(n) * 2.0 ** len(llm.calls))
    config = ConcurrencyConfig(concurrency=(1,), num_requests=1, repeats=3, max_tokens=41)
    row = point_figures(measure_concurrency(llm, PROMPTS, config))[1]
    ratio = 4.5 / 2.5
    # One call behind plain decoding, two before it, one behind it.
    assert row.speedup_over_plain == Spread(
        *map(pytest.approx, (ratio / 2, ratio / 2, 4 * ratio)),
    )


def test_depths_are_counted_from_the_drafted_slots():
    stats = AcceptanceStats()
    for depth in (0, 0, 3, 3, 3, 5):
        stats.record(1, Proposal.chain([0] * depth, "test"), [])
    assert stats.num_passes_of_depth == {0: 2, 3: 3, 5: 1}
    assert AcceptanceStats().num_passes_of_depth == {}


def test_every_definition_is_a_figure():
    rows = (PointFigures, KeepingUp, Measures)
    figures = {name for row in rows for name in row.__dataclass_fields__}
    assert set(CONCURRENCY_DEFINITIONS) <= figures | {"keeps_up", "band", "memory"}


@pytest.mark.parametrize(
    ("seconds_per_token", "text"),
    [
        (0.04, "adaptive, concurrency 1: 1.19 times fixed 15, 1.19-1.19"),
        (0.0515, "adaptive, concurrency 1: 0.98 times fixed 15, 0.98-0.98"),
        (0.053, "adaptive, concurrency 1: 0.95 times fixed 15, 0.95-0.95: MORE THAN 3 % SLOWER"),
    ],
)
def test_adaptive_depth_is_held_against_the_best_other_way(
    llm, monkeypatch, seconds_per_token, text
):
    monkeypatch.setitem(SECONDS_PER_TOKEN, "adaptive", seconds_per_token)
    rows = keeping_up(measure_concurrency(llm, PROMPTS, SMALL))
    assert keeping_up_lines(rows)[0] == text
    assert [row.keeps_up for row in rows] == ["SLOWER" not in text] * 2
    monkeypatch.setitem(SECONDS_PER_TOKEN, 0, 0.01)
    rows = keeping_up(measure_concurrency(llm, PROMPTS, SMALL))
    assert {row.best for row in rows} == {"plain"}
    assert not any(row.keeps_up for row in rows)


def test_the_table_fits_80_columns():
    wide = Spread(1234.5, 1200.4, 1300.6)
    row = PointFigures(
        *(32, "fixed 15", wide, wide, Spread(1.234, 0.98, 12.3)),
        *(31.4, 12.34, 0.5, 15.0, {15: 9, 0: 1}, 15.0, 96, 96, None, None),
    )
    text = shown(concurrency_table("title", [row]))
    # One line for the row: title, blank, two of headings, a rule, the row, blank.
    assert len(text.splitlines()) == 7
    assert "1200-1301" in text
    assert max(map(len, CONCURRENCY_LEGEND.splitlines())) <= 80
    assert depth_lines([row]) == []


def test_the_depths_of_adaptive_rows_are_told(llm):
    rows = point_figures(measure_concurrency(llm, PROMPTS, SMALL))
    assert depth_lines(rows)[1] == (
        "adaptive, concurrency 2, longest path: 3 in 100% of the passes"
    )


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(llm):
    prompts = [*PROMPTS, BenchPrompt("long", "c", "x" * 600)]
    config = ConcurrencyConfig(concurrency=(5,), max_tokens=6)
    with pytest.raises(RequestError, match="prompt long of c"):
        measure_concurrency(llm, prompts, config)
    assert llm.calls == []


def test_a_drafter_is_needed_or_lookup():
    llm = FakeLLM(drafter_folder=None)
    with pytest.raises(ConfigError, match=r"no drafter.*, or add --lookup"):
        measure_concurrency(llm, PROMPTS, SMALL)
    for check in (check_drafts, check_explains):
        with pytest.raises(ConfigError, match=r"name (one|a drafter) with .*, or add --lookup"):
            check(llm)
    llm.config = replace(llm.config, lookup=True)
    for check in (check_drafts, check_explains):
        check(llm)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"concurrency": ()}, "concurrency is empty"),
        ({"concurrency": (1, 0)}, "concurrency is 0"),
        ({"concurrency": (2, 1, 2)}, "2,1,2 names a number twice"),
        ({"repeats": 0}, "repeats is 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"num_requests": 0}, "requests is 0"),
    ],
)
def test_bad_options_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        ConcurrencyConfig(**options)


def test_there_are_as_many_requests_as_the_largest_point():
    config = ConcurrencyConfig(concurrency=(1, 4, 8))
    assert config.requests_per_point == 32
    assert [config.requests_at(point) for point in config.concurrency] == [8, 16, 32]
    config = replace(config, num_requests=3)
    assert [config.requests_at(point) for point in config.concurrency] == [3, 3, 3]


def test_the_command_writes_a_whole_report(monkeypatch, llm, tmp_path):
    output = tmp_path / "report.json"
    arguments = ["--concurrency", "1,2", "--max-tokens", 11, "--repeats", 2, "--output", output]
    result = run_bench(monkeypatch, llm, "concurrency", *arguments)
    assert result.exit_code == 0, result.output
    assert "adaptive, concurrency 2" in result.stdout
    assert "greedy, up to 8 requests of at most 11 tokens" in result.stdout
    report = json.loads(output.read_text(encoding="utf-8"))
    assert {"command", "git_commit", "versions", "machine", "threads", "definitions"} <= set(report)
    assert report["bench"]["num_requests"] == 8
    assert len(report["figures"]) == 2 * 3
    assert [row["concurrency"] for row in report["keeping_up"]] == [1, 2]
    assert len(report["runs"]) == 2 * 3 * 2
    run = report["runs"][0]
    assert run["way"] == {"name": "plain", "num_draft_tokens": 0, "drafters": None}
    assert [len(request["token_ids"]) for request in run["requests"]] == [11] * 4


def test_an_ended_command_goes_on(monkeypatch, llm, tmp_path):
    output = tmp_path / "report.json"
    arguments = ["concurrency", "--concurrency", "1,2", "--max-tokens", 11, "--repeats", 2]
    arguments += ["--output", output]
    assert run_bench(monkeypatch, llm, *arguments).exit_code == 0
    whole = json.loads(output.read_text(encoding="utf-8"))
    output.unlink()
    with llm.interrupted(at_once=2):
        broken_off = run_bench(monkeypatch, llm, *arguments)
    assert broken_off.exit_code == INTERRUPTED
    assert "holds what was measured; the same command resumes it" in broken_off.stderr
    refused = run_bench(monkeypatch, llm, *arguments, "--seed", 1)
    assert refused.exit_code == MISTAKE
    assert "from a run with different seed and cannot be resumed" in refused.stderr
    llm.calls.clear()
    assert run_bench(monkeypatch, llm, *arguments).exit_code == 0
    assert {at_once for _, at_once, _, _ in llm.calls} == {2}
    again = json.loads(output.read_text(encoding="utf-8"))
    tokens = [
        [(run["concurrency"], run["way"], run["num_identical"]) for run in result["runs"]]
        for result in (whole, again)
    ]
    assert tokens[0] == tokens[1]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_ledger_starts_anew(monkeypatch, llm, tmp_path):
    arguments = ["--concurrency", "1,2", "--max-tokens", 11, "--ledger"]
    arguments += ["--output", tmp_path / "report.json"]
    with llm.interrupted(at_once=2):
        result = run_bench(monkeypatch, llm, "concurrency", *arguments)
    assert result.exit_code == INTERRUPTED
    assert "interrupted" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("exact", "status"), [("on", 1), ("off", 0)])
def test_an_output_that_differs_fails_where_exactness_is_promised(monkeypatch, exact, status):
    llm = FakeLLM(broken=("adaptive",))
    arguments = ["--concurrency", 2, "--max-tokens", 5, "--exact", exact, "--json"]
    result = run_bench(monkeypatch, llm, "concurrency", *arguments)
    assert result.exit_code == status
    figures = json.loads(result.stdout)["figures"]
    assert [row["num_identical"] for row in figures] == [24, 24, 0]


def test_a_point_that_is_no_number_is_refused_before_loading(monkeypatch):
    result = run_bench(monkeypatch, None, "concurrency", "--concurrency", "1,two")
    assert result.exit_code == 2
    assert "concurrency is '1,two'; give numbers such as 1,2,4" in result.stderr
