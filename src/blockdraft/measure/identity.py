"""What an output depends on, beside the request: hashes of models and code, and the environment.

Loads no model library by itself, but for what begins with `describe_`.
"""

import hashlib
import os
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from blockdraft.core.config import LLMConfig
from blockdraft.core.fingerprint import hash_files
from blockdraft.core.machine import cpu_features, cpu_name
from blockdraft.measure.provenance import describe_environment, versions

PACKAGE = Path(__file__).parents[1]
KERNELS = PACKAGE / "kernels"
_WEIGHTS = ("*.safetensors", "*.gguf", "config.json", "generation_config.json", "*.py")
_NATIVE = ("**/*.cpp", "**/*.h")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
_PACKAGES = ("blockdraft", "torch", "transformers", "tokenizers", "numpy", "llguidance")
_NEUTRAL = {
    # Said in another way.
    *("target", "dtype", "device", "num_threads"),
    # Of drafts, memory and time, which change no output.
    *("drafter", "draft_dtype", "adaptive", "num_draft_tokens", "draft_depth", "lookup"),
    *("shared_lookup", "ngrams", "max_concurrency", "prefill_chunk", "memory", "recheck"),
}
"""Fields of LLMConfig on which no output depends; any other one counts."""
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
"""Instructions on which speed depends, as Linux names them on x86 and Arm."""
INSTRUCTION_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
"""Environment variables by which libraries choose instructions, precisions and orders of sums."""


def hash_model(folder: Path) -> str:
    """SHA-256 over weights, configs and code of a model folder; `core.fingerprint` lists others."""
    return hash_files(folder, _WEIGHTS)


def hash_tokenizer(folder: Path) -> str:
    """SHA-256 over the files of a tokenizer."""
    return hash_files(folder, _TOKENIZER)


def hash_code() -> str:
    """SHA-256 over the Python files of this package, as they are installed."""
    return hash_files(PACKAGE, ("**/*.py",))


def hash_kernels() -> str:
    """SHA-256 over the sources of the native kernels, as they are installed."""
    return hash_files(KERNELS, _NATIVE)


def hash_text(text: str) -> str:
    """SHA-256 of a text, whatever characters it holds."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class LoadedTarget(Protocol):
    """What is asked of a target that is loaded."""

    config: LLMConfig
    folder: Path
    dtype: Any
    device: str
    num_threads: int

    @property
    def devices(self) -> Collection[str]:
        """Where its layers lie."""
        ...

    @property
    def head_dims(self) -> Collection[int]:
        """Sizes of the heads that attend."""
        ...


def describe_card(loaded: LoadedTarget) -> dict[str, Any]:
    """The card that computes and its kernels, flat; see `kernels.backends.describe_cards`."""
    from blockdraft.kernels.backends import describe_cards

    # Kernels of CPUs do not depend on heads, which some configs of a model's own hide.
    on_card = any(device.startswith("cuda") for device in loaded.devices)
    return describe_cards(loaded.dtype, loaded.devices, loaded.head_dims if on_card else ())


def describe_setting(loaded: LoadedTarget) -> dict[str, Any]:
    """What is needed to repeat a measurement or a proof, as plain values for JSON."""
    import torch

    from blockdraft.kernels.backends import describe_kernels

    return {
        **describe_environment(),
        "card": describe_card(loaded),
        "threads": torch.get_num_threads(),
        "kernels": describe_kernels(loaded.dtype, loaded.device),
        "instructions": _describe_instructions(),
        "config": asdict(loaded.config) | {"dtype": _name(loaded.dtype), "device": loaded.device},
    }


def cpu_flags() -> list[str]:
    """Of the instructions in CPU_FLAGS those that this CPU has."""
    features = set(cpu_features().split())
    return [flag for flag in CPU_FLAGS if flag in features]


def _describe_instructions() -> dict[str, Any]:
    """Processors that have one name may have other instructions."""
    variables = {name: os.environ[name] for name in INSTRUCTION_VARIABLES if name in os.environ}
    return {"cpu_flags": cpu_flags(), "variables": variables}


def describe_numbers(loaded: LoadedTarget) -> dict[str, Any]:
    """What the bits of a target's logits depend on, flat, as plain values for JSON.

    Reads all weights once: seconds for a large model. For any thread.
    """
    return {
        "weights": hash_model(loaded.folder),
        "tokenizer": hash_tokenizer(loaded.folder),
        **describe_setup(loaded),
    }


def describe_setup(loaded: LoadedTarget) -> dict[str, Any]:
    """The same but for the files of the target: settings, machine, code and versions."""
    from blockdraft.kernels.backends import describe_kernels

    kernels = describe_kernels(loaded.dtype, loaded.device)
    config = asdict(loaded.config).items()
    settings = {name: value for name, value in config if name not in _NEUTRAL}
    return {
        "dtype": _name(loaded.dtype),
        "device": loaded.device,
        **settings,
        "threads": loaded.num_threads,
        "cpu": cpu_name(),
        "cpu_features": hash_text(cpu_features())[:16],
        **{name: os.environ.get(name) for name in INSTRUCTION_VARIABLES},
        # A switch, or a check that failed, leaves Triton's kernels out.
        **describe_card(loaded),
        "kernels": hash_kernels() if kernels["used"] else None,
        "compiler": kernels["compiler"],
        "flags": kernels["flags"],
        "matrix_registers": kernels["matrix_registers"],
        "code": hash_code(),
        **versions(_PACKAGES),
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
