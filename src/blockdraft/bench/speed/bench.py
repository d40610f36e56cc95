"""The same prompts, decoded plainly, with drafts, and by other engines, in turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from blockdraft.bench.config import SpeedConfig, warm_up_of
from blockdraft.bench.decode import check_drafts, encode_prompt, encode_prompts, in_turn
from blockdraft.bench.journal import Journal
from blockdraft.bench.outside.interface import Failure, OutsideOutput
from blockdraft.bench.outside.others import OtherEngine
from blockdraft.bench.speed.stock import StockGenerator
from blockdraft.bench.timed_output import TimedOutput, timed_output
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.errors import AnswerFailed
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.measure.measuring import Meter, compute_every_prompt
from blockdraft.measure.phases import PhaseTotals
from blockdraft.text.kinds import loops
from blockdraft.text.sent_back import as_sent_back

Decoded = TimedOutput | OutsideOutput | Failure
Decode = Callable[[list[int], SamplingParams], Decoded]
Samples = Mapping[str, Decoded]
"""By configuration."""

_OUTSIDE = "outside "
"""Before the name of another engine, which may have the name of a configuration of ours."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One turn of a prompt, from 1, decoded in every configuration.

    phases: by configuration, if a ledger was asked for. outside: by name of another engine.
    """

    prompt: BenchPrompt
    plain: TimedOutput
    drafted: TimedOutput
    transformers: TimedOutput | None
    phases: Mapping[str, PhaseTotals] = field(default_factory=dict)
    outside: Mapping[str, OutsideOutput | Failure] = field(default_factory=dict)
    turn: int = 1

    @property
    def conversation(self) -> tuple[str, str]:
        """The same for all turns of a prompt, and for no other; rows of a file may share an id."""
        return self.prompt.name, self.prompt.text

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The tokens of every configuration that gave some."""
        ours = {"plain": self.plain, "drafted": self.drafted, "transformers": self.transformers}
        found = {name: sample.token_ids for name, sample in ours.items() if sample is not None}
        theirs = {
            name: output.timed.token_ids
            for name, output in self.outside.items()
            if isinstance(output, OutsideOutput)
        }
        return found | theirs

    @property
    def identical(self) -> bool:
        """True if drafted and plain decoding gave the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def loops(self) -> bool:
        """True if the output repeats itself, which is easy to draft."""
        return loops(self.drafted.token_ids)


class SpeedJournal(Journal[Samples]):
    """By run of a command, prompt, both from 0, and turn, from 1."""

    kinds = (OutsideOutput, Failure)


class SpeedBench:
    """Measures one pair; the transformers model is loaded once, for all runs.

    others: other engines that were started, which take turns with ours.
    """

    def __init__(
        self, llm: LLM, *, with_transformers: bool = True, others: Sequence[OtherEngine] = ()
    ) -> None:
        check_drafts(llm)
        compute_every_prompt(llm.engine)
        self.llm, self.others = llm, others
        self._stock = StockGenerator(llm) if with_transformers else None

    def run(
        self,
        prompts: Sequence[BenchPrompt],
        config: SpeedConfig,
        on_progress: Callable[[Measurement], None] = lambda measurement: None,
        journal: SpeedJournal | None = None,
        run: int = 0,
    ) -> list[Measurement]:
        """Measure every turn of every prompt, after a warm-up of each configuration with the first.

        A later turn follows the answers of plain decoding everywhere, without their thinking.
        What the journal holds is not measured again. run: the number in it, from 0.

        Raises:
            RequestError: a prompt cannot be decoded; known before anything is measured, but for a
                turn that does not fit behind the answers.
        """
        journal = SpeedJournal() if journal is None else journal
        encoded = encode_prompts(self.llm, prompts, config.params)
        ways = self._ways(config)
        for decode in ways.values():
            decode(encoded[0], warm_up_of(config.params))
        measurements: list[Measurement] = []
        with ExitStack() as stack:
            meter = stack.enter_context(self.llm.measured()) if config.ledger else None
            for index, prompt in enumerate(prompts):
                answers: list[str] = []
                for turn in range(1, 2 + len(prompt.later)):
                    place = (run, index, turn)
                    samples, phases = journal.done.get(place), dict[str, PhaseTotals]()
                    ids = self._encode(prompt, config.params, answers)
                    if samples is None:
                        with _named(prompt, turn):
                            samples, phases = _in_turns(
                                ways, ids, config.params, len(measurements), meter
                            )
                        journal.add(place, samples)
                    measurements.append(_measurement(prompt, turn, samples, phases))
                    given = measurements[-1].plain.token_ids
                    answers.append(as_sent_back(self.llm.tokenizer, ids, given))
                    on_progress(measurements[-1])
        return measurements

    def _encode(
        self, prompt: BenchPrompt, params: SamplingParams, answers: Sequence[str]
    ) -> list[int]:
        check = self.llm.engine.limits.check_prompt
        return encode_prompt(self.llm.tokenizer, check, prompt, params, answers)

    def _ways(self, config: SpeedConfig) -> dict[str, Decode]:
        ways: dict[str, Decode] = {"plain": self._plain, "drafted": self._drafted}
        if self._stock is not None and config.with_transformers:
            ways["transformers"] = self._stock.run
        for other in self.others:
            ways[_OUTSIDE + other.name] = partial(_ask, other)
        return ways

    def _plain(self, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
        return self._drafted(prompt_ids, replace(params, num_draft_tokens=0))

    def _drafted(self, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
        return timed_output(self.llm.generate(prompt_ids, params).completions[0])


@contextmanager
def _named(prompt: BenchPrompt, turn: int) -> Iterator[None]:
    """Say of which prompt an answer failed."""
    try:
        yield
    except AnswerFailed as error:
        raise AnswerFailed(f"prompt {prompt.id}, turn {turn}: {error}") from error


def _ask(
    other: OtherEngine, prompt_ids: list[int], params: SamplingParams
) -> OutsideOutput | Failure:
    return other.decode(prompt_ids, params.max_tokens)


def _measurement(
    prompt: BenchPrompt, turn: int, samples: Samples, phases: Mapping[str, PhaseTotals]
) -> Measurement:
    ours = {name: s for name, s in samples.items() if isinstance(s, TimedOutput)}
    outside = {
        name.removeprefix(_OUTSIDE): sample
        for name, sample in samples.items()
        if not isinstance(sample, TimedOutput)
    }
    stock = ours.get("transformers")
    return Measurement(prompt, ours["plain"], ours["drafted"], stock, phases, outside, turn)


def _in_turns(
    ways: dict[str, Decode],
    prompt_ids: list[int],
    params: SamplingParams,
    index: int,
    meter: Meter | None,
) -> tuple[dict[str, Decoded], dict[str, PhaseTotals]]:
    """One sample of each configuration; each is first equally often."""
    samples: dict[str, Decoded] = {}
    phases: dict[str, PhaseTotals] = {}
    for name in in_turn(list(ways), index):
        if meter is None:
            samples[name] = ways[name](prompt_ids, params)
            continue
        meter.take_totals()  # what was between belongs to nobody
        samples[name] = ways[name](prompt_ids, params)
        phases[name] = meter.take_totals()
    return samples, phases
