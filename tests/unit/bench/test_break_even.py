"""Forced acceptance: the share that is kept is the one that was asked for; only times count."""

import json

import pytest

from blockdraft import ConfigError
from blockdraft.bench.config import BreakEvenConfig
from blockdraft.bench.speed.break_even import break_even_of, measure_break_even
from blockdraft.bench.workload import BUNDLED, read_workload
from tests.command_line import refusal, run
from tests.small_llm import assert_nothing_left, load_llm


@pytest.fixture(scope="module")
def llm(folders):
    return load_llm(folders)


def measured(llm, share, **changes):
    config = BreakEvenConfig(force_acceptance=share, **{"max_tokens": 60, **changes})
    return measure_break_even(llm, read_workload(BUNDLED)[:2], config)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_share_that_is_kept_is_right(llm, share, temperature):
    measurements = measured(llm, share, temperature=temperature)
    found = break_even_of(measurements)
    assert found.kept_share == pytest.approx(share, abs=0.02)
    for one in measurements:
        assert one.plain.num_tokens == one.forced.num_tokens == 59
        assert one.plain.num_steps == 59
        assert one.plain.num_drafted == 0
        assert one.forced.num_steps == 59 - one.forced.num_kept
        assert one.forced.num_drafted
    assert found.acceptance_length == pytest.approx(
        118 / sum(m.forced.num_steps for m in measurements)
    )
    assert found.speedup == pytest.approx(found.acceptance_length / found.step_ratio)
    assert_nothing_left(llm)


def test_nothing_kept_gives_the_ratio_of_the_steps(llm):
    measurements = measured(llm, 0.0)
    found = break_even_of(measurements)
    assert found.acceptance_length == 1.0
    plain, forced = (
        sum(getattr(m, way).decode_seconds for m in measurements) for way in ("plain", "forced")
    )
    assert found.step_ratio == pytest.approx(forced / plain)


def test_trees_keep_a_share_of_their_longest_path(llm):
    llm.use_fixed_drafting(12)
    try:
        found = break_even_of(measured(llm, 0.5))
    finally:
        llm.use_fixed_drafting()
    assert found.kept_share == pytest.approx(0.5, abs=0.03)


def test_verdicts_are_real_again_afterwards(llm):
    prompt = [5, 6, 7]
    before = llm.generate(prompt).completions[0].token_ids
    measured(llm, 1.0)
    assert llm.generate(prompt).completions[0].token_ids == before


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(ConfigError, match=r"force_acceptance is .*; give a share .* from 0 to 1"):
        BreakEvenConfig(force_acceptance=share)


def test_the_command_says_that_only_times_count(pair, tmp_path):
    output = tmp_path / "report.json"
    options = [*pair, "--prompts", BUNDLED, "--limit", 2, "--max-tokens", 12, "--output", output]
    result = run("bench", "speed", *options, "--force-acceptance", 0)
    assert result.exit_code == 0, result.output
    assert "break-even tau" in result.stdout
    assert "outputs are not the target's" in result.stdout
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["forced_acceptance"] == 0
    assert "Verdicts were replaced" in report["note"]
    assert report["break_even"]["acceptance_length"] == 1.0
    assert "identical" not in json.dumps(report)
    assert "token_ids" not in json.dumps(report)


def test_what_does_not_go_with_it_is_refused(folders):
    options = ["--target", folders[0], "--drafter", folders[1], "--prompts", BUNDLED]
    assert "from 0 to 1" in refusal("bench", "speed", *options, "--force-acceptance", 2)
    both = ["--force-acceptance", 0, "--ledger"]
    assert "leave it out" in refusal("bench", "speed", *options, *both)
    assert "2 or more" in refusal(
        "bench", "speed", *options, "--force-acceptance", 0, "--max-tokens", 1
    )
