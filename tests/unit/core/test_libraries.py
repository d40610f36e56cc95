"""What other people's libraries read from the environment."""

import os
import subprocess
import sys

import pytest

from blockdraft.core import libraries
from blockdraft.core.libraries import (
    environment_for_others,
    keep_rows_invariant,
    let_torch_use_matrix_registers,
    may_have_come_late,
)
from blockdraft.core.machine import cpu_vendor

NAMES = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
INTEL, AMD = "GenuineIntel", "AuthenticAMD"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_torch_was_first", False)
    for name in (*NAMES, "BLOCKDRAFT_CHOSEN"):
        monkeypatch.setenv(name, "")  # so that it is put back
        del os.environ[name]


def on(monkeypatch: pytest.MonkeyPatch, vendor: str) -> list[str | None]:
    monkeypatch.setattr(libraries, "cpu_vendor", lambda: vendor)
    keep_rows_invariant()
    return [os.environ.get(name) for name in NAMES]


def test_intel_s_libraries_are_told_and_no_others(monkeypatch):
    assert on(monkeypatch, AMD) == [None, None]
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", "AVX512_CORE_BF16"]


def test_training_takes_matrix_registers(monkeypatch):
    on(monkeypatch, INTEL)
    let_torch_use_matrix_registers()
    assert [os.environ.get(name) for name in NAMES] == ["AUTO,STRICT", None]
    let_torch_use_matrix_registers()


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", "AVX2"]
    let_torch_use_matrix_registers()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_also_by_its_old_name(monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", None]


def test_empty_is_not_set(monkeypatch):
    for name in (*NAMES, "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", "AVX512_CORE_BF16"]


def test_other_engines_are_told_what_the_user_has_set_alone(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    before = dict(os.environ)
    assert on(monkeypatch, INTEL) == ["AVX2", "AVX512_CORE_BF16"]
    assert environment_for_others() == before


def test_training_in_a_child_takes_matrix_registers_too(monkeypatch):
    on(monkeypatch, INTEL)
    assert on(monkeypatch, INTEL) == ["AUTO,STRICT", "AVX512_CORE_BF16"]
    let_torch_use_matrix_registers()
    assert [os.environ.get(name) for name in NAMES] == ["AUTO,STRICT", None]


def test_torch_that_was_there_before_is_known(monkeypatch):
    on(monkeypatch, AMD)
    assert not may_have_come_late()
    on(monkeypatch, INTEL)
    assert may_have_come_late()


def test_settings_that_came_late_are_known_by_torch_s_bits():
    """What a start remembers must not be believed where the libraries did not look."""
    product = "torch.nn.functional.linear(torch.ones(2, 64), torch.ones(64, 64))"
    own = "from blockdraft.kernels.torch.rules import product_bits; print(product_bits())"
    early, again, late = (
        subprocess.run(
            [sys.executable, "-c", f"{first}; {own}"],
            env=environment_for_others(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for first in ("import blockdraft", "import torch", f"import torch; {product}")
    )
    assert early == again
    assert (early == late) == (cpu_vendor() != "GenuineIntel")


@pytest.mark.skipif(sys.platform != "linux", reason="no other system names its CPU there")
def test_importing_the_package_tells_them():
    script = (
        "import blockdraft, os; from blockdraft.core.machine import cpu_vendor; "
        f"print('GenuineIntel' == cpu_vendor(), [name in os.environ for name in {NAMES}])"
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
