import json

import pytest

from blockdraft.bench.bad_drafters import make_bad
from blockdraft.bench.config import NeverSlowerConfig
from blockdraft.bench.decode import Run
from blockdraft.bench.load.concurrency_report import (
    NEVER_SLOWER_LEGEND,
    holding_lines,
    never_slower_table,
)
from blockdraft.bench.load.never_slower import (
    NEVER_SLOWER_DEFINITIONS,
    Pair,
    PairFigures,
    measure_never_slower,
    pair_figures,
)
from blockdraft.bench.measures import Spread
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.bench.workload import BenchPrompt
from blockdraft.cli import options
from blockdraft.core.errors import INTERRUPTED, MISTAKE, ConfigError
from blockdraft.core.plan import ROOT, Proposal, Tree
from blockdraft.llm import LLM
from tests.bench_fakes import SECONDS_PER_TOKEN, FakeLLM
from tests.command_line import run, shown
from tests.tiny import tiny_drafter_folder, tiny_target_folder

PROMPTS = [BenchPrompt(name, name[0], name) for name in ("a1", "b1")]


@pytest.fixture
def sides(monkeypatch):
    """An LLM and one without a drafter, on one clock."""
    llm, baseline = FakeLLM(), FakeLLM(drafter_folder=None)
    monkeypatch.setattr("blockdraft.bench.decode.perf_counter", lambda: llm.now + baseline.now)
    return llm, baseline


@pytest.fixture
def pair(tmp_path):
    return LLM(str(tiny_target_folder(tmp_path)), str(tiny_drafter_folder(tmp_path)))


def test_each_side_of_a_point_has_its_seconds_in_whole_sets(sides):
    config = NeverSlowerConfig(concurrency=(2,), seconds=30, pairs=3, max_tokens=41)
    pairs = measure_never_slower(*sides, PROMPTS, config)
    # A set of 4 x 2 requests takes 4 x (0.5 + 40 x 0.1) s without a drafter, and 4 x 2.1 s with
    # one; 10 s are needed.
    assert [len(pair.no_drafter.samples) for pair in pairs] == [2 * 8] * 3
    assert [len(pair.adaptive.samples) for pair in pairs] == [2 * 8] * 3
    (row,) = pair_figures(pairs)
    assert row.seconds_per_side == pytest.approx(3 * 2 * 8.4)
    assert row.ratio == Spread(*[pytest.approx(4.5 / 2.1)] * 3)
    assert row.slowdown == pytest.approx(2.1 / 4.5)
    assert row.limit == pytest.approx(1.03 + 1 / 50.4)
    assert (row.holds, row.confidence) == (True, 0.75)
    assert (row.num_pairs, row.num_outputs, row.num_identical) == (3, 96, 96)
    assert (row.acceptance_length, row.mean_depth, row.mean_drafted) == (2.0, 3.0, 3.0)
    assert pairs[0].adaptive.phases.num_steps == 2


def test_the_median_pair_decides():
    """Not the best one, nor the mean, which one slow pair may move far."""

    def run_of(seconds):
        return Run((TimedOutput((1,) * 100, seconds, seconds),), seconds)

    pairs = [Pair(1, run_of(seconds), run_of(100.0), 2) for seconds in (80.0, 125.0, 400.0)]
    (row,) = pair_figures(pairs)
    assert row.ratio == Spread(*map(pytest.approx, (0.8, 0.25, 1.25)))
    assert row.slowdown == pytest.approx(1.25)
    assert row.limit == pytest.approx(1.03 + 1 / 300)
    assert not row.holds


