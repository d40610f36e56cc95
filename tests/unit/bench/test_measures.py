from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockdraft.bench.decode import Run
from blockdraft.bench.measures import (
    MEASURES,
    Measures,
    Percentiles,
    Speedup,
    bootstrap_band,
    defined,
    measures_of,
    percentiles_of,
    rate_of,
    speedup_of,
    tau_macro,
    without_loops,
)
from blockdraft.bench.tables import markdown_table
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.plan import Proposal
from blockdraft.measure.acceptance import AcceptanceStats
from tests.bench_results import stats


def output(num_tokens, seconds, decode_seconds, *committed, **more):
    ids = tuple(range(num_tokens))
    return TimedOutput(ids, seconds, decode_seconds, stats(*committed), **more)


def test_tau_is_taken_over_passes_and_over_outputs():
    samples = [output(10, 1.0, 0.9, 4, 4, 1), output(2, 1.0, 0.1, 1), output(1, 1.0, 0.0)]
    assert measures_of(samples).tau_micro == pytest.approx(10 / 4)
    # The output of a single token has no pass, and so no tau.
    assert tau_macro(samples) == pytest.approx((3 + 1) / 2)
    assert tau_macro(samples[2:]) == 0.0


def test_acceptance_by_position_and_node():
    acceptance = AcceptanceStats()
    tree = Proposal.chain([5, 6], "test")
    acceptance.record(2, tree, [0])
    acceptance.record(3, tree, [0, 1])
    measures = measures_of([TimedOutput((1, 2, 3), 1.0, 0.5, acceptance)])
    assert measures.per_position == [1.0, 0.5]
    assert measures.per_node == {"0,0": 1.0, "1,0": 0.5}


def test_rates_are_sums_over_sums():
    """Not means of rates; the first token of an output is none of decoding's."""
    rate = rate_of([output(5, 3.0, 1.0), output(3, 2.0, 0.5), output(1, 1.0, 0.0)])
    assert rate.tokens_per_second == pytest.approx(9 / 6)
    assert rate.decode_tokens_per_second == pytest.approx(6 / 1.5)
    assert rate_of([output(1, 1.0, 0.0)]).decode_tokens_per_second == 0.0


def test_latencies_do_not_mix_waiting_and_the_prompt():
    measures = measures_of([output(5, 3.0, 1.0, 1, queue_seconds=1.5, largest_gap=0.7)])
    assert measures.first_token_seconds == Percentiles(2.0, 2.0, 2.0, 2.0)
    assert measures.prompt_seconds.p50 == pytest.approx(0.5)
    assert measures.seconds_per_token.p95 == pytest.approx(0.25)
    assert measures.largest_gap.p99 == 0.7


def test_the_speed_of_a_user_is_that_of_requests_of_several_tokens():
    single, several = output(1, 0.5, 0.0), output(5, 3.0, 1.0, 4)
    assert Run((single, single, several), 3.0).tokens_per_second_per_user == pytest.approx(4.0)
    assert Run((single,), 0.5).tokens_per_second_per_user == 0.0


def test_what_was_not_watched_has_no_figure():
    measures = measures_of([output(1, 3.0, 0.0)])
    assert measures.seconds_per_token is None
    assert measures.largest_gap is None
    assert measures.share_equal is None
    assert percentiles_of([]) is None


def test_percentiles_are_linear_between_neighbors():
    assert percentiles_of([0.0, 1.0]) == Percentiles(0.5, 0.5, *map(pytest.approx, (0.95, 0.99)))


def test_speedups_stand_on_sums_and_name_their_baseline():
    plain = [output(10, 4.0, 2.0), output(30, 6.0, 3.0)]
    drafted = [output(10, 2.0, 0.5), output(30, 3.0, 2.0)]
    whole = speedup_of(drafted, plain, "plain")
    assert (whole.value, whole.baseline, whole.num_prompts) == (2.0, "plain", 2)
    decode = speedup_of(drafted, plain, "plain", decode_only=True)
    assert decode.value == pytest.approx((38 / 2.5) / (38 / 5))
    assert (whole.low, whole.high) == (2.0, 2.0)


def test_a_single_prompt_has_no_spread():
    speedup = speedup_of([output(10, 2.0, 1.0)], [output(10, 4.0, 2.0)], "plain")
    assert (speedup.low, speedup.high) == (None, None)
    assert speedup.value == 2.0


