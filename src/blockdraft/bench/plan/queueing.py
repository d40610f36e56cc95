"""The fewest replicas that meet a goal, by a queueing formula. Loads no model library.

A replica is a queue. While n requests run on it, each gets a token every `token_seconds(n)`, and
needs `prompt_seconds(n)` before its first one; both are read off the measured points, linear
between them. At most `most` are concurrent, the most that was measured; others wait in order.

The number of replicas comes from the birth-death process of the requests on one replica: Poisson
arrivals of rate a, completions of rate m(n) = n / (prompt_seconds(n) + (L - 1) token_seconds(n))
for outputs of L tokens on average, so P(n) is proportional to the product of a / m(i) up to n
(Kleinrock, Queueing Systems I, chapter 3). `simulation.py` then plays arrivals through the same
replicas, with the lengths as they are, and replicas are added until it too meets the goal.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, isfinite

from blockdraft.core.errors import ConfigError

MOST_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class ServicePoint:
    """What was measured while so many requests ran, on average."""

    num_running: float
    prompt_seconds: float
    token_seconds: float


@dataclass(frozen=True, slots=True)
class Service:
    """A replica with one configuration: at least one point, by growing `num_running`."""

    points: tuple[ServicePoint, ...]

    @property
    def most(self) -> int:
        """The most concurrent requests: nothing is known of more."""
        return max(1, int(self.points[-1].num_running))

    def prompt_seconds(self, num_running: int) -> float:
        """Before the first token of a request that runs beside the others."""
        return self._between(num_running, "prompt_seconds")

    def token_seconds(self, num_running: int) -> float:
        """For each token after it."""
        return self._between(num_running, "token_seconds")

    def _between(self, num_running: int, name: str) -> float:
        index = bisect_left([point.num_running for point in self.points], num_running)
        if index == 0:
            return float(getattr(self.points[0], name))
        if index == len(self.points):
            return float(getattr(self.points[-1], name))
        low, high = self.points[index - 1 : index + 1]
        share = (num_running - low.num_running) / (high.num_running - low.num_running)
        start, end = float(getattr(low, name)), float(getattr(high, name))
        return start + share * (end - start)


@dataclass(frozen=True, slots=True)
class Goal:
    """What `percentile` percent of the requests must have; None is no limit.

    Raises:
        ConfigError: there is no limit, or a value is out of its range.
    """

    token_seconds: float | None = None
    first_token_seconds: float | None = None
    percentile: float = 95.0

    def __post_init__(self) -> None:
        limits = {"max_tpot": self.token_seconds, "max_ttft": self.first_token_seconds}
        if all(limit is None for limit in limits.values()):
            raise ConfigError("there is no goal; give --max-tpot, --max-ttft, or both")
        for name, limit in limits.items():
            if limit is not None and not (limit > 0 and isfinite(limit)):
                raise ConfigError(f"{name} is {1000 * limit:g} ms; give a number above 0")
        if not 0 < self.percentile < 100:
            raise ConfigError(
                f"percentile is {self.percentile:g}; give one between 0 and 100, such as 95"
            )

    def is_met(self, load: "Load") -> bool:
        """Whether a load of one replica is within all limits."""
        return (self.token_seconds is None or load.token_seconds <= self.token_seconds) and (
            self.first_token_seconds is None or load.first_token_seconds <= self.first_token_seconds
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How one replica fares: times are percentiles over requests, infinite if it cannot keep up.

    mean_running: requests that run, on average. utilization: arrivals over the most that it can
    complete.
    """

    utilization: float
    mean_running: float
    mean_wait: float
    token_seconds: float
    first_token_seconds: float


def completion_rate(service: Service, num_running: int, output_len: float) -> float:
    """Requests per second that a replica completes while so many run."""
    seconds = service.prompt_seconds(num_running)
    seconds += (output_len - 1) * service.token_seconds(num_running)
    return num_running / seconds


