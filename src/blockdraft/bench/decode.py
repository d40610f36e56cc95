"""A set of requests, decoded in one of the configurations that are compared.

The one place where a measurement sets how deep to draft and how many requests run concurrently.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle
from statistics import median
from time import perf_counter
from typing import Literal, TypeVar

from blockdraft.allocation.policy import Policy
from blockdraft.bench.config import REQUESTS_IN_TURN, warm_up_of
from blockdraft.bench.ledger.accounts import merge_totals
from blockdraft.bench.timed_output import TimedOutput, timed_output
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.conversations import as_messages, as_text
from blockdraft.core.errors import ConfigError, RequestError
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.measure.phases import PhaseTotals
from blockdraft.text.outline import Check, Outline
from blockdraft.text.tokenizer import Tokenizer, thinking_options
from blockdraft.text.tool_prompt import encode_tool_chat
from blockdraft.text.tools import parse_tools

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Way:
    """Most candidates of a step; 0 is plain decoding. `drafters`: kinds that draft, None: all."""

    name: str
    num_draft_tokens: int | Literal["adaptive"]
    drafters: tuple[str, ...] | None = None


PLAIN = Way("plain", 0)
ADAPTIVE = Way("adaptive", "adaptive")


def fixed(num_draft_tokens: int) -> Way:
    """Always verify as many candidates."""
    return Way(f"fixed {num_draft_tokens}", num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that were sent together, and the seconds until the last was finished.

    Or several such sets, one after the other, and the sum of their seconds.

    phases: where the time went; work is counted only where the engine measures it.
    """

    samples: tuple[TimedOutput, ...]
    wall_seconds: float
    phases: PhaseTotals = field(default_factory=PhaseTotals)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def tokens_per_second(self) -> float:
        """All output tokens over the wall time."""
        return self.num_tokens / self.wall_seconds

    @property
    def tokens_per_second_per_user(self) -> float:
        """Of the median request, from its first token on; 0 if all are single tokens."""
        later = [s.decode_tokens_per_second for s in self.samples if len(s.token_ids) > 1]
        return median(later) if later else 0.0

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """The tokens of each request."""
        return [sample.token_ids for sample in self.samples]

    def num_equal(self, reference: Sequence[tuple[int, ...]]) -> int:
        """How many outputs are those of a reference set, which is repeated as often as needed."""
        return sum(map(tuple.__eq__, self.outputs, cycle(reference)))


def samples_of(runs: Iterable[Run]) -> list[TimedOutput]:
    """The outputs of several runs, one after the other."""
    return [sample for run in runs for sample in run.samples]


def joined(runs: Sequence[Run]) -> Run:
    """One after the other, as one run."""
    return Run(
        samples=tuple(sample for run in runs for sample in run.samples),
        wall_seconds=_seconds_of(runs),
        phases=merge_totals(run.phases for run in runs),
    )


class Decoder:
    """Decodes sets of requests with one LLM, which it leaves as its last run set it.

    No prompt is reused. What adaptive drafting has learned stays from run to run, as in a server,
    also where other configurations come in between.
    """

    def __init__(self, llm: LLM) -> None:
        compute_every_prompt(llm.engine)
        self.llm = llm
        self._learned: Policy | None = None

    def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        way: Way,
        concurrency: int = 1,
    ) -> Run:
        """Closed loop: decode every prompt, at most `concurrency` of them concurrently."""
        engine = self.llm.engine
        self.use(way, concurrency)
        params = self.params_of(way, params)
        engine.timer.take_totals()
        start = perf_counter()
        with engine.timer.phase("stream"):
            generations = self.llm.generate([list(prompt) for prompt in prompts], params)
        wall_seconds = perf_counter() - start
        return Run(
            samples=tuple(timed_output(generation.completions[0]) for generation in generations),
            wall_seconds=wall_seconds,
            phases=engine.timer.take_totals(),
        )

    def warm_up(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        way: Way,
        concurrency: int = 1,
    ) -> None:
        """Decode a few tokens of the first `concurrency` prompts, and forget them."""
        self.run(prompts[:concurrency], warm_up_of(params), way, concurrency)

    @staticmethod
    def params_of(way: Way, params: SamplingParams) -> SamplingParams:
        """Those of a request in this configuration."""
        if way == PLAIN:
            # Beyond depth 0, the drafter is not even told what the target has read.
            return replace(params, num_draft_tokens=0)
        return params if way.drafters is None else replace(params, drafters=way.drafters)

    def use(self, way: Way, concurrency: int) -> None:
        """Draft as this configuration does, with at most so many concurrent requests."""
        self.llm.engine.scheduler.max_running = concurrency
        if way.num_draft_tokens != "adaptive":
            self.llm.use_fixed_drafting(way.num_draft_tokens)
            return
        self.llm.use_adaptive_drafting()
        if self._learned is not None:
            self.llm.engine.allocator.policy = self._learned
        self._learned = self.llm.engine.allocator.policy


