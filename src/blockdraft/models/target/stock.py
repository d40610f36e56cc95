"""transformers' own `model.generate`, untouched: a baseline, and a second opinion."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from blockdraft.core.config import DeviceMap, Quantize
from blockdraft.core.request import SamplingParams
from blockdraft.models.layers.quantized import dequantize
from blockdraft.models.target.loading import load_target_model


class StockModel:
    """A target loaded a second time, with the attention that it comes with.

    With `quantize` its weights are those that a quantized target's stand for.

    Raises:
        ModelError: transformers cannot load it.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        eos_ids: Collection[int],
        quantize: Quantize | None = None,
        device_map: DeviceMap | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self._model: Any = load_target_model(
            *(folder, dtype, device, device_map),
            trust_remote_code=trust_remote_code,
            quantize=quantize,
        )
        dequantize(self._model)
        # Its folder may ask for penalties and ends of its own, which no request here has.
        self._model.generation_config = GenerationConfig()
        self._eos_ids = sorted(eos_ids)

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, streamer: Any = None
    ) -> tuple[int, ...]:
        """New tokens, with the same limits and the same temperature (of its own random numbers)."""
        ids = torch.tensor([list(prompt_ids)], device=self._model.device)
        options: dict[str, Any] = {"do_sample": False}
        if params.is_sampled:
            # By default only the 50 best are chosen from.
            options = {"do_sample": True, "temperature": params.temperature}
            options |= {"top_k": 0, "top_p": 1.0}
        if self._eos_ids and not params.ignore_eos:
            options |= {"eos_token_id": self._eos_ids, "pad_token_id": self._eos_ids[0]}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(params.seed or 0)
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_tokens,
                streamer=streamer,
                **options,
            )
        return tuple(output[0, len(prompt_ids) :].tolist())
