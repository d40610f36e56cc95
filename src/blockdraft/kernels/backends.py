"""Which backend computes, by precision, device and sizes of heads. Backends are known here only."""

import os
from collections.abc import Collection
from typing import Any

import torch

from blockdraft.kernels.cpu.backend import NativeBackend, cpu_backend, without_kernels
from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.library import SWITCH, library
from blockdraft.kernels.cpu.provenance import made_with
from blockdraft.kernels.cpu.random_words import NativeWords
from blockdraft.kernels.interface import Backend, RandomWords
from blockdraft.kernels.torch.backend import TorchBackend


def backend_for(
    dtype: torch.dtype, device: torch.device | str, head_dims: Collection[int] = ()
) -> Backend:
    """The fastest backend for tensors of this type and device that attends over such heads."""
    if torch.device(device).type == "cpu":
        backend = cpu_backend(dtype)
        if all(backend.attends_over(head_dim) for head_dim in head_dims):
            return backend
    return reference_for(dtype, device)


def reference_for(dtype: torch.dtype, device: torch.device | str) -> Backend:
    """The backend whose operations, beside products, have the bits of the models' own."""
    is_cpu = torch.device(device).type == "cpu"
    return without_kernels(dtype) if is_cpu else TorchBackend(dtype)


def random_words() -> RandomWords | None:
    """Native random words, if there are kernels; the sampler has a slower form of its own."""
    kernels = library()
    return None if kernels is None else NativeWords(kernels)


def kernels_state() -> tuple[bool, str, str]:
    """Whether this CPU runs native kernels; if not, why, and what to do about it."""
    if os.environ.get(SWITCH, "").lower() == "off":
        return False, f"{SWITCH}=off", f"unset {SWITCH}"
    if library() is None:
        return False, "not compiled", "install a C++ compiler (g++ or clang++)"
    return True, "", ""


def kernels_digest() -> str | None:
    """Names the native kernels that are loaded: their sources, flags and CPU; None without any."""
    return None if library() is None else build().stem


def describe_kernels(dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Whether native kernels run for models of this type on this device; compiler and flags if so.

    Plain values for JSON.
    """
    if not isinstance(backend_for(dtype, device), NativeBackend):
        return {"used": False, "compiler": None, "flags": None}
    return {"used": True, **made_with()}
