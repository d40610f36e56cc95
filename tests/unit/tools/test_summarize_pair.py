"""The summary that README shows is what the results beside it say."""

import copy
import json
from pathlib import Path

import pytest

from blockdraft.bench.speed.report import describe_output
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.plan import NOTHING
from blockdraft.measure.acceptance import AcceptanceStats
from tests.bench_results import stats
from tools import summarize_pair
from tools.experiments import band_coverage

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/default-pair"
SUMMARY = ROOT / "docs/results/default-pair.json"


@pytest.fixture(scope="module")
def runs():
    names = {"benchmarks": "default", "untuned": "untuned"}
    return {
        kind: [summarize_pair.read(RESULTS / f"{name}-{how}.json") for how in ("greedy", "sampled")]
        for kind, name in names.items()
    }


@pytest.fixture(scope="module")
def written():
    return json.loads(SUMMARY.read_text(encoding="utf-8"))


def test_the_summary_is_that_of_the_results(runs, written):
    found = summarize_pair.summary(runs, written["machine"])
    assert json.loads(json.dumps(found)) == written


def test_the_summary_says_what_was_measured_and_how(written):
    for part in ("trees", "lookup", "n-grams", "Hydra head"):
        assert part in written["drafter"]
    row = written["runs"]["untuned"]["all"]
    assert written["definitions"].keys() == {"num_prompts", *row["greedy"]}


def test_a_band_of_many_prompts_holds_the_ratio_of_all_more_often():
    rows = band_coverage.conversations(RESULTS / "default-greedy.json")
    assert len(rows) == 70  # both turns of MT-Bench in one
    few, many = (band_coverage.coverage(rows, size, 60) for size in (2, 40))
    assert few < 0.8 < many


def test_an_output_that_drafted_nothing_counts_too():
    def turn(number, sample):
        return {"category": "a", "id": str(number), "drafted": sample, "plain": sample}

    single = TimedOutput((1,), 1.0, 0.0)
    plainly = AcceptanceStats()
    for _ in range(2):
        plainly.record(1, NOTHING, [])
    undrafted = TimedOutput((1, 2, 3), 1.0, 0.5, plainly)
    drafted = TimedOutput((1, 2, 3, 4, 5), 1.0, 0.5, stats(2, 2))
    outputs = [describe_output(one) for one in (single, undrafted, drafted)]
    found = summarize_pair.figures([turn(*one) for one in enumerate(outputs)])
    assert found["tau"] == 1.5  # six tokens of four passes


def test_the_page_says_how_often_intervals_of_ten_prompts_hold_the_ratio():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    shares = [coverage_of_ten(RESULTS / f"{name}-greedy.json") for name in ("untuned", "default")]
    assert f"{shares[0]} to {shares[1]} of 10 prompts" in page


def coverage_of_ten(path):
    return round(100 * band_coverage.coverage(band_coverage.conversations(path), 10, 600))


def test_a_page_names_the_day_of_the_results(written):
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    (machine,) = [line for line in page.splitlines() if line.startswith("* **Machine**")]
    assert all(run["date"] in machine for run in written["runs"].values())


def other_prompt(result):
    result["runs"][0]["prompts"][0]["id"] = "another"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda result: result.update(git_commit="0123456789ab"), "differ in git_commit"),
        (lambda result: result["machine"].update(cpu="another"), "differ in machine"),
        (lambda result: result["versions"].update(torch="2.0"), "differ in versions"),
        (lambda result: result.update(threads=1), "differ in threads"),
        (lambda result: result["config"].update(drafter="another"), "differ in config"),
        (lambda result: result["runs"][0]["config"].update(max_tokens=9), "max_tokens"),
        (lambda result: result["runs"][0]["config"].update(temperature=0.0), "the greedy result"),
        (other_prompt, "different prompts"),
    ],
)
def test_results_that_are_no_pair_are_refused(runs, change, reason):
    greedy, sampled = runs["untuned"]
    other = copy.deepcopy(sampled)
    change(other)
    with pytest.raises(SystemExit, match=reason):
        summarize_pair.summary(runs | {"untuned": [greedy, other]}, "a machine")


def test_results_of_code_that_no_commit_has_are_refused(runs):
    dirty = {
        kind: [result | {"git_commit": "0123456789ab+"} for result in pair]
        for kind, pair in runs.items()
    }
    with pytest.raises(SystemExit, match="commit them and measure again"):
        summarize_pair.summary(dirty, "a machine")
