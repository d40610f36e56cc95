"""What libraries of other people read from the environment. Loads none of them.

On Intel's processors torch multiplies with kernels that Intel's libraries choose by the number of
rows, so that the bits of a row depend on it. docs/experiments/intel.md has the measurements.
"""

import os
import sys

from blockdraft.core.machine import cpu_vendor

_CHOICES = {
    "MKL_CBWR": "AUTO,STRICT",  # float32 and float64: every row is added up alike
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # bfloat16: not in matrix registers (AMX)
}
_OLD_NAMES = {"ONEDNN_MAX_CPU_ISA": "DNNL_MAX_CPU_ISA"}
_CHOSEN = "BLOCKDRAFT_CHOSEN"
"""Environment variable: names of those that were set here, so that a child process knows it too."""

_torch_was_first = False


def keep_rows_invariant() -> None:
    """Let torch's products give a row the same bits beside any others, as far as it can be told.

    What the user has set stays. The libraries look with their first product, so this is of no use
    afterwards.
    """
    global _torch_was_first
    if cpu_vendor() != "GenuineIntel":
        return
    _torch_was_first = "torch" in sys.modules
    for name, value in _CHOICES.items():
        if not os.environ.get(name) and not os.environ.get(_OLD_NAMES.get(name, name)):
            os.environ[name] = value
            os.environ[_CHOSEN] = " ".join([*_chosen(), name])


def may_have_come_late() -> bool:
    """Whether torch, which was there before, may have multiplied before it could be told."""
    return _torch_was_first


def let_torch_use_matrix_registers() -> None:
    """Undo it for bfloat16, for what needs speed and not the same bits: training.

    Of no use after the first product.
    """
    name = "ONEDNN_MAX_CPU_ISA"
    if name in _chosen():
        del os.environ[name]
        os.environ[_CHOSEN] = " ".join(own for own in _chosen() if own != name)


def environment_for_others() -> dict[str, str]:
    """The environment as it would be without this package: for other engines."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _chosen() and name != _CHOSEN
    }


def _chosen() -> list[str]:
    return os.environ.get(_CHOSEN, "").split()
