"""Results of every kind, from fake measurements, as the commands write them."""

import json
from dataclasses import asdict, replace

from blockdraft.bench.config import (
    BreakEvenConfig,
    ConcurrencyConfig,
    NeverSlowerConfig,
    ParetoConfig,
    SpeedConfig,
    TrafficConfig,
)
from blockdraft.bench.load.concurrency import measure_concurrency
from blockdraft.bench.load.concurrency_report import concurrency_json, never_slower_json
from blockdraft.bench.load.never_slower import measure_never_slower
from blockdraft.bench.load.pareto import ParetoBench
from blockdraft.bench.load.pareto_report import pareto_json
from blockdraft.bench.load.repeats import RepeatJournal
from blockdraft.bench.load.traffic import Answer, Play, Request
from blockdraft.bench.load.traffic_report import traffic_json
from blockdraft.bench.plan.queueing import Goal
from blockdraft.bench.plan.replicas import make_plan
from blockdraft.bench.plan.report import plan_json
from blockdraft.bench.plan.traffic import steady_traffic
from blockdraft.bench.result import describe_result, read_result
from blockdraft.bench.speed.bench import Measurement
from blockdraft.bench.speed.break_even import DecodeTotals, ForcedMeasurement
from blockdraft.bench.speed.break_even import json_report as break_even_json
from blockdraft.bench.speed.figures import DEFINITIONS, groups_of
from blockdraft.bench.speed.report import json_report
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.plan import Proposal
from blockdraft.measure.acceptance import AcceptanceStats
from tests.bench_fakes import FakeLLM

PROMPTS = [BenchPrompt(name, name[0], name) for name in ("a1", "a2", "a3", "b1")]
PARETO = ParetoConfig(concurrency=(1, 2, 4), num_requests=4, repeats=2, max_tokens=41)
SLOWDOWN = {0: 0.1, 15: 0.4, "adaptive": 0.6}
"""With four at once drafting is slower than plain decoding."""


def stats(*committed):
    result = AcceptanceStats()
    for num_tokens in committed:
        result.record(num_tokens, Proposal.chain([0] * 5, "test"), range(num_tokens - 1))
    return result


def measurement(category, num_tokens, plain_s, drafted_s, *, looping=False, identical=True):
    ids = tuple([1] * num_tokens if looping else range(num_tokens))
    acceptance = stats(*[2] * (num_tokens // 2))
    drafted = TimedOutput(ids, drafted_s, drafted_s / 2, acceptance, 0.0, drafted_s / 8)
    plain = TimedOutput(ids if identical else ids[:-1], plain_s, plain_s / 2, stats(1, 1))
    prompt = BenchPrompt("1", category, f"{num_tokens} words")
    return Measurement(prompt, plain, drafted, TimedOutput(ids, 8.0, 4.0))


MEASURED = [
    measurement("gsm8k", 10, 4.0, 2.0),
    measurement("gsm8k", 30, 4.0, 3.0),
    measurement("mt-bench", 40, 2.0, 2.2, looping=True),
]


def speed_values():
    sampled = SpeedConfig(temperature=0.7)
    return json_report(FakeLLM(), [(SpeedConfig(), MEASURED), (sampled, MEASURED[:1])])


def ways_values():
    """As `tools/experiments/compare_ways.py` writes them."""
    groups = groups_of(MEASURED)
    return {
        **describe_result("ways", FakeLLM(), DEFINITIONS),
        "settings": {"temperature": "0.0", "max_tokens": "96"},
        "ways": {
            "plain": {"draft_ms": 0.0, "verify_ms": 9.5},
            "drafter=a": {
                "draft_ms": 1.25,
                "verify_ms": 12.0,
                "num_parameters": 19_400_000,
                "training": {"config": {"max_minutes": 4.0}},
            },
            "drafter=b,lookup=false": {"draft_ms": 0.5, "verify_ms": 10.0},
        },
        "figures": {
            way: {group: asdict(figures) for group, figures in groups.items()}
            for way in ("drafter=a", "drafter=b,lookup=false")
        },
    }


def concurrency_values(monkeypatch):
    llm = FakeLLM(slowdown=SLOWDOWN).patch_clock(monkeypatch)
    config = ConcurrencyConfig(concurrency=(1, 2), num_requests=4, repeats=2, max_tokens=41)
    return concurrency_json(llm, config, measure_concurrency(llm, PROMPTS, config))


def never_slower_values(monkeypatch):
    llm = FakeLLM()
    baseline = FakeLLM(drafter_folder=None)
    monkeypatch.setattr("blockdraft.bench.decode.perf_counter", lambda: llm.now + baseline.now)
    config = NeverSlowerConfig(concurrency=(1, 2), seconds=1.0, pairs=2, max_tokens=11)
    return never_slower_json(llm, config, measure_never_slower(llm, baseline, PROMPTS, config))


def break_even_values():
    one = ForcedMeasurement(
        PROMPTS[0], DecodeTotals(4.0, 40, 40, 0, 0), DecodeTotals(5.0, 40, 20, 60, 20)
    )
    config = BreakEvenConfig(force_acceptance=0.3)
    return break_even_json(FakeLLM(), config, [one, replace(one, prompt=PROMPTS[1])])


def pareto_values(monkeypatch, config=PARETO, **options):
    llm = FakeLLM(slowdown=SLOWDOWN, **options).patch_clock(monkeypatch)
    bench = ParetoBench({"drafter": llm}, parts=config.parts)
    repeats = bench.run(PROMPTS, config, RepeatJournal())
    return pareto_json(bench, config, repeats, 2.0)


def traffic_values():
    ids, acceptance = (1, 2, 3, 4), stats(2, 2)

    def play(seconds):
        timed = TimedOutput(ids, seconds, 0.75 * seconds, acceptance)
        return Play(seconds, (Answer(ids, timed), Answer((1,), None)))

    requests = [Request(0.0, 0, 4, 0.0, 1), Request(0.5, 1, 8, 0.7, 2, gone_after=1)]
    config = TrafficConfig(num_requests=2, repeats=2)
    repeats = [{"plain": play(4.0), "adaptive": play(2.0)}] * 2
    return traffic_json(FakeLLM(), config, requests, ["a1", "a2"], repeats)


def plan_values(curve_path):
    result = read_result(curve_path)
    traffic, goal = steady_traffic(0.5, 41, None), Goal(0.2, 3.0)
    rows = make_plan(result, traffic, goal, 2.0)
    return plan_json(result, traffic, goal, 2.0, rows)


def write_all(folder, monkeypatch):
    """A result of every kind that a command writes, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(name, values):
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")

    write("speed", speed_values())
    write("ways", ways_values())
    write("concurrency", concurrency_values(monkeypatch))
    write("never-slower", never_slower_values(monkeypatch))
    write("break-even", break_even_values())
    write("traffic", traffic_values())
    write("pareto", pareto_values(monkeypatch))
    write("plan", plan_values(folder / "pareto.json"))
    return folder
