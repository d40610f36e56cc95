"""What a machine is like on which tests ran, in a line. Loads no model library."""

from blockdraft.core.machine import cpu_facts, num_cpus

SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
"""Sets of instructions by which kernels and libraries choose."""


def described_machine() -> str:
    """Number of cores, and of the first: maker, name, family, model, and sets of instructions."""
    core = cpu_facts()
    known = ("vendor_id", "model name", "cpu family", "model")
    flags = core.get("flags", "").split()
    found = [core[name] for name in known if name in core]
    found += [name for name in SETS if name in flags]
    return f"tested on {num_cpus()} cores: {' '.join(found) or 'of an unknown kind'}"
