"""Options of the measurements. Loads no model library."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from blockdraft.core.errors import ConfigError
from blockdraft.core.request import SamplingParams

WARM_UP_TOKENS = 16
"""Tokens that each configuration decodes before anything is timed."""


def warm_up_of(params: SamplingParams) -> SamplingParams:
    """The same request, cut to a warm-up."""
    num_tokens = min(WARM_UP_TOKENS, params.max_tokens)
    return replace(params, max_tokens=num_tokens, min_tokens=min(num_tokens, params.min_tokens))


class RequestOptions:
    """What measurements choose of a request: options of theirs, or greedy up to its end.

    ignore_eos: answers go on behind their end, so that each has max_tokens.
    """

    __slots__ = ()
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    @property
    def params(self) -> SamplingParams:
        """The request; a configuration sets how much it drafts."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedConfig(RequestOptions):
    """How to decode.

    `ledger` also accounts for the time of every step, for which a GPU has to be waited for.
    score: also count right answers, of prompts that have tests or a number as their reference.
    against: other engines, by the names of `outside/engines.py` or by URL; they take the place of
    `with_transformers`. against_model: the target's name on a server that serves several.
    against_timeout: seconds that one of their answers may take. assistant: a small model for those
    of them that draft with one.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    with_transformers: bool = True
    ledger: bool = False
    score: bool = False
    against: tuple[str, ...] = ()
    against_model: str | None = None
    against_timeout: float = 600.0
    assistant: str | None = None

    def __post_init__(self) -> None:
        if not self.against_timeout > 0:
            raise ConfigError(
                f"against_timeout is {self.against_timeout:g}; give seconds above 0, such as 600"
            )
        if not self.against and (self.against_model is not None or self.assistant is not None):
            name = "assistant" if self.against_model is None else "against_model"
            raise ConfigError(f"{name} is for other engines; name them with --against")
        if self.against and self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature:g}, but --against compares greedy decoding, "
                "because other engines draw different random numbers; leave out one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEvenConfig(RequestOptions):
    """Times only: `force_acceptance` is the share of drafts that is kept, right or wrong.

    An end may be forced at any place, so answers go on behind it.
    """

    ignore_eos = True  # no option
    force_acceptance: float
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.force_acceptance <= 1:
            raise ConfigError(
                f"force_acceptance is {self.force_acceptance:g}; give a share of the draft tokens, "
                "from 0 to 1"
            )
        _check_later_tokens(self.max_tokens)


REQUESTS_IN_TURN = 4
"""For each concurrent request: the concurrency is full only until the last of them has begun. What
follows is the drain of a batch, which a busy server never sees."""


def requests_at(concurrency: int, points: Sequence[int]) -> int:
    """How many requests the point of this concurrency runs, of these points."""
    return max(max(points), REQUESTS_IN_TURN * concurrency)


@dataclass(frozen=True, kw_only=True, slots=True)
class PointsConfig(RequestOptions):
    """Concurrent requests.

    Each point of `concurrency` runs the same `num_requests` requests to completion, at most that
    many concurrently; None is as many as the largest point.
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    num_requests: int | None = None
    repeats: int = 3
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_points("concurrency", self.concurrency)
        _check_positive("repeats", self.repeats)
        if self.num_requests is not None:
            _check_positive("requests", self.num_requests)

    @property
    def requests_per_point(self) -> int:
        """How many requests each point runs."""
        return self.num_requests or max(self.concurrency)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcurrencyConfig(PointsConfig):
    """Plain decoding, a fixed number of candidates, and as many as pay.

    Without `num_requests` each point runs the first of the same requests, see `requests_at`.
    `num_draft_tokens` are the candidates of the configuration that always verifies as many.
    `ledger` also accounts for the time of every step, for which a GPU has to be waited for.
    """

    num_draft_tokens: int = 15
    ledger: bool = False

    def __post_init__(self) -> None:
        PointsConfig.__post_init__(self)
        _check_positive("num_draft_tokens", self.num_draft_tokens)

    def requests_at(self, concurrency: int) -> int:
        """How many requests a point runs."""
        return self.num_requests or requests_at(concurrency, self.concurrency)

    @property
    def requests_per_point(self) -> int:
        """Of the largest point."""
        return self.requests_at(max(self.concurrency))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoConfig(PointsConfig):
    """Plain decoding, and every drafting configuration, along a curve.

    `parts` also measures each drafter of the pair alone.
    """

    parts: bool = False

    def __post_init__(self) -> None:
        PointsConfig.__post_init__(self)
        check_growing("concurrency", self.concurrency)
        _check_later_tokens(self.max_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeverSlowerConfig(RequestOptions):
    """Adaptive drafting against an engine without a drafter, in pairs of runs. Greedy.

    Each side of a point of `concurrency` runs for at least `seconds` in all, `seconds / pairs` in
    each pair, and both the same whole sets of requests, see `requests_at`.
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    seconds: float = 60.0
    pairs: int = 5
    max_tokens: int = 64

    def __post_init__(self) -> None:
        _check_points("concurrency", self.concurrency)
        _check_positive("pairs", self.pairs)
        if not self.seconds > 0:
            raise ConfigError(f"seconds is {self.seconds:g}; give a number above 0, such as 60")

    def requests_at(self, concurrency: int) -> int:
        """How many requests are one set of a point."""
        return requests_at(concurrency, self.concurrency)

    @property
    def requests_per_point(self) -> int:
        """Of the largest point."""
        return self.requests_at(max(self.concurrency))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextConfig(RequestOptions):
    """Long prompts: `passages` pieces of a text, cut to each of `lengths` tokens. Greedy.

    `num_draft_tokens` candidates are verified in every step; None: as many as pay. A text has no
    question to answer, so answers go on behind their end.
    """

    ignore_eos = True  # no option
    lengths: tuple[int, ...] = (512, 2048, 4096, 8192)
    passages: int = 3
    num_draft_tokens: int | None = None
    max_tokens: int = 128

    def __post_init__(self) -> None:
        _check_points("lengths", self.lengths)
        _check_positive("passages", self.passages)
        if self.num_draft_tokens is not None:
            _check_positive("num_draft_tokens", self.num_draft_tokens)
        _check_later_tokens(self.max_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficConfig:
    """Open loop: requests arrive independently, `requests_per_second` of them on average.

    Their lengths lie between `min_tokens` and `max_tokens`, evenly by order of magnitude; each has
    one of `temperatures`. `abort_share` of them are canceled by their client after some tokens. At
    most `concurrency` are concurrent. All is drawn by `seed`, and played `repeats` times per side.
    """

    requests_per_second: float = 2.0
    num_requests: int = 32
    concurrency: int = 8
    min_tokens: int = 4
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.7)
    abort_share: float = 0.1
    repeats: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "min_tokens", "repeats"):
            _check_positive(name.removeprefix("num_"), getattr(self, name))
        if self.max_tokens < self.min_tokens:
            raise ConfigError(
                f"max_tokens {self.max_tokens} is below min_tokens {self.min_tokens}; give more"
            )
        if not (self.requests_per_second > 0 and isfinite(self.requests_per_second)):
            raise ConfigError(
                f"requests_per_second is {self.requests_per_second:g}; give a number above 0"
            )
        if not 0 <= self.abort_share <= 1:
            raise ConfigError(
                f"abort_share is {self.abort_share:g}; give a share of the requests, from 0 to 1"
            )
        if not self.temperatures:
            raise ConfigError("temperatures is empty; give at least one, such as 0,0.7")

    @property
    def params(self) -> list[SamplingParams]:
        """The longest request at each temperature."""
        return [
            SamplingParams(max_tokens=self.max_tokens, temperature=one, seed=self.seed)
            for one in self.temperatures
        ]


def check_growing(name: str, points: tuple[int, ...]) -> None:
    """Refuse points that are no curve.

    Raises:
        ConfigError: there is none, one is below 1, or one is not above the one before it.
    """
    _check_points(name, points)
    if list(points) != sorted(points):
        raise ConfigError(
            f"{name} {','.join(map(str, points))} is not a curve; give increasing numbers, such as "
            "1,2,4"
        )


def _check_points(name: str, points: tuple[int, ...]) -> None:
    if not points:
        raise ConfigError(f"{name} is empty; give at least one number, such as 1,2,4")
    for point in points:
        _check_positive(name, point)
    if len(set(points)) < len(points):
        raise ConfigError(f"{name} {','.join(map(str, points))} names a number twice; leave it out")


def _check_later_tokens(max_tokens: int) -> None:
    if max_tokens < 2:
        raise ConfigError(
            f"max_tokens is {max_tokens}; give 2 or more: prefill produces the first token, and "
            "only the time after it is compared"
        )


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; give a whole number of at least 1")
