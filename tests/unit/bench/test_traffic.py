"""Mixed traffic: requests come at their times, have their own lengths, and may be given up."""

import json
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from blockdraft.bench.config import TrafficConfig
from blockdraft.bench.decode import PLAIN, Decoder
from blockdraft.bench.load import traffic
from blockdraft.bench.load.traffic import (
    Answer,
    Play,
    Request,
    TrafficJournal,
    draw_requests,
    measure_traffic,
    traffic_figures,
)
from blockdraft.bench.report.changes import figures_of
from blockdraft.bench.report.sections import section_of
from blockdraft.bench.result import read_result
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.errors import INTERRUPTED, ConfigError
from blockdraft.llm import LLM
from tests.command_line import refusal, run
from tests.interrupts import interrupt_call

CONFIG = TrafficConfig(requests_per_second=500.0, num_requests=12, concurrency=3, max_tokens=24)


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(*folders, dtype="float32")


def test_traffic_is_drawn_by_its_seed():
    config = replace(CONFIG, num_requests=2000, min_tokens=4, max_tokens=64, abort_share=0.25)
    requests = draw_requests(config, 7)
    assert requests == draw_requests(config, 7)
    assert requests != draw_requests(replace(config, seed=1), 7)
    gaps = [later.at - one.at for one, later in pairwise(requests)]
    assert fmean(gaps) == pytest.approx(1 / 500, rel=0.1)
    lengths = [one.max_tokens for one in requests]
    assert (min(lengths), max(lengths)) == (4, 64)
    # As many between 4 and 16 tokens as between 16 and 64.
    assert sum(length <= 16 for length in lengths) == pytest.approx(1000, rel=0.1)
    gone = [one for one in requests if one.gone_after is not None]
    assert len(gone) == pytest.approx(500, rel=0.15)
    assert all(1 <= one.gone_after <= one.max_tokens for one in gone)
    assert {one.temperature for one in requests} == {0.0, 0.7}
    assert {one.prompt for one in requests} == set(range(7))
    assert len({one.seed for one in requests}) == 2000


def test_requests_wait_for_their_time_and_for_a_place(llm, monkeypatch):
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(traffic, "perf_counter", lambda: now[0])
    monkeypatch.setattr(traffic, "sleep", sleep)
    real, at_once = llm.samples.step, []

    def step():
        outputs = real()
        now[0] += 1.0
        at_once.append(len(llm.engine.progress))
        return outputs

    monkeypatch.setattr(llm.samples, "step", step)
    requests = [Request(at, 0, 3, 0.0, 0) for at in (0.0, 0.5, 100.0)]
    ids = llm.tokenizer.encode("the abc")
    decoder = Decoder(llm)
    play = traffic._play(decoder, PLAIN, [ids], requests, 2)
    assert slept == [pytest.approx(96.0)]
    assert max(at_once) == 2
    assert play.wall_seconds == pytest.approx(103.0)
    assert [len(answer.token_ids) for answer in play.answers] == [3, 3, 3]
    one_by_one = traffic._play(decoder, PLAIN, [ids], requests, 1)
    assert [a.token_ids for a in one_by_one.answers] == [a.token_ids for a in play.answers]
    assert llm.engine.scheduler.max_running == 1


def test_drafted_answers_are_the_plain_ones_up_to_where_they_are_given_up(llm):
    prompts = [llm.tokenizer.encode(text) for text in ("the abc", "ab the ab", "!")]
    requests = draw_requests(replace(CONFIG, abort_share=0.5), 3)
    repeats = measure_traffic(llm, prompts, requests, CONFIG, TrafficJournal())
    assert [list(repeat) for repeat in repeats] == [["plain", "adaptive"]] * 2
    assert not llm.engine.progress, "what was given up is forgotten"
    plain, drafted = traffic_figures(repeats, requests)
    assert plain.num_outputs == drafted.num_outputs == drafted.num_identical == 24
    assert 0 < plain.num_aborted == drafted.num_aborted < 24
    for request, answer in zip(requests, repeats[0]["adaptive"].answers, strict=True):
        if answer.timed is None:
            assert len(answer.token_ids) == request.gone_after
        else:
            assert request.gone_after is None or len(answer.token_ids) < request.gone_after
            assert answer.timed.token_ids == answer.token_ids
            # Alone, the request has the same answer: traffic changes none.
            alone = llm.generate(prompts[request.prompt], request.params)
            assert alone.completions[0].token_ids == answer.token_ids
    assert drafted.measures.num_outputs == 24 - drafted.num_aborted
    assert drafted.measures.share_equal == 1.0
    assert drafted.measures.speedup.low is not None
    whole = {
        r.prompt for r, a in zip(requests, repeats[0]["plain"].answers, strict=True) if a.timed
    }
    assert drafted.measures.speedup.num_prompts == len(whole) <= 3


