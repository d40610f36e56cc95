"""Streaming as it feels: when text arrived, in what bursts, and why it stalled."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np

from blockdraft.core.recorder import Phase
from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.round import Round
from blockdraft.engine.completion import Chunk
from blockdraft.llm import LLM
from blockdraft.measure.measuring import time_phases
from blockdraft.measure.phases import PHASES, PhaseTotals

STALL_MEDIANS = 3.0
"""A gap of more than so many median gaps is a stall, unless a limit is given."""

StallCause = Phase | Literal["between_steps", "held_back"]
"""A phase of the engine; "between_steps", where text is decoded and read; or "held_back": several
steps went by as usual, and their text was not final (half a character, or what may become a stop
string)."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Text that arrived at once, with the tokens and the steps since the burst before.

    at: seconds since the request. gap: seconds since the burst before, or since the request.
    seconds: where the gap went; its values sum to it.
    """

    at: float
    gap: float
    num_tokens: int
    num_steps: int
    seconds: dict[StallCause, float]


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap that was felt. `at` is when it ended."""

    at: float
    gap: float
    cause: StallCause


@dataclass(frozen=True, slots=True)
class Later:
    """What came behind the first burst: tokens, and the seconds that they took."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bursts of one output. Gaps leave out the time to the first burst, the prompt's."""

    bursts: tuple[Burst, ...]
    token_ids: tuple[int, ...]

    @property
    def gaps(self) -> list[float]:
        """Seconds between bursts."""
        return [burst.gap for burst in self.bursts[1:]]

    @property
    def burst_sizes(self) -> dict[int, int]:
        """How many bursts brought how many tokens."""
        return dict(sorted(Counter(burst.num_tokens for burst in self.bursts).items()))

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first burst over the seconds since it; 0 if there are none."""
        return rate_of([self.later])

    @property
    def later(self) -> Later:
        """All but the first burst, which is the prompt's."""
        return Later(sum(burst.num_tokens for burst in self.bursts[1:]), sum(self.gaps))

    def quantile(self, share: float) -> float:
        """The gap that this share of the gaps does not exceed, between two where it falls so."""
        return float(np.quantile(self.gaps, share)) if self.gaps else 0.0

    def stalls(self, limit: float | None = None) -> list[Stall]:
        """Gaps over `limit` seconds; by default over STALL_MEDIANS median gaps."""
        later = self.bursts[1:]
        if not later:
            return []
        limit = STALL_MEDIANS * median(self.gaps) if limit is None else limit
        normal = _normal_seconds(later)
        return [
            Stall(burst.at, burst.gap, _stall_cause(burst, normal, limit))
            for burst in later
            if burst.gap > limit
        ]

    def to_dict(self, limit: float | None = None) -> dict[str, Any]:
        """Plain values for JSON; times in seconds. A burst is [at, tokens]."""
        stalls = self.stalls(limit)
        return {
            "first_text": self.bursts[0].at if self.bursts else None,
            "tokens_per_second": self.tokens_per_second,
            "num_bursts": len(self.bursts),
            "bursts": [[burst.at, burst.num_tokens] for burst in self.bursts],
            "burst_sizes": {str(size): count for size, count in self.burst_sizes.items()},
            "gap_median": self.quantile(0.5),
            "gap_p95": self.quantile(0.95),
            "gap_p99": self.quantile(0.99),
            "gap_largest": self.quantile(1.0),
            "num_stalls": len(stalls),
            "stall_causes": dict(Counter(stall.cause for stall in stalls)),
            "stalls": [{"at": s.at, "gap": s.gap, "cause": s.cause} for s in stalls],
        }


def rate_of(parts: Sequence[Later]) -> float:
    """Tokens per second of all together; 0 if there are none."""
    seconds = sum(part.seconds for part in parts)
    return sum(part.num_tokens for part in parts) / seconds if seconds else 0.0


def speedup_of(drafted: Sequence[Later], plain: Sequence[Later]) -> float:
    """Tokens per second over those of plain decoding; 0 where nothing was measured."""
    # First bursts, which are left out with the prompts' passes, are longer with drafts: the tokens
    # behind them are not the same.
    rate = rate_of(plain)
    return rate_of(drafted) / rate if rate else 0.0


def _normal_seconds(bursts: Sequence[Burst]) -> dict[StallCause, float]:
    names = {name for burst in bursts for name in burst.seconds}
    return {name: median(burst.seconds.get(name, 0.0) for burst in bursts) for name in names}


def _stall_cause(burst: Burst, normal: dict[StallCause, float], limit: float) -> StallCause:
    """What took longer than it usually does, by the most seconds."""
    if burst.num_steps > 1 and burst.gap / burst.num_steps <= limit:
        return "held_back"
    return max(burst.seconds, key=lambda name: burst.seconds[name] - normal[name])


def follow(
    chunks: Iterable[Chunk],
    take_totals: Callable[[], PhaseTotals],
    clock: Callable[[], float],
) -> Timeline:
    """Read the stream of one sample, and note when text arrives. The request begins now."""
    bursts: list[Burst] = []
    token_ids: list[int] = []
    num_seen, start = 0, clock()
    before = start
    for chunk in chunks:
        token_ids += chunk.token_ids
        if not chunk.text:
            continue
        now, totals = clock(), take_totals()
        seconds: dict[StallCause, float] = {p: totals.seconds.get(p, 0.0) for p in PHASES}
        # What is measured inside a step by another clock may pass the whole by a hair.
        seconds["between_steps"] = max(0.0, now - before - totals.total_seconds)
        num_new = len(token_ids) - num_seen
        bursts.append(Burst(now - start, now - before, num_new, totals.num_steps, seconds))
        num_seen, before = len(token_ids), now
    return Timeline(tuple(bursts), tuple(token_ids))


@dataclass(frozen=True, slots=True)
class Streams:
    """The same answer streamed with drafts and without."""

    drafted: Timeline
    plain: Timeline

    @property
    def speedup(self) -> float:
        """Tokens per second of drafted over plain; 0 where nothing was measured."""
        return speedup_of([self.drafted.later], [self.plain.later])

    def to_dict(self, limit: float | None = None) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "drafted": self.drafted.to_dict(limit),
            "plain": self.plain.to_dict(limit),
            "speedup": self.speedup,
            "identical": self.drafted.token_ids == self.plain.token_ids,
        }


def stream_both(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> Streams:
    """Stream one sample with drafts, then without. A seed must be given if it is sampled."""
    usual = llm.engine.timer
    time_phases(llm.engine, llm.device)
    try:
        drafted = _stream(llm, prompt_ids, params)
        plain = _stream(llm, prompt_ids, replace(params, num_draft_tokens=0))
    finally:
        llm.engine.timer = usual
    return Streams(drafted, plain)


def _stream(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> Timeline:
    llm.engine.timer.take_totals()
    chunks = llm.generate(prompt_ids, params, stream=True)
    return follow(chunks, llm.engine.timer.take_totals, perf_counter)


def longest_rejected_run(rounds: Sequence[Round]) -> int:
    """Most blocks in a row of which no draft was kept; rounds without drafts do not count."""
    longest = current = 0
    for one in rounds:
        if one.drafted_ids:
            current = 0 if one.num_kept else current + 1
            longest = max(longest, current)
    return longest