def most_completions(service: Service, output_len: float) -> float:
    """Requests per second that a replica can complete at best."""
    return max(completion_rate(service, n, output_len) for n in range(1, service.most + 1))


def load_of(service: Service, arrivals: float, output_len: float, percentile: float) -> Load:
    """A replica under Poisson arrivals of so many requests per second; see above.

    A request has the token_seconds of the state that it comes into. Requests that find no place
    wait for completions of rate m(most), each exponential.
    """
    most = service.most
    rates = [completion_rate(service, n, output_len) for n in range(1, most + 1)]
    utilization = arrivals / most_completions(service, output_len)
    ratio = arrivals / rates[-1]
    if ratio >= 1:
        return Load(utilization, most, inf, inf, inf)
    # Of 0 to most requests; those of more fall by `ratio` each.
    weights = list(accumulate([1.0, *rates], lambda weight, rate: weight * arrivals / rate))
    total = sum(weights[:-1]) + weights[-1] / (1 - ratio)
    chances = [weight / total for weight in weights]
    waits = chances[-1] / (1 - ratio)
    running = sum(n * chance for n, chance in enumerate(chances[:-1])) + most * waits
    share = percentile / 100
    return Load(
        utilization=utilization,
        mean_running=running,
        mean_wait=waits / (rates[-1] - arrivals),
        token_seconds=_token_seconds(service, chances, share),
        first_token_seconds=_first_token_seconds(
            service, chances[:-1], waits, rates[-1] - arrivals, share
        ),
    )


def _token_seconds(service: Service, chances: Sequence[float], share: float) -> float:
    """An arrival that finds n requests runs beside them, or beside most - 1 later."""
    seen = [*chances[:-1]]
    seen[-1] += 1 - sum(seen)
    seconds = sorted((service.token_seconds(n + 1), chance) for n, chance in enumerate(seen))
    reached = 0.0
    for value, chance in seconds:
        reached += chance
        if reached >= share - 1e-12:
            return value
    return seconds[-1][0]


def _first_token_seconds(
    service: Service, at_once: Sequence[float], waits: float, rate: float, share: float
) -> float:
    """The least t with P(time to the first token > t) at most 1 - share, by bisection."""
    prompts = [service.prompt_seconds(n + 1) for n in range(len(at_once))]
    last = prompts[-1]

    def over(seconds: float) -> float:
        chance = sum(p for p, prompt in zip(at_once, prompts, strict=True) if prompt > seconds)
        return chance + waits * (exp(-rate * (seconds - last)) if seconds > last else 1.0)

    low, high = 0.0, max(prompts) + 1.0
    while over(high) > 1 - share:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if over(middle) > 1 - share else (low, middle)
    return high


def num_replicas(service: Service, arrivals: float, output_len: float, goal: Goal) -> int | None:
    """The fewest replicas that share the arrivals evenly and meet the goal; None: no number does.

    Raises:
        ConfigError: it takes more than MOST_REPLICAS.
    """

    def is_enough(count: int) -> bool:
        return goal.is_met(load_of(service, arrivals / count, output_len, goal.percentile))

    # With next to no load, requests run alone; if that is too slow, nothing helps.
    if not goal.is_met(load_of(service, 1e-9, output_len, goal.percentile)):
        return None
    high = 1
    while not is_enough(high):
        high *= 2
        if high > MOST_REPLICAS:
            raise ConfigError(
                f"{arrivals:g} requests per second take more than {MOST_REPLICAS} replicas; give "
                "fewer, or a less strict goal"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def drafting_below(num_running: float, drafted: Service, plain: Service) -> Service:
    """Drafting while fewer requests run than that, and plain decoding from there on."""
    below = [point for point in drafted.points if point.num_running < num_running]
    above = [point for point in plain.points if point.num_running >= num_running]
    return Service(tuple(sorted(below + above, key=lambda point: point.num_running)))