def test_a_different_output_is_counted(llm):
    ids = [llm.tokenizer.encode("the abc")]
    requests = [Request(0.0, 0, 4, 0.0, 0), Request(0.0, 0, 4, 0.0, 0, gone_after=2)]
    (repeat,) = measure_traffic(llm, ids, requests, replace(CONFIG, repeats=1), TrafficJournal())
    whole, part = repeat["adaptive"].answers
    wrong = Play(1.0, (whole, Answer((part.token_ids[0] + 1, *part.token_ids[1:]), None)))
    _, drafted = traffic_figures([{"plain": repeat["plain"], "adaptive": wrong}], requests)
    assert (drafted.num_identical, drafted.num_outputs) == (1, 2)


@pytest.fixture
def arguments(pair, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "the abc"}\n{"prompt": "ab the ab"}\n', encoding="utf-8")
    options = ["bench", "traffic", "--prompts", prompts, *pair]
    options += ["--requests-per-second", 200, "--requests", 8]
    options += ["--threads", 1]
    return [*options, "--max-tokens", 12, "--output", tmp_path / "traffic.json"]


def test_the_command_lists_its_traffic_and_goes_on(arguments, monkeypatch):
    output = arguments[-1]
    calls = interrupt_call(monkeypatch, traffic, "_play", 3)
    assert run(*arguments).exit_code == INTERRUPTED
    assert output.with_name("traffic.json.part.jsonl").exists()
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert len(calls) == 5, "the first repeat is not played again"
    assert "8 requests, 200 per second" in result.stdout
    assert "16/16" in result.stdout
    assert max(map(len, result.stdout.splitlines()[2:])) <= 80
    written = json.loads(output.read_text(encoding="utf-8"))
    assert written["bench"]["requests_per_second"] == 200
    assert [one["prompt_id"] for one in written["requests"]] == ["p-1", "p-2"] * 4
    assert len(written["repeats"]) == 2
    assert {"requests", "aborted", "band", "memory"} <= set(written["definitions"])
    (grid,) = section_of(read_result(output)).grids
    assert [row[0] for row in grid.rows] == ["plain", "adaptive"]
    assert [row[-2] for row in grid.rows] == ["16/16"] * 2
    names = [figure.name for figure in figures_of(read_result(output))]
    assert "adaptive: decode speed-up" in names


def test_a_different_output_ends_the_command_with_1(arguments, monkeypatch):
    real = traffic._play

    def damaged(decoder, way, *rest):
        play = real(decoder, way, *rest)
        if way == PLAIN:
            return play
        first, *others = play.answers
        return Play(play.wall_seconds, (Answer((0, *first.token_ids[1:]), first.timed), *others))

    monkeypatch.setattr(traffic, "_play", damaged)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "14/16" in result.stdout


def test_an_answer_that_one_side_lacks_is_measured_on_neither():
    """As where outputs differ, so that one of them ends before its client disconnects."""

    def answer(seconds):
        return Answer((1, 2), None if seconds is None else TimedOutput((1, 2), seconds, 0.5))

    requests = [Request(0.0, prompt, 2, 0.0, 1) for prompt in range(3)]
    plain = Play(9.0, tuple(map(answer, (4.0, 4.0, None))))
    adaptive = Play(9.0, tuple(map(answer, (2.0, None, 1.0))))
    _, drafted = traffic_figures([{"plain": plain, "adaptive": adaptive}], requests)
    assert (drafted.num_aborted, drafted.measures.num_outputs) == (1, 1)
    assert drafted.measures.speedup.value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--requests-per-second", "0"], "--requests-per-second is 0"),
        (["--abort-share", "1.5"], "--abort-share is 1.5"),
        (["--temperatures", "warm"], "temperatures is 'warm'"),
        (["--temperatures", "-1"], "temperature is -1"),
        (["--min-tokens", "20"], "--max-tokens 12 is below --min-tokens 20"),
        (["--requests", "0"], "requests is 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(arguments, options, reason):
    assert reason in refusal(*arguments, "--target", "x", *options)


def test_a_damaged_journal_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "j"
    played = {"plain": Play(1.0, (Answer((1, 2), TimedOutput((1, 2), 2.0, 1.0)),))}
    TrafficJournal(path).add((0,), played)
    assert TrafficJournal(path).done == {(0,): played}
    whole = path.read_text(encoding="utf-8")
    for good, bad in (('"answers"', '"other"'), ("[]", "[[1, 2, 3]]"), ('"Play"', '"Pla"')):
        text = whole.replace(good, bad, 1)
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="damaged"):
            TrafficJournal(path)
        assert path.read_text(encoding="utf-8") == text
