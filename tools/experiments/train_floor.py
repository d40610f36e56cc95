"""A training step of the default drafter against this machine's arithmetic rate.

    python tools/experiments/train_floor.py [--run recipes/smollm2-135m/train.toml] [--steps 5]
        [key=value ...]

The floor of a step is its floating-point operations over the rate of matrix products, the best of
those that the step makes and a large square one. Operations are counted by torch while a step runs:
matrix products, and attention by the scores that it makes, masked ones included. What the backward
of attention computes a second time to save memory is not counted, since it is not needed. The parts
of a step are timed apart: the target's forward, forward and backward of the drafter with the head,
the update. Medians. Prints one JSON object.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from blockdraft.data.dataset import count_answer_tokens
from blockdraft.hub.resolve import resolve_model
from blockdraft.measure.provenance import describe_environment
from blockdraft.models.target.loading import load_target_model, resolve_device, resolve_dtype
from blockdraft.train.batches import Batches
from blockdraft.train.config import TrainConfig
from blockdraft.train.config_file import read_run
from blockdraft.train.features import FrozenTarget
from blockdraft.train.kinds.table import load_trained
from blockdraft.train.loss import PartialVocabulary
from blockdraft.train.optimizer import DraftOptimizer
from blockdraft.train.prepare import read_data
from blockdraft.train.step import Part, StepStats, accumulate_gradients, num_possible_slots

RATE_SECONDS = 1.0
"""Spent on each shape."""
MIN_PRODUCTS = 5
SQUARE = 2048


class Step:
    """A step of a run in its three parts, each a call of its own."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        examples, held_out = read_data(config)
        loaded = load_target_model(
            config.target, resolve_dtype(config.dtype, config.device), config.device
        )
        self.drafter = load_trained(config, loaded, [*examples, *held_out])
        self.target = FrozenTarget(loaded, self.drafter.feature_layers)
        self.vocabulary = PartialVocabulary(
            self.target.lm_head_weight,
            count_answer_tokens(examples),
            config.num_frequent,
            config.num_random,
        )
        self.optimizer = DraftOptimizer(self.drafter.model, config)
        self._batches = Batches(examples, config)

    def draw(self) -> Part:
        """The next batch of the run."""
        return self._batches.draw(self.drafter, self.vocabulary)

    def states(self, drawn: Part) -> torch.Tensor:
        """The target's forward."""
        return self.target.states(drawn.batch.token_ids)

    def gradients(self, drawn: Part, states: torch.Tensor) -> StepStats:
        """Forward and backward of the drafter, and the head."""
        slots = num_possible_slots(drawn.anchors, self.drafter.num_slots)
        scale = 1.0 / max(1, slots)
        num_groups = drawn.anchors.num_groups(self.config.anchors_per_forward)
        stats = accumulate_gradients(
            self.drafter, self.target, drawn, states, self.config, scale, num_groups
        )
        self.optimizer.collect()
        return stats

    def update(self) -> None:
        """The optimizer."""
        self.optimizer.step(0.5)


