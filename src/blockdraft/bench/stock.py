"""transformers' own `model.generate`, untouched, as a baseline."""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from blockdraft.bench.sample import Sample
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.models.loading import load_target_model


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens arrive; `generate` hands over the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing to do."""


class StockGenerator:
    """A second, unchanged instance of an LLM's target, with the attention that it comes with."""

    def __init__(self, llm: LLM) -> None:
        self._model: Any = load_target_model(llm.folder, llm.dtype, llm.device)
        self._eos_ids = sorted(llm.tokenizer.eos_ids)

    def run(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        """Decode with the same limits, and the same temperature (of its own random numbers)."""
        ids = torch.tensor([prompt_ids], device=self._model.device)
        options: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            # Its defaults of top-k and top-p come from the model's folder; here nothing filters.
            options = {"do_sample": True, "temperature": params.temperature}
            options |= {"top_k": 0, "top_p": 1.0}
        if self._eos_ids and not params.ignore_eos:
            options |= {"eos_token_id": self._eos_ids, "pad_token_id": self._eos_ids[0]}
        clock = _Clock()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(params.seed or 0)
            start = perf_counter()
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_tokens,
                streamer=clock,
                **options,
            )
            total = perf_counter() - start
        token_ids = tuple(output[0, len(prompt_ids) :].tolist())
        decode = clock.times[-1] - clock.times[1]
        return Sample(token_ids=token_ids, total_seconds=total, decode_seconds=decode)