@pytest.mark.parametrize(
    ("seconds_per_token", "text"),
    [(0.1029, "times the time without a drafter, 1.277 allowed"), (0.13, "1.277 allowed: SLOWER")],
)
def test_whether_drafting_is_slower_is_told(sides, monkeypatch, seconds_per_token, text):
    monkeypatch.setitem(SECONDS_PER_TOKEN, "adaptive", seconds_per_token)
    config = NeverSlowerConfig(concurrency=(2,), seconds=4, pairs=1, max_tokens=41)
    rows = pair_figures(measure_never_slower(*sides, PROMPTS, config))
    # One set of four times 0.5 s + 40 tokens at 0.1 s without a drafter, and a second of probing.
    limit = 1.03 + 1 / (4 * min(4.5, 0.5 + 40 * seconds_per_token))
    assert rows[0].limit == pytest.approx(limit)
    assert rows[0].holds == (rows[0].slowdown <= limit) == ("SLOWER" not in text)
    (line,) = holding_lines(rows)
    assert line.endswith(text.replace("1.277", f"{limit:.3f}"))


def test_the_sides_take_turns_and_only_one_drafts(sides):
    llm, baseline = sides
    order = []
    for name, side in zip(("adaptive", "none"), sides, strict=True):
        generate = side.generate
        side.generate = lambda *args, name=name, generate=generate: (
            order.append(name),
            generate(*args),
        )[1]
    config = NeverSlowerConfig(concurrency=(1,), seconds=0.1, pairs=3, max_tokens=5)
    measure_never_slower(llm, baseline, PROMPTS, config)
    warm_up, timed = order[:2], order[2:]
    assert sorted(warm_up) == ["adaptive", "none"]
    assert timed == ["none", "adaptive", "adaptive", "none", "none", "adaptive"]
    assert {call[0] for call in llm.calls} == {"adaptive"}
    assert {call[0] for call in baseline.calls} == {0}


def test_every_definition_is_a_figure():
    rates = {"tokens_per_second"}
    assert set(NEVER_SLOWER_DEFINITIONS) - rates <= set(PairFigures.__dataclass_fields__)


def test_the_table_fits_80_columns():
    wide, ratio = Spread(1234.5, 1200.4, 1300.6), Spread(0.987, 0.95, 12.3)
    row = PairFigures(
        *(32, 5, 61.0, wide, wide, ratio, 1.013, 1.047, True, 0.9375),
        *(12.34, 15.0, {15: 9}, 15.0, 3200, 3200),
    )
    text = shown(never_slower_table("title", [row]))
    assert len(text.splitlines()) == 7
    assert "0.987 0.950-12.300" in text
    assert max(map(len, NEVER_SLOWER_LEGEND.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"concurrency": ()}, "concurrency is empty"),
        ({"pairs": 0}, "pairs is 0"),
        ({"seconds": 0.0}, "seconds is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
    ],
)
def test_bad_options_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        NeverSlowerConfig(**options)


def test_a_drafter_is_needed(sides):
    with pytest.raises(ConfigError, match="no drafter"):
        measure_never_slower(sides[1], sides[1], PROMPTS, NeverSlowerConfig())
    with pytest.raises(ConfigError, match="no drafter to make noise"):
        make_bad(sides[1], "noise")


def guesses_of(llm):
    """What the drafter of a pair hands on when its model guesses 3, 5 and the last token."""
    last = llm.engine.target.vocab_size - 1
    proposals = [Proposal.chain(guess, "fake") for guess in ([3, 5, last], [])]
    llm.engine.drafter.propose = lambda rows: proposals
    return last


def guesses(llm):
    """What reaches the target."""
    return [list(proposal.tree.tokens) for proposal in llm.engine.drafter.propose([])]


def test_wrong_moves_every_guess_to_the_next_token(pair):
    guesses_of(pair)
    make_bad(pair, "wrong")
    assert guesses(pair) == [[4, 6, 0], []]


def test_noise_replaces_every_guess_and_keeps_their_number(pair):
    last = guesses_of(pair)
    make_bad(pair, "noise")
    drawn = [guesses(pair) for _ in range(50)]
    assert all([len(guess) for guess in block] == [3, 0] for block in drawn)
    tokens = [token_id for block in drawn for token_id in block[0]]
    assert len(set(tokens)) > 30
    assert all(0 <= token_id <= last for token_id in tokens)


