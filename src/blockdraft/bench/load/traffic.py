"""Mixed traffic, played plainly and with drafts: requests arrive, and are answered or canceled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import exp, log
from random import Random
from time import perf_counter, sleep

from blockdraft.bench.config import RequestOptions, TrafficConfig
from blockdraft.bench.decode import ADAPTIVE, PLAIN, Decoder, Way, check_drafts, in_turn
from blockdraft.bench.journal import Journal
from blockdraft.bench.measures import (
    Measures,
    Spread,
    defined,
    measures_of,
    spread_of,
    without_loops,
)
from blockdraft.bench.timed_output import TimedOutput, timed_output
from blockdraft.core.errors import AnswerFailed
from blockdraft.engine.samples import Job
from blockdraft.llm import LLM

TRAFFIC_DEFINITIONS = {
    "requests": "the traffic, the same for each side: seconds since its start, index of the "
    "prompt, max_tokens, temperature, seed, and the tokens after which the client disconnects",
    "aborted": "requests whose client disconnected before they ended; they count for tokens in "
    "total and for equal outputs, and for no other measure",
    "speedup": "of the requests that were not aborted: output tokens divided by seconds from "
    "arrival to last token, queueing included, divided by the same for plain decoding",
    **defined(
        *("decode_speedup", "band", "tokens_per_second_in_total", "tau_micro", "tau_macro"),
        *("acceptance_rate", "per_position", "per_node", "first_token_seconds", "prompt_seconds"),
        *("seconds_per_token", "largest_gap", "num_looping", "without_loops", "memory"),
    ),
    "wall_seconds": "from the start of the traffic to the last token: median, lowest and highest "
    "of the repeats",
    "share_equal": "of the requests that were not aborted",
    "num_identical": "outputs with the tokens of plain decoding in the same repeat; those of "
    "aborted requests are compared as far as they went",
}


@dataclass(frozen=True, slots=True)
class Request(RequestOptions):
    """See TRAFFIC_DEFINITIONS."""

    at: float
    prompt: int
    max_tokens: int
    temperature: float
    seed: int
    gone_after: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of a request, and its times; those of one that was canceled are None."""

    token_ids: tuple[int, ...]
    timed: TimedOutput | None


@dataclass(frozen=True, slots=True)
class Play:
    """The answers of all requests, in their order."""

    wall_seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of all requests."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.wall_seconds


Repeat = Mapping[str, Play]
"""By the name of the configuration."""


def draw_requests(config: TrafficConfig, num_prompts: int) -> list[Request]:
    """The traffic of a configuration: the same for the same seed."""
    draw = Random(config.seed)
    requests, at = [], 0.0
    for number in range(config.num_requests):
        length = round(exp(draw.uniform(log(config.min_tokens), log(config.max_tokens))))
        gone = draw.randint(1, length) if draw.random() < config.abort_share else None
        temperature, seed = draw.choice(config.temperatures), draw.getrandbits(32)
        requests.append(Request(at, number % num_prompts, length, temperature, seed, gone))
        at += draw.expovariate(config.requests_per_second)
    return requests


class TrafficJournal(Journal[Repeat]):
    """By number, from 0."""

    kinds = (Play, Answer)


def measure_traffic(
    llm: LLM,
    prompts: Sequence[list[int]],
    requests: Sequence[Request],
    config: TrafficConfig,
    journal: TrafficJournal,
    on_progress: Callable[[Repeat], None] = lambda repeat: None,
) -> list[Repeat]:
    """Play the traffic on each side in turns, after a warm-up; not what the journal holds.

    Raises:
        ConfigError: there is no drafter.
        AnswerFailed: an answer ended with an error.
    """
    check_drafts(llm)
    decoder, ways = Decoder(llm), (PLAIN, ADAPTIVE)
    for way in ways:
        decoder.warm_up(prompts, config.params[0], way, config.concurrency)
    for repeat in range(len(journal.done), config.repeats):
        played = {
            way.name: _play(decoder, way, prompts, requests, config.concurrency)
            for way in in_turn(ways, repeat)
        }
        journal.add((repeat,), {way.name: played[way.name] for way in ways})
        on_progress(played)
    return list(journal.done.values())


