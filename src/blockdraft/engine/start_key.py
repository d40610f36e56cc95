"""All that the self-tests and measurements of a start depend on; see `core.remembered`."""

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from blockdraft.core.config import LLMConfig
from blockdraft.core.fingerprint import hash_files, sample_files
from blockdraft.core.machine import cpu_features, cpu_name
from blockdraft.core.remembered import digest
from blockdraft.hub.cache_dir import cache_dir
from blockdraft.hub.model_config import load_config
from blockdraft.kernels.backends import describe_cards, kernels_digest, uses_matrix_registers
from blockdraft.kernels.torch.cards import products_on_cards
from blockdraft.kernels.torch.rules import product_bits
from blockdraft.measure.provenance import versions
from blockdraft.models.supported import head_dims_of

_PACKAGE = Path(__file__).parents[1]
_CODE = ("**/*.py", "kernels/**/*.cpp", "kernels/**/*.h")
_PACKAGES = ("blockdraft", "torch", "transformers", "tokenizers", "numpy", "safetensors", "triton")
_VARIABLES = (
    *("ATEN_", "BLOCKDRAFT_K", "BLOCKDRAFT_T", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "KMP_"),
    *("MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH", "TRITON_"),
)
"""How the names of environment variables begin that choose kernels or threads."""


def start_key(
    config: LLMConfig,
    target_folder: Path,
    drafter_folder: Path | None,
    dtype: torch.dtype,
    device: str,
) -> dict[str, Any]:
    """Plain values: weights, build, machine and settings."""
    return {
        "target": _fingerprint(target_folder),
        "drafter": None if drafter_folder is None else _fingerprint(drafter_folder),
        "code": hash_files(_PACKAGE, _CODE),
        "kernels": kernels_digest(),
        "versions": versions(_PACKAGES) | {"python": platform.python_version()},
        "machine": [cpu_name(), cpu_features(), platform.platform()],
        "card": _card(config, target_folder, dtype, device),
        "threads": torch.get_num_threads(),
        "matrix_registers": uses_matrix_registers(),
        "products_of_torch": product_bits(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)
        },
        "settings": asdict(config) | {"recheck": False, "dtype": str(dtype), "device": device},
    }


def remembered_path(key: dict[str, Any]) -> Path:
    """Where the findings of a key lie."""
    return cache_dir() / "starts" / f"{digest(key)[:24]}.json"


def _fingerprint(folder: Path) -> list[str]:
    """Of the weights, by samples, and of all that says how they are used."""
    used_by = hash_files(folder, ("*.json", "*.py"))  # code that comes with a model is run too
    return [sample_files(folder, ("*.safetensors", "*.gguf")), used_by]


def _card(
    config: LLMConfig, target_folder: Path, dtype: torch.dtype, device: str
) -> dict[str, Any] | None:
    """A card, the kernels that it computes with, and what torch's own products may do there."""
    if torch.device(device).type != "cuda":
        return None
    model = load_config(target_folder, trust_remote_code=config.trust_remote_code)
    return {
        **describe_cards(dtype, [device], head_dims_of(model)),
        "cuda": str(torch.version.cuda),
        "products": products_on_cards(),
    }
