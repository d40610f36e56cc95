"""The same prompts, decoded plainly, with drafts, and by transformers, in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.sample import Sample, sample_of
from blockdraft.bench.stock import StockGenerator
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.errors import ConfigError
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.text.kinds import loops

WARM_UP_TOKENS = 16

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
        if llm.drafter_folder is None:
            raise ConfigError("there is no drafter to measure; name one with --drafter")
        self.llm = llm
        self._stock = StockGenerator(llm) if with_transformers else None

    def run(
        self,
        prompts: Sequence[BenchPrompt],
        config: SpeedConfig,
        on_progress: Callable[[Measurement], None] = lambda measurement: None,
    ) -> list[Measurement]:
        """Measure every prompt, after a warm-up of every way with the first."""
        ways = self._ways(config)
        warm_up = replace(config.params, max_tokens=min(WARM_UP_TOKENS, config.max_tokens))
        for decode in ways.values():
            decode(self._encode(prompts[0]), warm_up)
        measurements = []
        for index, prompt in enumerate(prompts):
            measurements.append(self._measure(prompt, config, ways, index))
            on_progress(measurements[-1])
        return measurements

    def _ways(self, config: SpeedConfig) -> dict[str, Decode]:
        ways: dict[str, Decode] = {"plain": self._plain, "drafted": self._drafted}
        if self._stock is not None and config.with_transformers:
            ways["transformers"] = self._stock.run
        return ways

    def _measure(
        self, prompt: BenchPrompt, config: SpeedConfig, ways: dict[str, Decode], index: int
    ) -> Measurement:
        prompt_ids = self._encode(prompt)
        names = list(ways)
        # Each way is first equally often: a machine that slows down favors none.
        names = names[index % len(names) :] + names[: index % len(names)]
        samples = {name: ways[name](prompt_ids, config.params) for name in names}
        return Measurement(
            prompt, samples["plain"], samples["drafted"], samples.get("transformers")
        )

    def _plain(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        return self._drafted(prompt_ids, replace(params, speculative=False))

    def _drafted(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        return sample_of(self.llm.generate(prompt_ids, params).completions[0])

    def _encode(self, prompt: BenchPrompt) -> list[int]:
        tokenizer = self.llm.tokenizer
        if tokenizer.has_chat_template:
            return tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        return tokenizer.encode(prompt.text)
