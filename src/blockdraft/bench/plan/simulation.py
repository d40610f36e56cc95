"""Arrivals played through replicas, event by event: the check of `queueing.py`."""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from blockdraft.bench.plan.queueing import Goal, Load, Service, most_completions

SEED = 0
NUM_REQUESTS = 4000
"""That are played, for each replica at least some hundred, if arrivals are drawn."""
WARM_UP = 0.1
"""Share of the requests that only fill the queues."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds, and how many tokens its output has."""

    at: float
    output_len: int


@dataclass(frozen=True, slots=True)
class Played:
    """What a request got. `token_seconds` is None for a single token; `wait`: before it ran."""

    at: float
    output_len: int
    wait: float
    first_token_seconds: float
    token_seconds: float | None


@dataclass(slots=True)
class _Running:
    """Left of its prompt, as a share, and then of its later tokens."""

    arrival: Arrival
    wait: float
    prompt: float = 1.0
    tokens: float = 0.0
    first_token_at: float = 0.0


def poisson_arrivals(rate: float, output_len: float, count: int) -> list[Arrival]:
    """Requests that come independently, with exponential lengths of at least one token."""
    draw, now, arrivals = random.Random(SEED), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        more = draw.expovariate(1 / (output_len - 1)) if output_len > 1 else 0.0
        arrivals.append(Arrival(now, 1 + round(more)))
    return arrivals


def simulate(service: Service, arrivals: Sequence[Arrival], replicas: int = 1) -> list[Played]:
    """What each request gets; each goes to a replica by chance, as without a clever router."""
    draw = random.Random(SEED)
    shares: list[list[Arrival]] = [[] for _ in range(replicas)]
    for arrival in arrivals:
        shares[draw.randrange(replicas)].append(arrival)
    played = [one for share in shares for one in _play(service, share)]
    return sorted(played, key=lambda one: one.at)


def _play(service: Service, arrivals: Sequence[Arrival]) -> Iterable[Played]:
    coming, waiting = deque(arrivals), deque[Arrival]()
    running: list[_Running] = []
    now = 0.0
    while coming or waiting or running:
        while waiting and len(running) < service.most:
            first = waiting.popleft()
            running.append(_Running(first, now - first.at, tokens=first.output_len - 1))
        prompt, token = 0.0, 0.0
        if running:
            prompt = service.prompt_seconds(len(running))
            token = service.token_seconds(len(running))
        ends = (r.prompt * prompt if r.prompt > 0 else r.tokens * token for r in running)
        next_at = coming[0].at if coming else inf
        passed = min(min(ends, default=inf), next_at - now)
        now = next_at if now + passed >= next_at else now + passed
        still = []
        for one in running:
            if one.prompt > 0:
                one.prompt -= passed / prompt if prompt else one.prompt
                if one.prompt <= 1e-12:
                    one.prompt, one.first_token_at = 0.0, now
            else:
                one.tokens -= passed / token
            if one.prompt == 0.0 and one.tokens <= 1e-9:
                yield _played(one, now)
            else:
                still.append(one)
        running = still
        while coming and coming[0].at <= now:
            waiting.append(coming.popleft())


def _played(one: _Running, now: float) -> Played:
    later = one.arrival.output_len - 1
    return Played(
        at=one.arrival.at,
        output_len=one.arrival.output_len,
        wait=one.wait,
        first_token_seconds=one.first_token_at - one.arrival.at,
        token_seconds=(now - one.first_token_at) / later if later else None,
    )


def simulated_load(
    service: Service, arrivals: Sequence[Arrival], replicas: int, goal: Goal
) -> Load:
    """The percentiles of what was played, behind a warm-up; a mean over the replicas."""
    played = simulate(service, arrivals, replicas)
    counted = played[int(WARM_UP * len(played)) :]
    span = max(1e-9, arrivals[-1].at - arrivals[0].at)
    tokens = [one.token_seconds for one in counted if one.token_seconds is not None]
    seconds = sum(
        one.first_token_seconds - one.wait + (one.token_seconds or 0.0) * (one.output_len - 1)
        for one in played
    )
    output_len = float(np.mean([arrival.output_len for arrival in arrivals]))
    rate = len(arrivals) / span / replicas
    return Load(
        utilization=rate / most_completions(service, output_len),
        mean_running=seconds / span / replicas,
        mean_wait=float(np.mean([one.wait for one in counted])),
        token_seconds=float(np.percentile(tokens, goal.percentile)) if tokens else 0.0,
        first_token_seconds=float(
            np.percentile([one.first_token_seconds for one in counted], goal.percentile)
        ),
    )
