"""transformers' own `model.generate`, timed."""

from time import perf_counter

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.models.target.stock import StockModel


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens arrive; `generate` hands over the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing to do."""


class StockGenerator:
    """A second, unchanged instance of an LLM's target."""

    def __init__(self, llm: LLM) -> None:
        self._model = StockModel(
            llm.folder,
            llm.dtype,
            llm.device,
            llm.tokenizer.eos_ids,
            llm.config.quantize,
            llm.config.device_map,
            trust_remote_code=llm.config.trust_remote_code,
        )

    def run(self, prompt_ids: list[int], params: SamplingParams) -> TimedOutput:
        """Decode with the same limits; see StockModel.generate."""
        clock, start = _Clock(), perf_counter()
        token_ids = self._model.generate(prompt_ids, params, clock)
        total = perf_counter() - start
        decode = clock.times[-1] - clock.times[1]
        return TimedOutput(token_ids=token_ids, total_seconds=total, decode_seconds=decode)