@pytest.mark.parametrize("fault", ["noise", "wrong"])
def test_bad_trees_have_the_shape_and_the_beliefs_of_good_ones(pair, fault):
    last = pair.engine.target.vocab_size - 1
    tree = Tree((3, last, 5, 6), (ROOT, ROOT, 0, 0))
    good = Proposal(tree, (0.6, 0.3, 0.5, 0.1), ("fake",) * 4)
    pair.engine.drafter.propose = lambda rows: [good]
    make_bad(pair, fault)
    (bad,) = pair.engine.drafter.propose([])
    assert bad.tree.parents == good.tree.parents
    assert bad.tree.tokens != good.tree.tokens
    assert bad.probabilities == good.probabilities


@pytest.mark.parametrize("fault", ["no", "wrong"])
def test_the_command_loads_both_sides(monkeypatch, sides, tmp_path, fault):
    llm, baseline = sides
    made_bad, loaded = [], []

    def load(config, check=None):
        loaded.append(config.drafter)
        return llm if config.drafts else baseline

    monkeypatch.setattr(options, "load_llm", load)
    monkeypatch.setattr(
        "blockdraft.bench.bad_drafters.make_bad", lambda llm, fault: made_bad.append((llm, fault))
    )
    output = tmp_path / "report.json"
    arguments = ["--concurrency", "1,2", "--seconds", "0.5", "--pairs", "2", "--max-tokens", "5"]
    arguments += ["--bad-drafter", fault, "--output", str(output)]
    result = run("bench", "never-slower", *arguments)
    assert result.exit_code == 0, result.output
    assert "up to 8 requests of at most 5 tokens" in result.stdout
    assert loaded == ["auto", None]
    assert made_bad == ([] if fault == "no" else [(llm, "wrong")])
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["bad_drafter"] == fault
    assert [row["concurrency"] for row in report["figures"]] == [1, 2]
    assert len(report["pairs"]) == 4
    assert report["pairs"][0]["adaptive"]["requests"][0]["token_ids"]


def test_an_ended_command_goes_on(monkeypatch, sides, tmp_path):
    llm, baseline = sides
    monkeypatch.setattr(options, "load_llm", lambda c, check=None: llm if c.drafts else baseline)
    monkeypatch.setattr("blockdraft.bench.bad_drafters.make_bad", lambda llm, fault: None)
    output = tmp_path / "report.json"
    arguments = ["bench", "never-slower", "--concurrency", "1,2", "--seconds", "0.5"]
    arguments += ["--pairs", "2", "--max-tokens", "5", "--output", str(output)]

    with llm.interrupted(at_once=2):
        broken_off = run(*arguments)
    assert broken_off.exit_code == INTERRUPTED
    assert "holds what was measured; the same command resumes it" in broken_off.stderr
    refused = run(*arguments, "--bad-drafter", "wrong")
    assert refused.exit_code == MISTAKE
    assert "from a run with different --bad-drafter and cannot be resumed" in refused.stderr
    llm.calls.clear()
    assert run(*arguments).exit_code == 0
    assert {at_once for _, at_once, _, _ in llm.calls} == {2}
    report = json.loads(output.read_text(encoding="utf-8"))
    assert [pair["concurrency"] for pair in report["pairs"]] == [1, 1, 2, 2]
    assert [row["num_identical"] for row in report["figures"]] == [2 * 2 * 4, 2 * 2 * 8]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_an_output_that_differs_fails(monkeypatch, sides):
    llm, baseline = sides
    llm.broken = ("adaptive",)
    monkeypatch.setattr(options, "load_llm", lambda c, check=None: llm if c.drafts else baseline)
    arguments = ["--concurrency", "1", "--seconds", "0.5", "--pairs", "1", "--max-tokens", "5"]
    result = run("bench", "never-slower", "--json", *arguments)
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["figures"]
    assert (row["num_identical"], row["num_outputs"]) == (4, 8)
