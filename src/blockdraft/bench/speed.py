"""The same prompts, decoded plainly, with drafts, and by other engines, in turns."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from blockdraft.bench.config import WARM_UP_TOKENS, SpeedConfig
from blockdraft.bench.decode import check_drafts, encode_prompts, in_turn
from blockdraft.bench.outside.rivals import Rival
from blockdraft.bench.outside.side import Failure, OutsideOutput
from blockdraft.bench.stock import StockGenerator
from blockdraft.bench.timed_output import TimedOutput, timed_output
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.measure.measuring import Meter, compute_every_prompt
from blockdraft.measure.phases import PhaseTotals
from blockdraft.text.kinds import loops

Decoded = TimedOutput | OutsideOutput | Failure
Decode = Callable[[list[int], SamplingParams], Decoded]

_OUTSIDE = "outside "
"""Before the name of another engine, which may be called as a way of ours."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt, decoded in every way.

    phases: by way, if a ledger was asked for. outside: by name of another engine.
    """

    prompt: BenchPrompt
    plain: TimedOutput
    drafted: TimedOutput
    transformers: TimedOutput | None
    phases: Mapping[str, PhaseTotals] = field(default_factory=dict)
    outside: Mapping[str, OutsideOutput | Failure] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """True if drafted and plain decoding gave the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def loops(self) -> bool:
        """True if the output repeats itself, which is easy to draft."""
        return loops(self.drafted.token_ids)


class SpeedBench:
    """Measures one pair; the transformers model is loaded once, for all runs.

    rivals: other engines that were started, which take turns with ours.
    """

    def __init__(
        self, llm: LLM, *, with_transformers: bool = True, rivals: Sequence[Rival] = ()
    ) -> None:
        check_drafts(llm)
        compute_every_prompt(llm.engine)
        self.llm, self.rivals = llm, rivals
        self._stock = StockGenerator(llm) if with_transformers else None

    def run(
        self,
        prompts: Sequence[BenchPrompt],
        config: SpeedConfig,
        on_progress: Callable[[Measurement], None] = lambda measurement: None,
    ) -> list[Measurement]:
        """Measure every prompt, after a warm-up of every way with the first.

        Raises:
            RequestError: a prompt cannot be decoded; known before anything is measured.
        """
        encoded = encode_prompts(self.llm, prompts, config.params)
        ways = self._ways(config)
        warm_up = replace(config.params, max_tokens=min(WARM_UP_TOKENS, config.max_tokens))
        for decode in ways.values():
            decode(encoded[0], warm_up)
        measurements = []
        with ExitStack() as stack:
            meter = stack.enter_context(self.llm.measured()) if config.ledger else None
            for index, (prompt, prompt_ids) in enumerate(zip(prompts, encoded, strict=True)):
                samples, phases = _in_turns(ways, prompt_ids, config.params, index, meter)
                measurements.append(_measurement(prompt, samples, phases))
                on_progress(measurements[-1])
        return measurements

    def _ways(self, config: SpeedConfig) -> dict[str, Decode]:
        ways: dict[str, Decode] = {"plain": self._plain, "drafted": self._drafted}
        if self._stock is not None and config.with_transformers:
            ways["transformers"] = self._stock.run
        for rival in self.rivals:
            ways[_OUTSIDE + rival.name] = partial(_ask, rival)
        return ways

    def _plain(self, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
        return self._drafted(prompt_ids, replace(params, num_draft_tokens=0))

    def _drafted(self, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
        return timed_output(self.llm.generate(prompt_ids, params).completions[0])


def _ask(rival: Rival, prompt_ids: list[int], params: SamplingParams) -> OutsideOutput | Failure:
    return rival.decode(prompt_ids, params.max_tokens)


def _measurement(
    prompt: BenchPrompt, samples: Mapping[str, Decoded], phases: Mapping[str, PhaseTotals]
) -> Measurement:
    ours = {name: s for name, s in samples.items() if isinstance(s, TimedOutput)}
    outside = {
        name.removeprefix(_OUTSIDE): sample
        for name, sample in samples.items()
        if not isinstance(sample, TimedOutput)
    }
    return Measurement(
        prompt, ours["plain"], ours["drafted"], ours.get("transformers"), phases, outside
    )


def _in_turns(
    ways: dict[str, Decode],
    prompt_ids: list[int],
    params: SamplingParams,
    index: int,
    meter: Meter | None,
) -> tuple[dict[str, Decoded], dict[str, PhaseTotals]]:
    """One sample of each way; each is first equally often, so a slowing machine favors none."""
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
