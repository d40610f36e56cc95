"""The same prompts, decoded plainly, with drafts, and by transformers, in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockdraft.bench.config import WARM_UP_TOKENS, SpeedConfig
from blockdraft.bench.decode import check_drafts, encode_prompt, in_turn
from blockdraft.bench.sample import Sample, sample_of
from blockdraft.bench.stock import StockGenerator
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.errors import ConfigError
from blockdraft.core.request import SamplingParams
from blockdraft.engine.measuring import compute_every_prompt
from blockdraft.llm import LLM
from blockdraft.text.kinds import loops

Decode = Callable[[list[int], SamplingParams], Sample]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt, decoded in every way."""

    prompt: BenchPrompt
    plain: Sample
    drafted: Sample
    transformers: Sample | None

    @property
    def identical(self) -> bool:
        """True if drafted and plain decoding gave the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def loops(self) -> bool:
        """True if the output repeats itself, which is easy to draft."""
        return loops(self.drafted.token_ids)


class SpeedBench:
    """Measures one pair; the transformers model is loaded once, for all runs."""

    def __init__(self, llm: LLM, *, with_transformers: bool = True) -> None:
        check_drafts(llm)
        compute_every_prompt(llm.engine)
        self.llm = llm
        self._stock = StockGenerator(llm) if with_transformers else None

    def run(
        self,
        prompts: Sequence[BenchPrompt],
        config: SpeedConfig,
        on_progress: Callable[[Measurement], None] = lambda measurement: None,
    ) -> list[Measurement]:
        """Measure every prompt, after a warm-up of every way with the first.

        Raises:
            ConfigError: the block is larger than the drafter's.
            RequestError: a prompt cannot be decoded; known before anything is measured.
        """
        self._check_block(config)
        encoded = [encode_prompt(self.llm, prompt, config.params) for prompt in prompts]
        ways = self._ways(config)
        warm_up = replace(config.params, max_tokens=min(WARM_UP_TOKENS, config.max_tokens))
        for decode in ways.values():
            decode(encoded[0], warm_up)
        measurements = []
        for index, (prompt, prompt_ids) in enumerate(zip(prompts, encoded, strict=True)):
            samples = _in_turns(ways, prompt_ids, config.params, index)
            measurements.append(
                Measurement(
                    prompt, samples["plain"], samples["drafted"], samples.get("transformers")
                )
            )
            on_progress(measurements[-1])
        return measurements

    def _ways(self, config: SpeedConfig) -> dict[str, Decode]:
        ways: dict[str, Decode] = {"plain": self._plain, "drafted": self._drafted}
        if self._stock is not None and config.with_transformers:
            ways["transformers"] = self._stock.run
        return ways

    def _plain(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        return self._drafted(prompt_ids, replace(params, speculative=False))

    def _drafted(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        return sample_of(self.llm.generate(prompt_ids, params).completions[0])

    def _check_block(self, config: SpeedConfig) -> None:
        most = self.llm.engine.drafter.max_draft_tokens + 1
        if config.block is not None and config.block > most:
            raise ConfigError(
                f"block is {config.block}, and the drafter's blocks have {most} slots; "
                f"give at most {most}"
            )


def _in_turns(
    ways: dict[str, Decode], prompt_ids: list[int], params: SamplingParams, index: int
) -> dict[str, Sample]:
    """One sample of each way; each is first equally often, so a slowing machine favors none."""
    return {name: ways[name](prompt_ids, params) for name in in_turn(list(ways), index)}
