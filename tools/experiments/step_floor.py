"""A plain and a drafted step of the default pair against this machine's memory bandwidth.

    python tools/experiments/step_floor.py [--context 512] [--steps 60]

The floor of a step is the time to read every weight once: those of the linear layers and the head,
and the keys and values of the context. Bandwidth is the best of three ways to read memory once.
Where a step's time goes is measured by wrapping whole layers, other linear layers and attention, in
steps of their own, since that takes time itself; the cost of the phase timer likewise, with and
without it in turns. Medians. Prints one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch

from blockdraft.bench.context.memory import kv_bytes_per_token
from blockdraft.core.request import SamplingParams
from blockdraft.kernels.cpu.layer import NativeLayer, NativeStack
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.onednn import OneDnnLinear
from blockdraft.kernels.cpu.products import LOWER_HALF, PackedProduct
from blockdraft.llm import LLM
from blockdraft.measure.phases import PhaseTimer
from blockdraft.measure.provenance import describe_environment
from blockdraft.models.attention.plan import AttentionPlan

READ_BYTES = 2**29
"""Far more than any cache holds."""
TURN = 10
"""Steps with the timer, then without, and so on."""
PARTS: dict[str, list[tuple[type, str]]] = {
    "whole layers": [(NativeLayer, "__call__"), (NativeStack, "__call__")],
    "linear layers outside of them, and head": [
        (PackedProduct, "__call__"),
        (OneDnnLinear, "__call__"),
    ],
    "attention outside of them": [(AttentionPlan, "attend")],
}
"""Methods that do not call each other."""


def bandwidth(repeats: int = 15) -> dict[str, float]:
    """Bytes per second of ways to read memory once, medians."""
    floats = torch.ones(READ_BYTES // 4)
    matrix = torch.ones(READ_BYTES // 4 // 1024, 1024)
    vector = torch.ones(1024)
    ways: dict[str, Callable[[], object]] = {
        "sum": floats.sum,
        "largest": floats.max,
        "matrix times vector": lambda: matrix @ vector,
    }
    return {name: READ_BYTES / median(seconds(way, repeats)) for name, way in ways.items()}


def seconds(function: Callable[[], object], repeats: int) -> list[float]:
    """Of each call, after one that is not counted."""
    function()
    measured = []
    for _ in range(repeats):
        start = perf_counter()
        function()
        measured.append(perf_counter() - start)
    return measured


@contextmanager
def timed_calls(cls: type, name: str, into: dict[str, float], part: str) -> Iterator[None]:
    """Add the seconds of each call of a method to `into[part]`."""
    method = getattr(cls, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = method(*args, **kwargs)
        into[part] += perf_counter() - start
        return result

    setattr(cls, name, timed)
    try:
        yield
    finally:
        setattr(cls, name, method)


def parts_of_step(step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Milliseconds in each of `PARTS` and in all else; medians over steps."""
    measured: dict[str, list[float]] = {}
    for _ in range(repeats):
        spent = dict.fromkeys(PARTS, 0.0)
        with ExitStack() as wrapped:
            for name, methods in PARTS.items():
                for cls, method in methods:
                    wrapped.enter_context(timed_calls(cls, method, spent, name))
            start = perf_counter()
            step()
            total = perf_counter() - start
        for name, value in (spent | {"all else": total - sum(spent.values())}).items():
            measured.setdefault(name, []).append(1000 * value)
    return {name: median(values) for name, values in measured.items()}


def timer_cost(llm: LLM, step: Callable[[], object], turns: int) -> dict[str, float]:
    """Milliseconds of a step with work counted and without, in turns."""
    measured: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(turns):
        for name, timer in (("off", PhaseTimer(measures=False)), ("on", PhaseTimer())):
            llm.engine.timer = timer
            measured[name] += seconds(step, TURN)
    llm.engine.timer = PhaseTimer(measures=False)
    return {name: 1000 * median(values) for name, values in measured.items()}


def begin(llm: LLM, context: int, num_steps: int, *, drafted: bool) -> Callable[[], object]:
    """A request that is past its prompt; each call advances it by a step."""
    llm.use_fixed_drafting(None if drafted else 0)
    params = SamplingParams(
        max_tokens=num_steps * (1 + llm.engine.drafter.max_nodes),
        ignore_eos=True,
        num_draft_tokens=None if drafted else 0,
    )
    llm.engine.add([i % 1000 + 1000 for i in range(context)], params)
    while not llm.engine.step()[0].token_ids:
        pass
    return llm.engine.step


def weight_bytes(llm: LLM) -> int:
    """Of everything that a step of the target multiplies with."""
    model: Any = llm.engine.target.model  # type: ignore[attr-defined]
    weights = [module.weight for module in model.model.modules() if hasattr(module, "in_features")]
    return sum(map(read_bytes, [*weights, model.get_output_embeddings().weight]))


def read_bytes(weight: torch.Tensor) -> int:
    """That kernels read of it: half of float32 that fits bfloat16, where they hold it so."""
    kernels = library()
    if weight.dtype != torch.float32 or kernels is None or not kernels.reads_narrow():
        return weight.nbytes
    is_narrow = not (weight.detach().view(torch.int32) & LOWER_HALF).any()
    return weight.nbytes // 2 if is_narrow else weight.nbytes


def measure(drafted: bool, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One kind of step."""
    llm = LLM(adaptive=False)
    step = begin(llm, args.context, 20 * args.steps, drafted=drafted)
    whole = median(seconds(step, args.steps))
    per_token = kv_bytes_per_token(llm)
    num_bytes = weight_bytes(llm) + args.context * per_token.target
    return {
        "step_ms": 1000 * whole,
        "bytes_of_target": num_bytes,
        "floor_ms": 1000 * num_bytes / rate,
        "share_of_floor": num_bytes / rate / whole,
        "parts_ms": parts_of_step(step, args.steps),
        "phase_timer_ms": timer_cost(llm, step, max(1, args.steps // TURN)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    rates = bandwidth()
    report = describe_environment() | {
        "threads": torch.get_num_threads(),
        "bytes_per_second": rates,
        "plain": measure(False, args, max(rates.values())),
        "drafted": measure(True, args, max(rates.values())),
    }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