Side = tuple[Decoder, Way]


def run_in_turns(
    sides: Sequence[Side],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    *,
    first: int = 0,
    seconds: float = 0.0,
) -> dict[Way, Run]:
    """Decode every prompt on every side, again until each side has had its seconds.

    A machine's speed may change from one second to the next, so the sides take turns after a few
    requests, with another one first each time. `first`: the one that begins.
    """
    done: dict[Way, list[Run]] = {way: [] for _, way in sides}
    turns = count(first)
    while True:
        for part in _portions(prompts, concurrency):
            for decoder, way in in_turn(sides, next(turns)):
                done[way].append(decoder.run(part, params, way, concurrency))
        if min(map(_seconds_of, done.values())) >= seconds:
            return {way: joined(runs) for way, runs in done.items()}


def _seconds_of(runs: Sequence[Run]) -> float:
    return sum(run.wall_seconds for run in runs)


def _portions(prompts: Sequence[list[int]], concurrency: int) -> list[Sequence[list[int]]]:
    """The prompts in order, enough in each for requests to follow upon others."""
    size = REQUESTS_IN_TURN * concurrency
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def check_drafts(llm: LLM) -> None:
    """Refuse to measure an LLM that never drafts.

    Raises:
        ConfigError: there is no drafter, and nothing is looked up.
    """
    if llm.drafter_folder is None and not llm.config.lookup:
        raise ConfigError(
            "there is no drafter to measure; name one with --drafter, or add --lookup"
        )


def encode_prompt(
    tokenizer: Tokenizer,
    check: Check,
    prompt: BenchPrompt,
    params: SamplingParams,
    answers: Sequence[str] = (),
) -> list[int]:
    """Token ids of a prompt, as a user's turn where the target has a chat template.

    Its system text stands before it, and its tools where the template has them.

    With `answers` to the first turns, those of the conversation up to the turn behind them.

    Raises:
        RequestError: it cannot be decoded with these parameters; names the prompt.
    """
    try:
        ids = _encode(tokenizer, prompt, answers)
        check(ids, params)
    except RequestError as error:
        turn = f", turn {len(answers) + 1}" if answers else ""
        raise RequestError(f"prompt {prompt.id} of {prompt.category}{turn}: {error}") from error
    return ids


def _encode(tokenizer: Tokenizer, prompt: BenchPrompt, answers: Sequence[str]) -> list[int]:
    turns = (prompt.text, *prompt.later)
    if prompt.thinking != "template" and not tokenizer.has_thinking_switch:
        raise RequestError(
            f"thinking is {prompt.thinking}, but the target's chat template has no such switch; "
            "leave out --thinking"
        )
    if not tokenizer.has_chat_template and not prompt.tools:
        return tokenizer.encode(as_text(turns, prompt.system, answers))
    conversation = as_messages(turns, prompt.system, answers)
    options = thinking_options(prompt.thinking)
    if prompt.tools:
        return encode_tool_chat(tokenizer, conversation, parse_tools(prompt.tools), options)
    return tokenizer.encode_chat(conversation, options)


def encode_prompts(
    llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams
) -> list[list[int]]:
    """Of a loaded model; see `encode_prompt`."""
    check = llm.engine.limits.check_prompt
    return [encode_prompt(llm.tokenizer, check, prompt, params) for prompt in prompts]


def check_prompts(
    outline: Outline,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    *,
    multi_turn: bool = False,
) -> None:
    """Refuse what `encode_prompts` would refuse, as far as it is known before weights are read.

    multi_turn: the turns behind the first are asked too, so they must fit behind whole answers.
    """

    def check_whole(ids: Sequence[int], params: SamplingParams, num_answers: int) -> None:
        outline.check([*ids, *[ids[-1]] * (num_answers * params.max_tokens)], params)

    for prompt in prompts:
        num_answers = len(prompt.later) if multi_turn else 0
        check = partial(check_whole, num_answers=num_answers)
        encode_prompt(outline.tokenizer, check, prompt, params, [""] * num_answers)


def in_turn(items: Sequence[T], turn: int) -> list[T]:
    """The items, begun with another one each turn, so that a slowing machine favors none."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]
