"""Which backend computes, by precision, device and sizes of heads. Backends are known here only."""

import logging
import os
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.cpu import ops
from blockdraft.kernels.cpu.backend import NativeBackend, cpu_backend, without_kernels
from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.library import SWITCH, library
from blockdraft.kernels.cpu.ngrams import NativeNGrams, takes_layers
from blockdraft.kernels.cpu.provenance import made_with
from blockdraft.kernels.cpu.random_words import NativeWords
from blockdraft.kernels.cuda.choice import (
    kernels_in_use,
    leave_out,
    rely_on,
    remedy,
    triton_backend,
    why_no_triton,
)
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.interface import Backend, RandomWords
from blockdraft.kernels.ngram_interface import NGramRules, NGramSearch
from blockdraft.kernels.torch.backend import TorchBackend

logger = logging.getLogger(__name__)

MULTIPLIES_BFLOAT16 = (8, 0)
"""The least compute capability of a card that does so: Ampere. torch emulates it on older ones."""


def backend_for(
    dtype: torch.dtype, device: torch.device | str, head_dims: Collection[int] = ()
) -> Backend:
    """The fastest backend for tensors of this type and device that attends over such heads."""
    kind = torch.device(device).type
    backend: Backend | None = None
    if kind == "cpu":
        backend = cpu_backend(dtype)
    elif kind == "cuda":
        backend = triton_backend(dtype, device)
    if backend is not None and all(backend.attends_over(head_dim) for head_dim in head_dims):
        return backend
    return reference_for(dtype, device)


def in_hardware(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether a device multiplies in this precision; where it emulates it, another is faster."""
    if torch.device(device).type == "cuda" and dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(device) >= MULTIPLIES_BFLOAT16
    return backend_for(dtype, device).in_hardware


def passed_load(dtype: torch.dtype, device: torch.device | str | None) -> None:
    """A model in this precision has passed the check of its load: its backend stays.

    device: of the model; None for one that is spread over all.
    """
    rely_on(dtype, device)


def failed_load(dtype: torch.dtype, device: torch.device | str | None, reason: str) -> bool:
    """Choose a slower backend from now on, as a model failed; False if there is none.

    Never under a model that has passed. device: as in `passed_load`.
    """
    return leave_out(dtype, device, reason)


def card_kernels(
    dtype: torch.dtype, device: torch.device | str, head_dims: Collection[int] = ()
) -> tuple[bool, str]:
    """Whether a card runs Triton kernels for a model that attends over such heads; if not, why."""
    reason = why_no_triton(dtype, device)
    if not reason and type(backend_for(dtype, device, head_dims)) is TorchBackend:
        reason = f"no attention over heads of {', '.join(map(str, sorted(head_dims)))}, see the log"
    return not reason, reason


def card_remedy(dtype: torch.dtype, device: torch.device | str) -> str:
    """What to do about a card that runs no Triton kernels for any model; empty if it runs them."""
    return remedy(dtype, device)


def describe_cards(
    dtype: torch.dtype, devices: Collection[str], head_dims: Collection[int]
) -> dict[str, Any]:
    """Which cards compute for a model that attends over such heads, and with which kernels.

    Plain values for JSON: `gpu`, None where no device is a card, and `triton`, False for a card
    that computes with torch's operations.
    """
    cards = [device for device in devices if torch.device(device).type == "cuda"]
    if not cards:
        return {"gpu": None, "triton": None}
    kernels = {_kernels_on(dtype, card, head_dims) or "none" for card in cards}
    return {
        "gpu": "; ".join(sorted(set(map(card_in_words, cards)))),
        "triton": "; ".join(sorted(kernels)) if kernels != {"none"} else False,
    }


def _kernels_on(dtype: torch.dtype, device: str, head_dims: Collection[int]) -> str | None:
    runs, _ = card_kernels(dtype, device, head_dims)
    return kernels_in_use(dtype, device) if runs else None


def card_in_words(device: str) -> str:
    """What libraries choose kernels by; a part of a card has its name and fewer processors."""
    card = torch.cuda.get_device_properties(device)
    capability = f"compute capability {card.major}.{card.minor}"
    return f"{card.name}, {capability}, {card.multi_processor_count} processors"


def reference_for(dtype: torch.dtype, device: torch.device | str) -> Backend:
    """The backend whose operations, beside products, have the bits of the models' own."""
    is_cpu = torch.device(device).type == "cpu"
    return without_kernels(dtype) if is_cpu else TorchBackend(dtype)


def random_words() -> RandomWords | None:
    """Native random words, if there are kernels; the sampler has a slower form of its own."""
    kernels = library()
    return None if kernels is None else NativeWords(kernels)


def first_largest(scores: Tensor) -> list[int] | None:
    """Of each row of scores [rows, n] the place of the largest, the first of several.

    -1 where one is no number, or all are minus infinity. None where no kernels read them.
    """
    kernels = library()
    is_read = scores.device.type == "cpu" and scores.dtype in ops.IS_BFLOAT16
    return ops.first_largest(kernels, scores) if kernels is not None and is_read else None


def sampled(
    scores: Tensor,
    temperature: float,
    stream: NDArray[np.uint64],
    large: tuple[NDArray[np.int64], NDArray[np.float64], float],
    least_noise: float,
) -> int | None:
    """The place of the largest of scores [n] over the temperature plus the noise of a stream.

    large: the places whose noise exceeds a bound, rising, their noise, and the bound. least_noise:
    none is below. -1 as `first_largest`. None where no kernels read the scores, or where it is not
    certain.
    """
    kernels = library()
    is_read = scores.device.type == "cpu" and scores.dtype in ops.IS_BFLOAT16
    if kernels is None or not is_read:
        return None
    return ops.sampled(kernels, scores, temperature, stream, large, least_noise)


def widened(values: Tensor) -> NDArray[np.float32]:
    """The same values in float32, on the host.

    By one thread: torch wakes all of them for a row of logits, and waits for those that are busy.
    """
    kernels = library()
    if kernels is not None and values.device.type == "cpu" and values.dtype == torch.bfloat16:
        return ops.widened(kernels, values)
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found


def native_ngrams(rules: NGramRules, layers: HydraLayers | None = None) -> NGramSearch | None:
    """A native search of n-grams, if there are kernels; drafters have a slower one of their own.

    It leaves out a Hydra head whose layers others multiply with.
    """
    kernels = library()
    if kernels is None:
        return None
    if layers is not None and not takes_layers(layers):
        logger.warning("this machine's kernels do not run the Hydra head: n-grams draft without it")
        layers = None
    return NativeNGrams(kernels, rules, layers)


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


def uses_matrix_registers() -> bool:
    """Whether native products in bfloat16, those of attention too, run there: sums differ."""
    kernels = library()
    return kernels is not None and kernels.has_matrices


def describe_kernels(dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Whether native kernels run for models of this type on this device; compiler and flags if so.

    Plain values for JSON.
    """
    if not isinstance(backend_for(dtype, device), NativeBackend):
        return {"used": False, "compiler": None, "flags": None, "matrix_registers": False}
    in_matrices = dtype == torch.bfloat16 and uses_matrix_registers()
    return {"used": True, **made_with(), "matrix_registers": in_matrices}
