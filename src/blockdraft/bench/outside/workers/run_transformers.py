"""`generate` of transformers: plain, with an assistant, or with prompt lookup."""

import time
from typing import Any

import torch
from talk import Decode, Settings, serve  # type: ignore[import-not-found]  # beside this script
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

LOOKUP_TOKENS = 10
"""Drafted by prompt lookup at most, as in the documentation of transformers."""


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when tokens come; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def load(settings: Settings) -> Decode:
    """Load the target, and what drafts for it."""
    torch.set_num_threads(settings["threads"])

    def load_model(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, settings["dtype"]),
            trust_remote_code=settings["trust_remote_code"],
        ).to(settings["device"])

    model = load_model(settings["target"])
    # Its folder may ask for penalties, which we do not apply either.
    model.generation_config = GenerationConfig()
    options: dict[str, Any] = {"do_sample": False}
    if settings["method"] == "assisted":
        options["assistant_model"] = load_model(settings["assistant"])
    elif settings["method"] == "lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    if eos_ids := settings["eos_ids"]:
        options |= {"eos_token_id": eos_ids, "pad_token_id": eos_ids[0]}
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_pre_hook(count)

    def decode(prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        nonlocal passes
        passes, clock = 0, Clock()
        start = time.perf_counter()
        ids = torch.tensor([prompt_ids], device=model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            streamer=clock,
            **options,
        )
        total = time.perf_counter() - start
        return {
            "token_ids": output[0, len(prompt_ids) :].tolist(),
            "total_seconds": total,
            "decode_seconds": clock.times[-1] - clock.times[1],
            "num_passes": passes,
        }

    return decode


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
