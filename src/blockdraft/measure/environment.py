"""What a bug report needs to know of the installation and the machine. Loads torch."""

import os
import platform
import re
from typing import Any

from blockdraft.core.machine import (
    cpu_name,
    free_memory_bytes,
    memory_bytes,
    num_cpus,
)
from blockdraft.hub.cache_dir import cache_dir
from blockdraft.measure.identity import INSTRUCTION_VARIABLES, cpu_flags
from blockdraft.measure.provenance import git_commit, versions

PACKAGES = (
    *("blockdraft", "torch", "transformers", "tokenizers", "numpy", "safetensors", "llguidance"),
    *("typer", "fastapi", "uvicorn", "triton"),
)
VARIABLES = (
    *("BLOCKDRAFT_CACHE", "BLOCKDRAFT_KERNELS", "BLOCKDRAFT_KERNEL_FLAGS", "BLOCKDRAFT_REMEMBER"),
    *("BLOCKDRAFT_TRITON", "CXX"),
    *("BLOCKDRAFT_ENGINE_PYTHON", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY"),
    *("MKL_NUM_THREADS", "KMP_AFFINITY", "LD_PRELOAD", *INSTRUCTION_VARIABLES),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("TRITON_CACHE_DIR", "TRITON_INTERPRET", "CC", "PYTHONPATH"),
)
_PASSWORD = re.compile(r"//[^/@]*@")
"""User and password in a URL, as of a mirror of the hub."""
SECRETS = ("BLOCKDRAFT_API_KEY", "BLOCKDRAFT_ENDPOINT_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables of which a report says only that they are set."""


def describe_installation() -> dict[str, Any]:
    """Plain values for JSON. What cannot be found out says why, and hinders nothing else."""
    return {
        "versions": {
            **versions(PACKAGES),
            "commit": git_commit(),
            "python": platform.python_version(),
        },
        "system": platform.platform(),
        "cpu": {
            "model": cpu_name(),
            "cores": num_cpus(),
            "flags": cpu_flags(),
        },
        "memory_bytes": memory_bytes(),
        "free_memory_bytes": free_memory_bytes(),
        "torch": _describe_torch(),
        "cache_folder": str(cache_dir()),
        "environment": {
            name: _PASSWORD.sub("//...@", os.environ[name])
            for name in VARIABLES
            if name in os.environ
        }
        | {name: "(set)" for name in SECRETS if name in os.environ},
    }


def _describe_torch() -> dict[str, Any]:
    """Devices, threads and kernels. A report on a broken installation says how it is broken."""
    try:
        import torch

        from blockdraft.kernels.backends import (
            backend_for,
            card_in_words,
            describe_kernels,
            kernels_state,
        )

        _, reason, remedy = kernels_state()
        return {
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "gpus": [card_in_words(f"cuda:{index}") for index in range(torch.cuda.device_count())],
            "kernels": {
                str(dtype).removeprefix("torch."): {
                    "backend": type(backend_for(dtype, "cpu")).__name__,
                    "quantized_weights": backend_for(dtype, "cpu").multiplies_groups,
                    **describe_kernels(dtype, "cpu"),
                }
                for dtype in (torch.bfloat16, torch.float32)
            },
            "no_kernels_because": f"{reason}; {remedy}" if reason else None,
        }
    # Whatever is wrong with the libraries or the compiler belongs in the report.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