def _play(
    decoder: Decoder,
    way: Way,
    prompts: Sequence[list[int]],
    requests: Sequence[Request],
    concurrency: int,
) -> Play:
    """Open loop: every request arrives at its time, whether the engine keeps up or not."""
    samples = decoder.llm.samples
    decoder.use(way, concurrency)
    open_keys: dict[int, int] = {}
    tokens: list[list[int]] = [[] for _ in requests]
    timed: list[TimedOutput | None] = [None] * len(requests)
    place = 0
    start = perf_counter()
    try:
        while place < len(requests) or open_keys:
            now = perf_counter() - start
            while place < len(requests) and requests[place].at <= now:
                one = requests[place]
                params = decoder.params_of(way, one.params)
                job = Job(place, list(prompts[one.prompt]), params, one.seed)
                open_keys[samples.add(job, 0, added_at=start + one.at)] = place
                place += 1
            if not open_keys:
                sleep(max(0.0, requests[place].at - now))
                continue
            samples.step()
            for key in samples.with_news:
                chunk, where = samples.take_chunk(key), open_keys[key]
                tokens[where] += chunk.token_ids
                gone = requests[where].gone_after
                if chunk.completion is not None:
                    del open_keys[key]
                    try:
                        timed[where] = timed_output(chunk.completion)
                    except AnswerFailed as error:
                        raise AnswerFailed(f"request {where}: {error}") from error
                if gone is not None and len(tokens[where]) >= gone:
                    # Drafts may have reached further, or to the end.
                    tokens[where], timed[where] = tokens[where][:gone], None
                    if open_keys.pop(key, None) is not None:
                        samples.drop(key)
        wall_seconds = perf_counter() - start
    finally:
        samples.abandoned.extend(open_keys)
        samples.drop_abandoned()
    answers = (Answer(tuple(ids), one) for ids, one in zip(tokens, timed, strict=True))
    return Play(wall_seconds, tuple(answers))


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """One configuration over all repeats; see TRAFFIC_DEFINITIONS."""

    way: str
    wall_seconds: Spread
    tokens_per_second_in_total: Spread
    num_aborted: int
    num_outputs: int
    num_identical: int
    measures: Measures | None
    without_loops: Measures | None


def traffic_figures(repeats: Sequence[Repeat], requests: Sequence[Request]) -> list[TrafficFigures]:
    """Of each configuration."""
    return [_figures(name, repeats, requests) for name in repeats[0]]


def _figures(name: str, repeats: Sequence[Repeat], requests: Sequence[Request]) -> TrafficFigures:
    plays = [repeat[name] for repeat in repeats]
    plain = [repeat[PLAIN.name] for repeat in repeats]
    answers = [answer for play in plays for answer in play.answers]
    pairs = list(zip(answers, (one for play in plain for one in play.answers), strict=True))
    # Equal outputs are canceled in the same place; where they differ, one side may lack a time.
    both = [
        (one.timed, other.timed, request.prompt)
        for (one, other), request in zip(pairs, cycle(requests))
        if one.timed is not None and other.timed is not None
    ]
    ours, theirs = [one for one, _, _ in both], [other for _, other, _ in both]
    prompts = [prompt for *_, prompt in both]
    baseline = None if name == PLAIN.name else theirs
    return TrafficFigures(
        way=name,
        wall_seconds=spread_of([play.wall_seconds for play in plays]),
        tokens_per_second_in_total=spread_of([play.tokens_per_second for play in plays]),
        num_aborted=sum(answer.timed is None for answer in answers),
        num_outputs=len(answers),
        num_identical=sum(one.token_ids == other.token_ids for one, other in pairs),
        measures=measures_of(ours, baseline, prompts=prompts) if both else None,
        without_loops=without_loops(ours, theirs, prompts) if both else None,
    )
