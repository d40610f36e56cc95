"""Compiles the Triton kernels for a card that need not be there: `compile_triton.py CAPABILITY`.

Writes a line for each: name, precision, bytes of shared memory.
"""

import sys
from typing import Any

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blockdraft.kernels.cuda.ops import GATE_VALUES, TILES
from blockdraft.kernels.cuda.source.attention import attention_kernel
from blockdraft.kernels.cuda.source.linear import linear_kernel
from blockdraft.kernels.cuda.source.rows import gate_kernel, norm_kernel, rotation_kernel
from blockdraft.kernels.interface import TILE

TABLES = {"rows", "ranges", "page_ids", "path_slots"}
WHOLE = {"num_rows", "query_row_step", "query_head_step", "num_slots", "bias_row_step"}
REAL = {"eps", "query_eps", "key_eps", "scale", "softcap"}
WIDE = {"bias", "sinks"}
SIZES: dict[str, dict[str, Any]] = {
    "linear_kernel": {"NUM_OUTPUTS": 960, "NUM_INPUTS": 576, "HAS_BIAS": True},
    "norm_kernel": {"SIZE": 576, "FILLED": 1024, "HAS_RESIDUAL": True, "ROUNDS_FIRST": True},
    "rotation_kernel": {
        "NUM_HEADS": 15,
        "NUM_QUERIES": 9,
        "NUM_TURNED": 12,
        "HEAD_DIM": 64,
        "FILLED": 64,
        "HAS_NORMS": True,
        "ROUNDS_FIRST": True,
    },
    "gate_kernel": {"SIZE": 1536, "VALUES": GATE_VALUES},
    "attention_kernel": {
        "GROUP": 3,
        "FILLED_GROUP": 16,
        "HEAD_DIM": 128,
        "FILLED_DIM": 128,
        "TILE": TILE,
        "HAS_PAGES": True,
        "HAS_BIAS": False,
        "HAS_SOFTCAP": True,
        "HAS_SINKS": True,
    },
}
KERNELS = (linear_kernel, norm_kernel, rotation_kernel, gate_kernel, attention_kernel)


def compile_for(capability: int) -> None:
    """All kernels in both precisions, as `ops` asks for them."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        tile = TILES[dtype]
        for kernel in KERNELS:
            kind = kernel.fn.__name__
            sizes = SIZES[kind] | {"INTERPRETED": False}
            if kind == "linear_kernel":
                sizes |= {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs}
            types = {
                own: _type(kind, own, name) if own not in sizes else "constexpr"
                for own in kernel.arg_names
            }
            for param in kernel.params:
                if types[param.name] == "i32" or param.name in TABLES | {"sinks"}:
                    # Else a number of rows, or where a table begins, would choose the binary.
                    assert param.do_not_specialize, (kind, param.name)
            places = {own: place for place, own in enumerate(kernel.arg_names)}
            source = ASTSource(
                kernel,
                signature=types,
                constexprs={(places[own],): value for own, value in sizes.items()},
                attrs={
                    (places[own],): [["tt.divisibility", 16]]
                    for own, kept in types.items()
                    if kept == f"*{name}"
                },
            )
            compiled = compile_kernel(
                source,
                target=GPUTarget("cuda", capability, 32),
                options={"enable_fp_fusion": False},
            )
            sys.stdout.write(f"compiled {kind} {name} {compiled.metadata.shared}\n")


def _type(kind: str, name: str, dtype: str) -> str:
    if name in WHOLE:
        return "i32"
    if name in REAL:
        return "fp32"
    if name in TABLES:
        return "*i64"
    return "*fp32" if kind == "attention_kernel" and name in WIDE else f"*{dtype}"


if __name__ == "__main__":
    compile_for(int(sys.argv[1]))