def test_outputs_of_one_prompt_do_not_narrow_the_band():
    plain = [output(10, 4.0, 2.0), output(30, 6.0, 3.0), output(20, 3.0, 2.0)]
    drafted = [output(10, 2.0, 1.0), output(30, 4.0, 2.5), output(20, 2.5, 1.8)]
    once = speedup_of(drafted, plain, "plain")
    again = speedup_of(3 * drafted, 3 * plain, "plain", 3 * ["a", "b", "c"])
    assert (again.num_prompts, again.value) == (3, pytest.approx(once.value))
    assert (again.low, again.high) == (pytest.approx(once.low), pytest.approx(once.high))
    assert speedup_of(3 * drafted, 3 * plain, "plain").low > once.low
    alone = speedup_of(drafted, plain, "plain", ["a", "a", "a"])
    assert (alone.num_prompts, alone.low) == (1, None)


def test_single_tokens_have_no_decoding_to_compare():
    one = [output(1, 2.0, 0.0)]
    assert speedup_of(one, one, "plain", decode_only=True) is None
    assert measures_of(one, one).decode_speedup is None


def test_the_band_keeps_the_two_sides_of_a_prompt_together():
    generator = np.random.default_rng(1)
    seconds = generator.uniform(1, 100, size=40)
    # Each prompt is exactly twice as fast, however long it takes: only pairing sees that.
    rows = np.stack([np.full(40, 10.0), seconds, np.full(40, 10.0), 2 * seconds], axis=1)
    assert bootstrap_band(rows) == (pytest.approx(2), pytest.approx(2))


def test_the_band_holds_the_true_ratio_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        ratio = generator.lognormal(np.log(1.5), 0.2, size=30)
        seconds = generator.uniform(1, 2, size=30)
        rows = np.stack([np.ones(30), seconds, np.ones(30), seconds * ratio], axis=1)
        low, high = bootstrap_band(rows)
        hits += low <= 1.5 * np.exp(0.2**2 / 2) <= high
    assert 180 <= hits <= 199


def test_the_band_is_the_same_every_time():
    rows = np.random.default_rng(3).uniform(1, 2, size=(9, 4))
    assert bootstrap_band(rows) == bootstrap_band(rows)


def test_prompts_without_seconds_cannot_break_the_band():
    rows = np.array([[0.0, 0.0, 0.0, 0.0], [4.0, 1.0, 4.0, 2.0]])
    assert bootstrap_band(rows) == (2.0, 2.0)


def test_loops_are_left_out_with_their_baseline():
    straight, looping = output(30, 1.0, 0.5, 2), TimedOutput((1,) * 30, 1.0, 0.5, stats(6))
    plain = [output(30, 2.0, 1.0), replace(looping, total_seconds=9.0)]
    both = measures_of([straight, looping], plain)
    assert (both.num_outputs, both.num_looping) == (2, 1)
    left = without_loops([straight, looping], plain, ["a", "b"])
    assert (left.num_outputs, left.num_looping, left.tau_micro) == (1, 0, 2.0)
    assert left.speedup.value == pytest.approx(2.0)
    assert without_loops([looping], plain[1:], ["b"]) is None
    both = without_loops([straight, straight, looping], [plain[0], *plain], ["a", "c", "b"])
    assert both.speedup.num_prompts == 2


def test_an_output_is_left_out_for_its_own_loops():
    """Where outputs differ, as with exact off, its baseline may loop alone."""
    straight, looping = output(30, 1.0, 0.5, 2), TimedOutput((1,) * 30, 1.0, 0.5, stats(6))
    left = without_loops([straight, looping], [looping, straight], ["a", "b"])
    assert (left.num_outputs, left.num_looping, left.tau_micro) == (1, 0, 2.0)


def test_equal_outputs_are_a_share():
    plain = [output(5, 1.0, 0.5)] * 4
    other = TimedOutput((9, 9, 9, 9, 9), 1.0, 0.5)
    assert measures_of([*plain[:3], other], plain).share_equal == 0.75


def test_docs_have_the_same_definitions():
    page = Path(__file__).parents[3] / "docs" / "measure.md"
    rows = [[f"`{name}`", text] for name, text in MEASURES.items()]
    assert markdown_table(["measure", "definition"], rows) in page.read_text(encoding="utf-8")


def test_every_measure_is_defined():
    counts = {"num_outputs", "num_tokens"}
    assert set(Measures.__dataclass_fields__) - counts <= set(MEASURES)
    assert defined("band") == {"band": MEASURES["band"]}
    assert isinstance(measures_of([output(3, 1.0, 0.5)]).speedup, Speedup | None)
