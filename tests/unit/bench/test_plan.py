import json
from math import exp, factorial, inf
from pathlib import Path

import pytest

from blockdraft.bench.plan import replicas, traffic
from blockdraft.bench.plan.queueing import (
    Goal,
    Service,
    ServicePoint,
    completion_rate,
    drafting_below,
    load_of,
    num_replicas,
)
from blockdraft.bench.plan.replicas import make_plan, off_from, services_of
from blockdraft.bench.plan.report import PLAN_LEGEND, off_lines, plan_table
from blockdraft.bench.plan.simulation import Arrival, poisson_arrivals, simulate, simulated_load
from blockdraft.bench.plan.traffic import read_traffic, steady_traffic
from blockdraft.bench.result import read_result
from blockdraft.core.errors import ConfigError
from tests.bench_results import pareto_values, speed_values
from tests.command_line import run, shown
from tests.rows import write_rows

OUTPUT_LEN = 1001
TOKEN = 0.001
"""Seconds: an output of OUTPUT_LEN tokens takes one, its prompt next to nothing."""


def constant(most, token_seconds=TOKEN):
    """A replica on which requests do not slow each other down."""
    first = ServicePoint(1.0, 1e-9, token_seconds)
    return Service((first, ServicePoint(float(most), 1e-9, token_seconds))[: min(2, most)])


def shared(most):
    """A replica on which requests share one speed: processor sharing, up to `most`."""
    return Service(tuple(ServicePoint(float(n), 1e-9, n * TOKEN) for n in range(1, most + 1)))


