"""The timeline of a stream, on a clock of our own."""

from collections import Counter
from types import SimpleNamespace

import pytest

from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.groups import Explained, group_prompts
from blockdraft.diagnose.explain.round import Round
from blockdraft.diagnose.explain.stream import (
    Streams,
    follow,
    longest_rejected_run,
    stream_both,
)
from blockdraft.diagnose.explain.sums import Sums
from blockdraft.engine.completion import Chunk
from blockdraft.measure.phases import PhaseTotals

MILLISECOND = 1_000_000


class Script:
    """Chunks that arrive after given milliseconds, with where the time went."""

    def __init__(self, *chunks):
        self.now, self.totals, self.chunks = 0.0, PhaseTotals(), chunks

    def stream(self):
        for gap, text, num_tokens, phases in self.chunks:
            self.now += gap / 1000
            spent = Counter({name: ms * MILLISECOND for name, ms in phases.items()})
            self.totals.merge(PhaseTotals(1, spent))
            yield Chunk(0, 0, text, tuple(range(num_tokens)))

    def take_totals(self):
        totals, self.totals = self.totals, PhaseTotals()
        return totals

    def timeline(self):
        return follow(self.stream(), self.take_totals, lambda: self.now)


def usual(num):
    return [(10, "ab", 2, {"forward": 7, "draft": 2})] * num


def test_gaps_bursts_and_rates():
    line = Script((50, "a", 1, {}), *usual(8), (30, "abc", 3, {"forward": 29})).timeline()
    assert line.bursts[0].at == pytest.approx(0.05)
    assert line.gaps == pytest.approx([0.01] * 8 + [0.03])
    assert line.burst_sizes == {1: 1, 2: 8, 3: 1}
    assert line.tokens_per_second == pytest.approx(19 / 0.11)
    assert line.quantile(0.5) == pytest.approx(0.01)
    assert line.quantile(1.0) == pytest.approx(0.03)
    for burst in line.bursts:
        assert sum(burst.seconds.values()) == pytest.approx(burst.gap)


def test_the_speedup_of_several_answers_lies_between_theirs():
    """With drafts the first burst has more tokens, so fewer are timed."""
    drafted = Script((50, "abcd", 4, {}), (10, "abcd", 4, {})).timeline()
    plain = Script((50, "a", 1, {}), *[(10, "a", 1, {})] * 7).timeline()
    streams = Streams(drafted, plain)
    assert streams.speedup == pytest.approx(4)
    completion = SimpleNamespace(token_ids=drafted.token_ids, error=None)
    explanation = SimpleNamespace(sums=Sums(), rounds=(), completion=completion)
    prompts = [Explained(str(i), "c", explanation, streams).summary for i in range(2)]
    (group,) = group_prompts(prompts)
    assert group.speedup == pytest.approx(4)
    assert group.speedup_ends == pytest.approx((4, 4))
    at_once = Explained("3", "c", explanation, Streams(*[Script((50, "a", 1, {})).timeline()] * 2))
    (group,) = group_prompts([at_once.summary])
    assert group.speedup is None  # nothing was measured


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        ((40, "a", 1, {"forward": 37, "draft": 2}), "forward"),
        ((40, "a", 1, {"forward": 7, "draft": 31}), "draft"),
        ((40, "a", 1, {"forward": 8, "project": 30}), "project"),
        ((40, "a", 1, {"forward": 7, "draft": 2}), "between_steps"),
    ],
)
def test_a_stall_is_put_down_to_what_took_longer_than_usual(slow, cause):
    line = Script(*usual(9), slow, *usual(2)).timeline()
    (stall,) = line.stalls()
    assert (stall.gap, stall.cause) == (pytest.approx(0.04), cause)
    assert stall.at == pytest.approx(0.13)
    described = line.to_dict()
    assert (described["num_stalls"], described["stall_causes"]) == (1, {cause: 1})


def test_text_that_was_held_back_is_no_fault_of_a_phase():
    silent = [(10, "", 1, {"forward": 7, "draft": 2})] * 3
    line = Script(*usual(9), *silent, *usual(3)).timeline()
    (stall,) = line.stalls()
    assert (stall.gap, stall.cause) == (pytest.approx(0.04), "held_back")
    assert sum(burst.num_tokens for burst in line.bursts) == 2 * 12 + 3
    assert [burst.num_steps for burst in line.bursts if burst.num_steps > 1] == [4]


def test_a_limit_takes_the_place_of_the_medians():
    line = Script(*usual(5), (25, "a", 1, {"forward": 24}), *usual(3)).timeline()
    assert line.stalls() == []
    assert [stall.gap for stall in line.stalls(0.02)] == pytest.approx([0.025])
    assert len(line.stalls(0.005)) == len(line.gaps)


@pytest.mark.parametrize("chunks", [[], usual(1), [(10, "", 1, {})]])
def test_short_streams_have_no_gaps(chunks):
    line = Script(*chunks).timeline()
    assert (line.gaps, line.stalls(), line.tokens_per_second) == ([], [], 0.0)
    assert line.to_dict()["gap_largest"] == 0.0


def a_round(num_drafted, num_kept):
    return Round(0, (1,) * num_drafted, (1,) * (num_kept + 1), num_kept, False, None)


def test_the_longest_run_of_rejected_blocks():
    fates = [(3, 0), (3, 1), (3, 0), (0, 0), (3, 0), (2, 0), (3, 3), (3, 0)]
    assert longest_rejected_run([a_round(*fate) for fate in fates]) == 3
    assert longest_rejected_run([]) == 0


def test_real_models_stream_the_same_tokens_both_ways(llm):
    prompt_ids = llm.tokenizer.encode("the abc")
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True)
    usual = llm.engine.timer
    streams = stream_both(llm, prompt_ids, params)
    assert llm.engine.timer is usual
    assert streams.drafted.token_ids == streams.plain.token_ids
    assert streams.plain.burst_sizes.keys() != {0}
    assert streams.to_dict()["identical"]
    for line in (streams.drafted, streams.plain):
        for burst in line.bursts:
            assert sum(burst.seconds.values()) == pytest.approx(burst.gap, abs=1e-3)
