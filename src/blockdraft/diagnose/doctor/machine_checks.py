"""Whether there is enough machine for the pair, and whether it is free."""

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from blockdraft.core import machine
from blockdraft.core.config import LLMConfig
from blockdraft.core.words import counted
from blockdraft.diagnose.doctor.check import Check
from blockdraft.diagnose.doctor.pair import Pair
from blockdraft.kernels.backends import (
    backend_for,
    card_kernels,
    card_remedy,
    describe_cards,
    in_hardware,
    kernels_state,
)
from blockdraft.models.supported import head_dims_of

GIB = 2**30
BUSY = 0.3
"""Cores that others may keep busy without being mentioned."""


def threads_check(config: LLMConfig) -> Check:
    """Threads against the cores that the scheduler gives this process."""
    name, cores = "threads", machine.num_cpus()
    threads = _num_threads(config)
    found = f"{counted(threads, 'thread')}, {counted(cores, 'core')}" + _quota(cores)
    if threads <= cores // 3 and config.num_threads is None:
        remedy = "give --threads, or unset OMP_NUM_THREADS"
        return Check(name, "warning", found, remedy)
    return Check(name, "ok", found)


def _num_threads(config: LLMConfig) -> int:
    """As LLM sets them."""
    return config.num_threads or min(torch.get_num_threads(), machine.num_cpus())


def _quota(cores: int) -> str:
    of_machine = os.cpu_count() or cores
    return f" of the machine's {of_machine} (container or affinity)" if cores < of_machine else ""


def busy_check(config: LLMConfig, busy: float | None) -> Check:
    """Cores that other programs use while this one waits."""
    name, cores = "other programs", machine.num_cpus()
    if busy is None:
        return Check(name, "unknown", "the system does not say what else is running")
    found = f"{busy:.1f} of {counted(cores, 'core')} busy"
    left = max(1, round(cores - busy))
    if busy > BUSY and _num_threads(config) > cores - busy:
        fewer = f", or give --threads {left}" if _num_threads(config) > left else ""
        remedy = f"end them{fewer}; speed suffers, acceptance does not"
        return Check(name, "warning", found, remedy)
    return Check(name, "ok", found)


def memory_check(pair: Pair) -> Check:
    """Free memory against the weights and the keys and values that were asked for."""
    name, free = "memory", _free_bytes(pair)
    if free is None:
        return Check(name, "unknown", "the system does not say how much is free")
    needed = needed_bytes(pair)
    found = f"{needed / GIB:.1f} GiB needed for weights{_kv(pair)}, {free / GIB:.1f} GiB free"
    if needed > free:
        remedy = "end other programs, lower --memory, or take a smaller target"
        return Check(name, "out", found, remedy)
    return Check(name, "ok", found)


def _kv(pair: Pair) -> str:
    return f", {pair.config.memory:g} of them for the KV cache" if pair.config.memory else ""


def needed_bytes(pair: Pair) -> float:
    """Weights of both, twice where they are packed on a CPU, and the K/V memory if it is given.

    Those that are quantized are read whole first, and freed before they are packed.
    """
    numbers = sum(int(weight.numel()) for weight in pair.target.parameters())
    if pair.shape is not None and pair.refusal is None:
        numbers += pair.shape.num_weights
    copies = 1
    # On a card a weight that is packed is the weight itself.
    if torch.device(pair.device).type == "cpu" and pair.config.quantize is None:
        copies += backend_for(pair.dtype, pair.device).packs
    kv = (pair.config.memory or 0.0) * GIB
    return float(numbers * pair.dtype.itemsize * copies) + kv


def _free_bytes(pair: Pair) -> int | None:
    if torch.device(pair.device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(pair.device)
        return int(free)
    return machine.free_memory_bytes()


def kernels_check(pair: Pair) -> Check:
    """What the steps between matrix products run on, and whether the device knows the precision."""
    name = "kernels"
    is_cpu = torch.device(pair.device).type == "cpu"
    if not in_hardware(pair.dtype, pair.device):
        device = f"this CPU ({platform.machine()})" if is_cpu else f"the GPU, {pair.device},"
        return Check(
            name,
            "warning",
            f"{device} does not multiply bfloat16 in hardware",
            "give --dtype float32, which is faster here",
        )
    if not is_cpu:
        return _card_check(pair)
    runs, why_not, remedy = kernels_state()
    if not runs:
        return Check(name, "warning", f"{why_not}: steps take longer", remedy)
    return Check(name, "ok", "compiled for this CPU")


def _card_check(pair: Pair) -> Check:
    """Which card, which kernels, and what left Triton's out."""
    head_dims = head_dims_of(pair.target_config)
    card = describe_cards(pair.dtype, [pair.device], head_dims)
    runs, why_not = card_kernels(pair.dtype, pair.device, head_dims)
    where = f"on {pair.device} ({card['gpu']})"
    if not runs:
        remedy = card_remedy(pair.dtype, pair.device) or "take a target with other heads"
        found = f"torch's {where}, so steps take longer: {why_not}"
        return Check("kernels", "warning", found, remedy)
    found = f"Triton's ({card['triton']}) {where}"
    if pair.config.kv_cache_dtype == "int8":
        found += "; attention by torch, as they read no keys and values in int8"
        return Check(
            "kernels", "warning", found, "leave out --kv-cache-dtype int8 if memory allows"
        )
    if pair.config.quantize is not None:
        found += f"; products by torch, as they know no weights in {pair.config.quantize}"
        return Check("kernels", "warning", found, "leave out --quantize if memory allows")
    return Check("kernels", "ok", found)


def graphs_check(graphs: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Whether a card replays the forwards of few rows; no line without a card or its kernels."""
    if not graphs:
        return []
    failed = {name: own["why_not"] for name, own in graphs.items() if own["why_not"]}
    if failed:
        found = "; ".join(f"none of the {name}: {reason}" for name, reason in failed.items())
        remedy = "some models cannot have them, such as those with experts; speed suffers"
        return [Check("CUDA graphs", "warning", found, remedy)]
    used = (
        f"of the {name} for {', '.join(map(str, own['rows'])) or 'no'} rows"
        for name, own in graphs.items()
    )
    return [Check("CUDA graphs", "ok", "; ".join(used))]
