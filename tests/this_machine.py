"""What a machine is like on which tests ran, in a line. Loads no model library."""

from pathlib import Path

from blockdraft.core.machine import num_cpus

SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
"""Sets of instructions by which kernels and libraries choose."""
CPU = Path("/proc/cpuinfo")


def described_machine() -> str:
    """Number of cores, and of the first: maker, name, family, model, and sets of instructions."""
    text = CPU.read_text(encoding="utf-8") if CPU.exists() else ""
    pairs = (line.partition(":") for line in reversed(text.splitlines()))
    core = {name.strip(): value.strip() for name, _, value in pairs}
    known = ("vendor_id", "model name", "cpu family", "model")
    flags = core.get("flags", "").split()
    found = [core[name] for name in known if name in core] + [
        name for name in SETS if name in flags
    ]
    return f"tested on {num_cpus()} cores: {' '.join(found) or 'of an unknown kind'}"
