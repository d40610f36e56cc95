"""Which commit a result names."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockdraft.core.config import LLMConfig
from blockdraft.kernels.backends import describe_kernels
from blockdraft.measure import identity, provenance


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, check=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_another_project_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the package is installed in an environment below a checkout."""
    code = tmp_path / "provenance.py"
    code.touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert provenance.git_commit() is None
    git(tmp_path, "add", "provenance.py")
    git(tmp_path, "commit", "-q", "-m", "ours")
    commit = provenance.git_commit()
    assert commit is not None
    assert len(commit) == 12
    code.write_text("changed", encoding="utf-8")
    assert provenance.git_commit() == commit + "+"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["/a/.venv/bin/blockdraft", "bench", "demo"], "blockdraft bench demo"),
        (["/a/src/blockdraft/__main__.py", "bench", "demo"], "blockdraft bench demo"),
        (["tools/x.py", "--way", "a: b=1"], "python tools/x.py --way 'a: b=1'"),
        (["pytest", 1], "pytest 1"),
    ],
)
def test_the_command_of_a_result_can_be_given_again(command, shown):
    assert provenance.command_line(command) == shown


def test_a_setting_names_kernels_instructions_and_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of one name may have other instructions, and a switch may leave kernels out."""
    loaded = SimpleNamespace(
        config=LLMConfig(), dtype=torch.bfloat16, device="cpu", devices=["cpu"]
    )
    monkeypatch.setattr(identity, "cpu_features", lambda: "x86_64\nflags: fpu avx2 amx_bf16")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(identity, "INSTRUCTION_VARIABLES", ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR"))
    found = identity.describe_setting(loaded)
    assert found["kernels"] == describe_kernels(torch.bfloat16, "cpu")
    assert found["instructions"] == {
        "cpu_flags": ["avx2", "amx_bf16"],
        "variables": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    }
    assert found["card"] == {"gpu": None, "triton": None}
