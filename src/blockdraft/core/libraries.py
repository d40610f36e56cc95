"""What libraries of other people read from the environment. Loads none of them.

On Intel's processors torch multiplies with kernels that Intel's libraries choose by the number of
rows, so that the bits of a row depend on it. docs/experiments/intel.md has the measurements.
"""

import os

from blockdraft.core.machine import cpu_features

_CHOICES = {
    "MKL_CBWR": "AUTO,STRICT",  # float32 and float64: every row is added up alike
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # bfloat16: not in matrix registers (AMX)
}
_OLD_NAMES = {"DNNL_MAX_CPU_ISA": "ONEDNN_MAX_CPU_ISA"}
_chosen = set[str]()
"""Not by the user."""


def keep_rows_invariant() -> None:
    """Let torch's products give a row the same bits beside any others, as far as it can be told.

    What the user has set stays. The libraries look with their first product, so this is of no use
    afterwards.
    """
    if "Intel" in cpu_features():
        asked = os.environ.keys() | {_OLD_NAMES.get(name) for name in os.environ}
        _chosen.update(_CHOICES.keys() - asked)
        os.environ.update({name: _CHOICES[name] for name in _chosen})


def use_matrix_registers() -> None:
    """Undo it for bfloat16, for what needs speed and not the same bits: training.

    Of no use after the first product.
    """
    if "ONEDNN_MAX_CPU_ISA" in _chosen:
        _chosen.remove("ONEDNN_MAX_CPU_ISA")
        del os.environ["ONEDNN_MAX_CPU_ISA"]