def mean_wait(played):
    counted = played[len(played) // 10 :]
    return sum(one.wait for one in counted) / len(counted)


def erlang_c(servers, offered):
    """The chance to wait in M/M/c, from the textbook."""
    blocked = offered**servers / factorial(servers) * servers / (servers - offered)
    return blocked / (sum(offered**n / factorial(n) for n in range(servers)) + blocked)


@pytest.fixture
def curve(tmp_path, monkeypatch):
    path = tmp_path / "pareto.json"
    path.write_text(json.dumps(pareto_values(monkeypatch)), encoding="utf-8")
    return path


def run_cli(*arguments):
    return run("bench", "plan", *arguments)


@pytest.mark.parametrize("busy", [0.3, 0.7, 0.9])
def test_one_place_is_the_queue_m_m_1(busy):
    load = load_of(constant(1), busy, OUTPUT_LEN, 95.0)
    assert load.utilization == pytest.approx(busy)
    assert load.mean_running == pytest.approx(busy)
    assert load.mean_wait == pytest.approx(busy / (1 - busy))
    # P(wait > t) = busy exp(-(1 - busy) t)
    if busy > 0.05:
        assert busy * exp(-(1 - busy) * load.first_token_seconds) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(("servers", "offered"), [(2, 1.5), (8, 6.0), (32, 30.0)])
def test_places_that_do_not_slow_each_other_are_m_m_c(servers, offered):
    load = load_of(constant(servers), offered, OUTPUT_LEN, 95.0)
    chance = erlang_c(servers, offered)
    assert load.mean_wait == pytest.approx(chance / (servers - offered))
    assert load.mean_running == pytest.approx(offered)
    if chance > 0.05:
        waited = chance * exp(-(servers - offered) * load.first_token_seconds)
        assert waited == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("busy", [0.5, 0.8])
def test_the_simulation_is_m_d_1_where_outputs_are_equally_long(busy):
    arrivals = [Arrival(one.at, OUTPUT_LEN) for one in poisson_arrivals(busy, 2, 40_000)]
    wait = mean_wait(simulate(constant(1), arrivals))
    assert wait == pytest.approx(busy / (2 * (1 - busy)), rel=0.05)  # Pollaczek and Khinchine


def test_the_simulation_is_m_m_1_where_lengths_are_exponential():
    wait = mean_wait(simulate(constant(1), poisson_arrivals(0.6, OUTPUT_LEN, 40_000)))
    assert wait == pytest.approx(0.6 / 0.4, rel=0.06)


@pytest.mark.parametrize(
    ("service", "rate"), [(constant(8), 6.5), (shared(4), 0.6), (shared(3), 0.8)]
)
def test_formula_and_simulation_agree(service, rate):
    goal = Goal(token_seconds=1.0, percentile=90.0)
    formula = load_of(service, rate, OUTPUT_LEN, 90.0)
    played = simulated_load(service, poisson_arrivals(rate, OUTPUT_LEN, 40_000), 1, goal)
    assert played.mean_running == pytest.approx(formula.mean_running, rel=0.08)
    assert played.mean_wait == pytest.approx(formula.mean_wait, rel=0.15, abs=0.02)
    assert played.first_token_seconds == pytest.approx(
        formula.first_token_seconds, rel=0.15, abs=0.05
    )
    assert played.utilization == pytest.approx(formula.utilization, rel=0.03)
    # The formula takes the state that a request comes into for its whole life, which is strict.
    assert played.token_seconds <= 1.05 * formula.token_seconds


def test_replicas_share_what_comes():
    service, goal = shared(4), Goal(first_token_seconds=0.5)
    arrivals = poisson_arrivals(1.5, OUTPUT_LEN, 20_000)
    two = simulated_load(service, arrivals, 2, goal)
    assert two.mean_running == pytest.approx(load_of(service, 0.75, 1001, 95.0).mean_running, 0.1)


def test_every_request_is_played_once():
    arrivals = poisson_arrivals(20.0, 11, 500)
    played = simulate(shared(4), arrivals, replicas=3)
    assert [(one.at, one.output_len) for one in played] == [(a.at, a.output_len) for a in arrivals]
    assert min(one.wait for one in played) >= 0


def test_a_single_token_is_played_too():
    (one,) = simulate(Service((ServicePoint(1.0, 2.0, 0.5),)), [Arrival(3.0, 1)])
    assert one.first_token_seconds == pytest.approx(2.0)
    assert one.token_seconds is None


def test_a_load_that_is_too_high_never_ends():
    assert load_of(constant(1), 1.0, OUTPUT_LEN, 95.0).first_token_seconds == inf


def test_between_measured_points_a_service_is_linear():
    service = Service((ServicePoint(1.0, 1.0, 0.1), ServicePoint(5.0, 3.0, 0.3)))
    assert service.token_seconds(3) == pytest.approx(0.2)
    assert service.prompt_seconds(9) == 3.0
    assert service.most == 5
    assert completion_rate(service, 5, 11) == pytest.approx(5 / (3 + 10 * 0.3))


def test_replicas_are_as_few_as_meet_the_goal():
    service, goal = shared(8), Goal(token_seconds=3 * TOKEN, percentile=90.0)
    for rate in (0.2, 3.0, 40.0):
        count = num_replicas(service, rate, OUTPUT_LEN, goal)
        assert goal.is_met(load_of(service, rate / count, OUTPUT_LEN, 90.0))
        if count > 1:
            assert not goal.is_met(load_of(service, rate / (count - 1), OUTPUT_LEN, 90.0))


def test_a_goal_that_a_lone_request_misses_is_never_met():
    assert num_replicas(shared(8), 1.0, OUTPUT_LEN, Goal(token_seconds=0.9 * TOKEN)) is None


def test_too_much_traffic_is_told():
    with pytest.raises(ConfigError, match="take more than 100000 replicas"):
        num_replicas(shared(8), 1e9, OUTPUT_LEN, Goal(token_seconds=1.0))


def test_drafting_can_be_off_under_load():
    drafted = Service((ServicePoint(1.0, 0.1, 0.04), ServicePoint(4.0, 0.1, 0.2)))
    plain = Service((ServicePoint(1.0, 0.1, 0.1), ServicePoint(4.0, 0.1, 0.13)))
    both = drafting_below(4.0, drafted, plain)
    assert [point.token_seconds for point in both.points] == [0.04, 0.13]


def test_a_curve_gives_services(curve):
    services = services_of(read_result(curve))
    assert list(services) == ["plain", "drafter"]
    assert services["plain"].token_seconds(2) == pytest.approx(0.11)
    assert services["plain"].prompt_seconds(2) == pytest.approx(0.55)
    assert services["plain"].most == 4
    longer = services_of(read_result(curve), prompt_len=6.0)
    assert longer["plain"].prompt_seconds(2) == pytest.approx(3 * 0.55)


def test_where_drafting_should_be_off(curve):
    result = read_result(curve)
    # 2.1 (1 + 0.6 (n - 1)) seconds drafted, 4.5 (1 + 0.1 (n - 1)) plainly: slower with four.
    assert off_from(result, "drafter") == 4
    goal = Goal(first_token_seconds=60.0)
    rows = make_plan(result, steady_traffic(0.5, 41, None), goal, 2.0)
    assert [row.way for row in rows] == ["plain", "drafter", "drafter, off from concurrency 4"]
    assert off_lines(result, rows) == [
        "drafter: turn it off from concurrency 4 on, where it gives 0.99 times plain in total "
        "(0.99-0.99 over the repeats)"
    ]
    assert rows[0].cost_per_hour == 2 * rows[0].replicas
    assert rows[0].cost_per_million_tokens == pytest.approx(
        rows[0].cost_per_hour / (3600 * 0.5 * 41) * 1e6
    )
    assert rows[2].replicas <= min(rows[0].replicas, rows[1].replicas)


def test_a_burst_takes_more_replicas_than_its_mean(curve, tmp_path):
    result = read_result(curve)
    path = tmp_path / "arrivals.jsonl"
    bursts = [100.0 * burst + 0.01 * i for burst in range(20) for i in range(20)]
    write_rows(path, [{"at": at, "output_tokens": 41} for at in bursts])
    traffic = read_traffic(path, None)
    assert traffic.requests_per_second == pytest.approx(0.2, rel=0.06)
    row = make_plan(result, traffic, Goal(first_token_seconds=8.0), None)[0]
    assert row.replicas > row.replicas_by_formula
    assert row.cost_per_hour is None


def test_a_record_is_played_as_it_is_whatever_its_name(curve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("independent.jsonl")
    write_rows(path, [{"at": 9 * i, "output_tokens": 41} for i in range(3)])
    for module in (replicas, traffic):
        monkeypatch.setattr(module, "poisson_arrivals", lambda *_: pytest.fail("drew requests"))
    row = make_plan(read_result(curve), read_traffic(path, None), Goal(first_token_seconds=9), 1)[0]
    assert row.replicas == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"output_tokens": 3}', "at is None"),
        ('{"at": -1, "output_tokens": 3}', "at is -1"),
        ('{"at": 1, "output_tokens": 0}', "output_tokens is 0"),
        ('{"at": 1, "output_tokens": true}', "output_tokens is True"),
        ("", r'holds no requests; give JSONL rows such as \{"at": 12.5, "output_tokens": 80\}'),
        ('{"at": 1, "output_tokens": 3}', "at one moment"),
    ],
)
def test_bad_arrivals_are_refused(tmp_path, line, reason):
    path = tmp_path / "arrivals.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        read_traffic(path, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-tpot", 50], "no traffic; give --requests-per-second"),
        (["--requests-per-second", 1], "no goal; give --max-tpot"),
        (["--requests-per-second", 0, "--max-tpot", 50], "--requests-per-second is 0"),
        (["--requests-per-second", 1, "--max-tpot", -5], "--max-tpot is -5 ms"),
        (["--requests-per-second", 1, "--max-tpot", 5, "--percentile", 100], "percentile is 100"),
        (["--requests-per-second", 1, "--max-tpot", 5, "--price", -1], "price is -1"),
        (
            ["--requests-per-second", 1, "--max-tpot", 5, "--output-tokens", 0],
            "--output-tokens is 0",
        ),
        (
            ["--requests-per-second", 1, "--max-tpot", 5, "--prompt-tokens", 0],
            "--prompt-tokens is 0",
        ),
        (["--requests-per-second", 1, "--arrivals", "x", "--max-tpot", 5], "leave out"),
    ],
)
def test_bad_options_are_refused(curve, arguments, reason):
    result = run_cli(curve, *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_a_field_of_a_file_is_not_taken_for_an_option(curve, tmp_path):
    path = tmp_path / "arrivals.jsonl"
    path.write_text('{"at": 1, "output_tokens": 0}\n', encoding="utf-8")
    result = run_cli(curve, "--max-tpot", 5, "--arrivals", path)
    assert "line 1: output_tokens is 0; give" in result.stderr


def test_a_curve_without_a_baseline_is_refused(curve, tmp_path):
    values = json.loads(curve.read_text(encoding="utf-8"))
    values["points"] = [point for point in values["points"] if point["way"] != "plain"]
    curve.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks the baseline, plain decoding"):
        services_of(read_result(curve))
    other = tmp_path / "speed.json"
    other.write_text(json.dumps(speed_values()), encoding="utf-8")
    with pytest.raises(ConfigError, match="is a 'speed' result; give one that bench pareto wrote"):
        services_of(read_result(other))


def test_the_command_says_how_many(curve, tmp_path):
    output = tmp_path / "plan.json"
    asked = ["--requests-per-second", 0.5, "--max-ttft", 3000, "--price", 2, "--output", output]
    result = run_cli(curve, *asked)
    assert result.exit_code == 0, result.output
    assert "0.5 requests per second, outputs of 41 tokens; 95 % within TTFT 3000 ms" in (
        " ".join(result.stdout.split())
    )
    assert "turn it off from concurrency 4 on" in result.stdout
    made = json.loads(output.read_text(encoding="utf-8"))
    assert made["result"] == "plan"
    assert {"command", "machine", "versions", "definitions", "curve", "goal"} <= set(made)
    assert all(row["replicas"] >= row["replicas_by_formula"] for row in made["rows"])


def test_a_goal_that_nothing_meets_is_the_answer_no(curve):
    result = run_cli(curve, "--requests-per-second", 1, "--max-tpot", 1)
    assert result.exit_code == 1
    assert "never" in result.stdout


def test_the_table_fits_80_columns(curve):
    traffic = steady_traffic(5.0, 41, None)
    rows = make_plan(read_result(curve), traffic, Goal(first_token_seconds=3.0), 12.5)
    assert "title" in shown(plan_table("title", rows))
    assert max(map(len, PLAN_LEGEND.splitlines())) <= 80