def attention_flops(q: Any, k: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Scores and their sum over the values: [b, h, q, d] against keys."""
    b, heads, queries, head_dim = q
    return int(4 * b * heads * queries * k[2] * head_dim)


def attention_gradient_flops(
    grad: Any, q: Any, k: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Two products for each of the two of the forward."""
    return 2 * attention_flops(q, k)


def counted(work: Callable[[], Any]) -> tuple[Any, int]:
    """(result, floating-point operations)."""
    aten: Any = torch.ops.aten
    # Torch has formulas for the kernels of GPUs only.
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_gradient_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        result = work()
    return result, counter.get_total_flops()


def timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """(result, seconds)."""
    _finish(device)
    start = perf_counter()
    result = work()
    _finish(device)
    return result, perf_counter() - start


def _finish(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def parts_of_step(
    step: Step, drawn: Part, do: Callable[[Callable[[], Any]], tuple[Any, float]]
) -> dict[str, float]:
    """What `do` says of each part of a step."""
    states, of_target = do(lambda: step.states(drawn))
    stats, of_drafter = do(lambda: step.gradients(drawn, states))
    _, of_update = do(step.update)
    return {
        "target": of_target,
        "drafter and head": of_drafter,
        "update": of_update,
        "slots": stats.num_slots,
        "sequences": len(drawn.batch.token_ids),
    }


def product_rates(step: Step, v: int) -> dict[str, float]:
    """Floating-point operations a second of matrix products, by shape; `v` rows of the head."""
    config, shape = step.config, step.drafter.describe()
    rows = config.batch_sequences * config.anchors_per_forward * config.block_size
    d = shape["hidden_size"]
    shapes = [(rows, d, shape["intermediate_size"]), (rows, d, v), (SQUARE, SQUARE, SQUARE)]
    return {" x ".join(map(str, sizes)): _rate(sizes, config) for sizes in shapes}


def _rate(sizes: tuple[int, int, int], config: TrainConfig) -> float:
    m, k, n = sizes
    dtype = resolve_dtype(config.dtype, config.device)
    left = torch.ones(m, k, dtype=dtype, device=config.device)
    right = torch.ones(n, k, dtype=dtype, device=config.device).T
    start, times = perf_counter(), [timed(lambda: left @ right, config.device)[1]]
    while len(times) < MIN_PRODUCTS or perf_counter() - start < RATE_SECONDS:
        times.append(timed(lambda: left @ right, config.device)[1])
    return 2 * m * k * n / min(times)


def measure(step: Step, num_steps: int) -> dict[str, Any]:
    """Operations, seconds and shares; medians over steps."""
    first, *drawn = [step.draw() for _ in range(1 + num_steps)]
    parts_of_step(step, first, counted)  # it sets up much
    flops = [parts_of_step(step, part, counted) for part in drawn]

    def timing(work: Callable[[], Any]) -> tuple[Any, float]:
        return timed(work, step.config.device)

    # The same batches in the same order, so that counts and times belong together.
    seconds = [parts_of_step(step, part, timing) for part in drawn]
    rates = product_rates(step, len(first.vocabulary.head))
    best = max(rates.values())
    names = ["target", "drafter and head", "update"]
    if step.config.feature_cache is not None:
        names.remove("target")
    parts = {name: _share([row[name] for row in flops], seconds, name, best) for name in names}
    totals = [sum(row[name] for name in names) for row in flops]
    times = [sum(row[name] for name in names) for row in seconds]
    return {
        "flops_per_second_by_shape": rates,
        "step": {
            "flops": median(totals),
            "seconds": median(times),
            "floor_seconds": median(totals) / best,
            "share_of_floor": median(t / best / s for t, s in zip(totals, times, strict=True)),
        },
        "parts": parts,
        "slots_per_second": median(
            row["slots"] / time for row, time in zip(seconds, times, strict=True)
        ),
        "sequences_per_second": median(
            row["sequences"] / time for row, time in zip(seconds, times, strict=True)
        ),
    }


def _share(
    flops: list[float], seconds: list[dict[str, float]], name: str, rate: float
) -> Mapping[str, float]:
    times = [row[name] for row in seconds]
    return {
        "flops": median(flops),
        "seconds": median(times),
        "share_of_floor": median(f / rate / s for f, s in zip(flops, times, strict=True)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("recipes/smollm2-135m/train.toml"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="win over the file")
    args = parser.parse_args()
    config = read_run(args.run, args.settings).train
    config = dataclasses.replace(
        config, target=resolve_model(str(config.target)), device=resolve_device(config.device)
    )
    if config.init_from is not None and not config.init_from.is_dir():
        config = dataclasses.replace(config, init_from=resolve_model(str(config.init_from)))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    step = Step(config)
    report = describe_environment() | {
        "threads": torch.get_num_threads(),
        "config": config.to_dict(),
        "steps": args.steps,
        **measure(step, args.steps),
    }
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
