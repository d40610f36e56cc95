"""What a person meets first: `import blockdraft` is quick and its public names are in order."""

import subprocess
import sys

import pytest

import blockdraft

LIGHT_MODULES = [
    "blockdraft",
    "blockdraft.bench.config",
    "blockdraft.bench.workload",
    "blockdraft.cache.memory",
    "blockdraft.cache.pages",
    "blockdraft.core.config",
    "blockdraft.measure.identity",
    "blockdraft.measure.provenance",
    "blockdraft.core.errors",
    "blockdraft.core.grammar",
    "blockdraft.core.receipt",
    "blockdraft.core.request",
    "blockdraft.core.sequence",
    "blockdraft.engine.fair_queue",
    "blockdraft.measure.step_report",
    "blockdraft.hub.cache_dir",
    "blockdraft.hub.catalog",
    "blockdraft.hub.resolve",
    "blockdraft.hub.wheel",
    "blockdraft.proof.config",
    "blockdraft.proof.corpus",
    "blockdraft.proof.page",
    "blockdraft.proof.replay",
    "blockdraft.proof.summary",
    "blockdraft.report.render",
    "blockdraft.server.config",
    "blockdraft.server.errors",
    "blockdraft.server.guard",
    "blockdraft.server.params",
    "blockdraft.server.protocol",
    "blockdraft.server.responses",
    "blockdraft.server.web",
    "blockdraft.text.reasoning",
]


PLANNERS = ["blockdraft.allocation.best_rate", "blockdraft.engine.scheduler"]
"""What decides who runs, and how much is drafted: arithmetic, and no tensors."""


@pytest.mark.parametrize("module", [*LIGHT_MODULES, *PLANNERS])
def test_importing_loads_no_heavy_library(module):
    heavy = {"torch", "transformers", "huggingface_hub"}
    if module not in PLANNERS:
        heavy.add("numpy")
    program = f"import sys, {module}\nprint(*sorted({heavy} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""


def test_public_names_are_sorted_and_exist():
    names = getattr(blockdraft, "__all__", [])
    assert list(names) == sorted(set(names))
    missing = [name for name in names if not hasattr(blockdraft, name)]
    assert not missing


def test_public_names_are_these():
    assert blockdraft.__all__ == [
        "Audit",
        "BlockdraftError",
        "Chunk",
        "Completion",
        "ConfigError",
        "ContextTooLong",
        "DiskError",
        "DraftModel",
        "Generation",
        "Grammar",
        "LLM",
        "ModelError",
        "NetworkError",
        "Receipt",
        "RequestError",
        "SamplingParams",
    ]
    assert set(blockdraft.__all__) <= set(dir(blockdraft))
    assert not hasattr(blockdraft, "no_such_name")
