"""Machine and versions, and the ceilings that speeds are to be held against."""

import subprocess
from time import perf_counter
from typing import Any

import torch

from blockdraft.core.config import DEFAULT_TARGET
from blockdraft.measure.environment import describe_installation
from blockdraft.measure.provenance import versions
from gpucheck.clock import seconds_of, wait
from gpucheck.notes import Notes
from gpucheck.settings import Settings

OPTIONAL = ("triton", "accelerate", "gguf", "pytest")
"""Beside those that every report names; "triton" is what a card's kernels are compiled by."""
COPIED_BYTES = 2**30
MATRIX_SIZE = 8192
NUM_LAUNCHES = 2000


def run(settings: Settings, notes: Notes) -> None:
    """Note all that is known before any model runs."""
    found = describe_installation()
    for private in ("cache_folder", "environment"):
        found.pop(private, None)
    for of_cpus in ("kernels", "no_kernels_because"):  # parts run without them
        found["torch"].pop(of_cpus, None)
    found["versions"] |= versions(OPTIONAL)
    notes.note("installation", value=found)
    notes.note("pair", value="the default one" if _is_default(settings) else "another one")
    notes.note("switches", value=_switches())
    if settings.device == "cuda":
        notes.note("gpu", value=_gpu())
    notes.note("ceilings", value=_ceilings(settings))


def _is_default(settings: Settings) -> bool:
    return (settings.target, settings.drafter) == (DEFAULT_TARGET, "auto")


def _switches() -> dict[str, Any]:
    """What torch is allowed to round away."""
    matmul = torch.backends.cuda.matmul
    return {
        "tf32": matmul.allow_tf32,
        "bfloat16 reduced sums": matmul.allow_bf16_reduced_precision_reduction,
        "float16 reduced sums": matmul.allow_fp16_reduced_precision_reduction,
        "float32 precision": torch.get_float32_matmul_precision(),
    }


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory GiB": round(total / 2**30, 1),
        "free GiB": round(free / 2**30, 1),
        "driver": _driver(),
    }


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip().split("\n")[0]


def _ceilings(settings: Settings) -> dict[str, float]:
    """Bandwidth, operations, and what a launch and a wait for the device take."""
    scale = 64 if settings.is_rehearsal else 1
    device = settings.device
    source = torch.ones(COPIED_BYTES // 4 // scale**2, device=device)
    target = torch.empty_like(source)
    copying = seconds_of(lambda: target.copy_(source), device)
    size = MATRIX_SIZE // scale
    matrix = torch.randn(size, size, device=device).to(torch.bfloat16)
    multiplying = seconds_of(lambda: matrix @ matrix, device)
    one = torch.zeros(1, device=device)
    number = NUM_LAUNCHES // scale
    wait(device)
    begin = perf_counter()
    for _ in range(number):
        one.add_(1)
    launched = perf_counter() - begin
    wait(device)
    executed = perf_counter() - begin
    begin = perf_counter()
    for _ in range(number):
        one.item()
    read = perf_counter() - begin
    return {
        "copy GB/s": round(2 * source.nbytes / copying / 1e9, 1),
        "bfloat16 TFLOP/s": round(2 * size**3 / multiplying / 1e12, 2),
        "launch us": round(launched / number * 1e6, 2),
        "small kernel us": round(executed / number * 1e6, 2),
        "read of one number us": round(read / number * 1e6, 2),
    }
