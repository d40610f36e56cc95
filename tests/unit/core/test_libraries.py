"""What other people's libraries read from the environment."""

import os
import subprocess
import sys

import pytest

from blockdraft.core import libraries
from blockdraft.core.libraries import keep_rows_invariant, use_matrix_registers

NAMES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
INTEL, AMD = "x86_64\nmodel name : Intel(R) Xeon(R)", "x86_64\nmodel name : AMD EPYC"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_chosen", set())
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        del os.environ[name]


def on(monkeypatch: pytest.MonkeyPatch, cpu: str) -> list[str | None]:
    monkeypatch.setattr(libraries, "cpu_features", lambda: cpu)
    keep_rows_invariant()
    return [os.environ.get(name) for name in NAMES]


def test_intel_s_libraries_are_told_and_no_others(monkeypatch):
    assert on(monkeypatch, AMD) == [None, None]
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", "AVX512_CORE_BF16"]


def test_training_takes_matrix_registers(monkeypatch):
    on(monkeypatch, INTEL)
    use_matrix_registers()
    assert [os.environ.get(name) for name in NAMES] == ["AUTO,STRICT", None]
    use_matrix_registers()


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", "AVX2"]
    use_matrix_registers()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_also_by_its_old_name(monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", None]


@pytest.mark.skipif(sys.platform != "linux", reason="no other system names its CPU there")
def test_importing_the_package_tells_them():
    script = (
        "import blockdraft, os; from blockdraft.core.machine import cpu_features; "
        f"print('Intel' in cpu_features(), [name in os.environ for name in {NAMES}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in ("True [True, True]", "False [False, False]")


def test_rows_of_torch_s_products_keep_their_bits():
    """On every machine, with the multiples that are promised."""
    script = """
import blockdraft, torch
from blockdraft.kernels.torch.rules import ROW_RULES
torch.manual_seed(0)
for dtype, rule in ROW_RULES.items():
    for inputs, outputs in ((64, 256), (576, 1536), (1536, 576)):
        weight = torch.randn(outputs, inputs).to(dtype)
        rows = torch.randn(min(64, rule.max_rows), inputs).to(dtype)
        whole = torch.nn.functional.linear(rows, weight)
        for num in range(rule.row_multiple, len(rows), rule.row_multiple):
            own = torch.nn.functional.linear(rows[:num], weight)
            assert torch.equal(own, whole[:num]), (dtype, inputs, outputs, num)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
