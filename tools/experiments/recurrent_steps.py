"""Time of steps of a target with recurrent layers: by kernels against torch's step, in turns.

    python tools/experiments/recurrent_steps.py {delta,scan,convolution} {tiny,large} [--rounds 5]

A model with random weights in float32, three of four layers recurrent: with a delta rule of the
Qwen3.5 kind, with the scan of Mamba 2 (Bamba), or with short convolutions (LFM2). Both sides are
loaded, each with its own copy of the weights, and take turns within every round. Timed is a target
alone, without scheduler and sampler: a prompt of 512 tokens, steps of one token behind it, steps of
1 + 15 tokens of which 7 drafts are kept, and steps of eight sequences with one token each.
transformers alone takes its turn too, which scans prompts. Beside it the time of the parts on the
side of kernels, by wrapping them. Medians. Prints one JSON object.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from blockdraft.cache.pages import Pages
from blockdraft.core.plan import ForwardPlan
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Tokens
from blockdraft.kernels.cpu.products import NativeProduct
from blockdraft.kernels.cpu.recurrence import NativeRecurrence
from blockdraft.measure.provenance import describe_environment
from blockdraft.models.layers import recurrent
from blockdraft.models.layers.recurrent import cache_argument
from blockdraft.models.target.paged import PagedTarget

PROMPT, MANY = 512, 8
NUM_DRAFTS, NUM_KEPT = 15, 7
NUM_PAGES = 64
PARTS = {"recurrence": (NativeRecurrence, "__call__"), "products": (NativeProduct, "__call__")}
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "large": {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
}
DELTA_SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "large": {
        "head_dim": 64,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
SCAN_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "large": {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128},
}
KINDS = ("delta", "scan", "convolution")


def build(kind: str, size: str) -> PreTrainedModel:
    """The same each time."""
    torch.manual_seed(0)
    num_layers = SIZES[size]["num_hidden_layers"]
    sizes: dict[str, Any] = {**SIZES[size], "max_position_embeddings": 4096}
    model: PreTrainedModel
    if kind == "delta":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **DELTA_SIZES[size]))
    elif kind == "scan":
        attention = list(range(3, num_layers, 4))
        config = BambaConfig(**sizes, **SCAN_SIZES[size], attn_layer_indices=attention)
        model = BambaForCausalLM(config)
    else:
        layer_types = [*["conv"] * 3, "full_attention"] * (num_layers // 4)
        sizes["block_auto_adjust_ff_dim"] = False
        model = Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=layer_types))
    return model.float().eval()


class Side:
    """A target, and the sequences that it runs."""

    def __init__(self, kind: str, size: str, *, by_kernels: bool) -> None:
        model = build(kind, size)
        if by_kernels:
            self.target = PagedTarget(model, Pages(NUM_PAGES))
        else:
            with patch.object(recurrent, "kernel_mixer", lambda mixer: None):
                self.target = PagedTarget(model, Pages(NUM_PAGES))
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.parts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def open(self, key: int, token_ids: list[int]) -> Tokens:
        """A sequence whose prompt goes in next."""
        self.target.memory.open(key, token_ids, with_context=False)
        assert self.target.memory.reserve(key, len(token_ids) + 64)
        params = SamplingParams(max_tokens=64)
        return Tokens(key, params, 0, 0, frozenset(), token_ids, len(token_ids))

    def run(
        self, name: str, rows: Sequence[Row], drafts: Sequence[list[int]], num_kept: int = 0
    ) -> None:
        """One step, and what it commits."""
        plan = ForwardPlan.of_chains(list(rows), list(drafts))
        with timed_parts(self.parts[name]):
            start = perf_counter()
            self.target.forward(plan)
            for planned in plan:
                self.target.keep(planned, range(num_kept))
            self.seconds[name].append(perf_counter() - start)
        for row, drafted in zip(rows, drafts, strict=True):
            row.sequence.num_cached += len(row.new_ids) + num_kept
            row.sequence.token_ids += drafted[:num_kept]


@contextmanager
def timed_parts(into: dict[str, list[float]]) -> Iterator[None]:
    """Note the seconds of each part of a step."""
    totals = dict.fromkeys(PARTS, 0.0)
    reals = {part: getattr(*place) for part, place in PARTS.items()}

    def wrap(part: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = reals[part](*args, **kwargs)
            totals[part] += perf_counter() - start
            return result

        return timed

    for part, (cls, name) in PARTS.items():
        setattr(cls, name, wrap(part))
    try:
        yield
    finally:
        for part, (cls, name) in PARTS.items():
            setattr(cls, name, reals[part])
            into[part].append(totals[part])


def one_round(side: Side, prompt: list[int], num_steps: int) -> None:
    """What is timed, once or a few times each."""
    sequence = side.open(0, list(prompt))
    side.run("prompt", [Row(sequence, list(prompt), 0)], [[]])
    for token in range(num_steps):
        sequence.token_ids.append(token)
        side.run("one token", [Row(sequence, [token], 0)], [[]])
    for token in range(num_steps // 2):
        sequence.token_ids.append(token)
        row = Row(sequence, [token], NUM_DRAFTS)
        side.run("1 + 15 tokens, 7 kept", [row], [prompt[:NUM_DRAFTS]], NUM_KEPT)
    side.target.close(0)
    many = [side.open(key, prompt[key : key + 8]) for key in range(MANY)]
    side.run("eight short prompts", [Row(one, list(one.token_ids), 0) for one in many], [[]] * MANY)
    for token in range(num_steps // 2):
        for one in many:
            one.token_ids.append(token)
        side.run("eight sequences", [Row(one, [token], 0) for one in many], [[]] * MANY)
    for key in range(MANY):
        side.target.close(key)


@torch.inference_mode()
def by_transformers(
    model: PreTrainedModel, prompt: list[int], num_steps: int, into: dict[str, list[float]]
) -> None:
    """The prompt and steps of one token, as `generate` calls the model."""
    cache = DynamicCache(config=model.config)
    for name, token_ids in [("prompt", prompt), *(("one token", [t]) for t in range(num_steps))]:
        start = perf_counter()
        model(
            input_ids=torch.tensor([token_ids]),
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): cache},
        )
        into[name].append(perf_counter() - start)


def main() -> int:
    """Run all rounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps of one token in a round")
    args = parser.parse_args()
    sides = {
        name: Side(args.kind, args.size, by_kernels=name == "kernels")
        for name in ("torch", "kernels")
    }
    stock, stock_seconds = build(args.kind, args.size), defaultdict[str, list[float]](list)
    vocab_size = SIZES[args.size]["vocab_size"]
    generator = torch.Generator().manual_seed(1)
    for round_number in range(args.rounds + 1):
        prompt = torch.randint(vocab_size, (PROMPT,), generator=generator).tolist()
        by_transformers(stock, prompt, args.steps, stock_seconds)
        if not round_number:
            stock_seconds.clear()
        for side in sides.values():
            one_round(side, prompt, args.steps)
            if not round_number:  # memory is touched for the first time
                side.seconds.clear()
                side.parts.clear()
    found = {
        name: {
            "milliseconds": _medians(side.seconds),
            "of which": {step: _medians(parts) for step, parts in side.parts.items()},
        }
        for name, side in sides.items()
    }
    ratios = {
        step: round(median(seconds) / median(sides["kernels"].seconds[step]), 2)
        for step, seconds in sides["torch"].seconds.items()
    }
    print(
        json.dumps(
            {
                "kind": args.kind,
                "size": SIZES[args.size],
                "num_threads": torch.get_num_threads(),
                "sides": found,
                "torch over kernels": ratios,
                "transformers, milliseconds": _medians(stock_seconds),
                "environment": describe_environment(),
            },
            indent=1,
        )
    )
    return 0


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(1000 * median(values), 2) for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
