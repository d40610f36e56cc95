"""Compiles the Triton kernels for a card that need not be there.

`compile_triton.py CAPABILITY BYTES`, of shared memory that a program may have there. Writes a line
for each: name, precision, bytes that it takes, and bytes of each thread that its registers do not
hold. Kernels of which several have the same bits sum in the same layout, or it fails.
"""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blockdraft.kernels.cuda.ops import GATE_VALUES, LEAST_TILES, MAX_PARTS, attention_options
from blockdraft.kernels.cuda.source.attention import attention_kernel, merge_kernel
from blockdraft.kernels.cuda.source.linear import linear_kernel
from blockdraft.kernels.cuda.source.rows import gate_kernel, norm_kernel, rotation_kernel
from blockdraft.kernels.cuda.tiles import BY_ROWS, ONE, SHORT, Tile
from blockdraft.kernels.interface import TILE

TABLES = {"rows", "ranges", "page_ids", "path_slots"}
WHOLE = {"num_rows", "query_row_step", "query_head_step", "num_slots", "bias_row_step"}
REAL = {"eps", "query_eps", "key_eps", "scale", "softcap"}
WIDE = {"bias", "sinks", "tops", "totals", "part_sums"}
HEADS = {
    "GROUP": 3,
    "FILLED_GROUP": 16,
    "HEAD_DIM": 128,
    "FILLED_DIM": 128,
    "TILE": TILE,
    "LEAST_TILES": LEAST_TILES,
    "MAX_PARTS": MAX_PARTS,
    "HAS_SINKS": True,
}
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
    "attention_kernel": HEADS | {"HAS_PAGES": True, "HAS_BIAS": False, "HAS_SOFTCAP": True},
    "merge_kernel": HEADS,
}
KERNELS = (
    linear_kernel,
    norm_kernel,
    rotation_kernel,
    gate_kernel,
    attention_kernel,
    merge_kernel,
)


def compile_for(capability: int, shared: int) -> None:
    """All kernels in both precisions, as `ops` asks for them."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for kernel in KERNELS:
            layouts: dict[int, set[str]] = {}
            for sizes, options in _forms(kernel.fn.__name__, dtype, shared):
                compiled = _compile(kernel, name, sizes, options, capability)
                if kernel is attention_kernel and sizes["HAS_PAGES"]:
                    own = _layouts_of_sums(compiled.asm["ttgir"])
                    assert own, "no sum was found"
                    known = layouts.setdefault(sizes["HEAD_DIM"], own)
                    assert own == known, f"few rows and many sum differently: {own ^ known}"


def _forms(
    kind: str, dtype: torch.dtype, shared: int
) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Constants and options of each form that a kernel has."""
    sizes: dict[str, Any] = SIZES[kind] | {"INTERPRETED": False}
    if kind == "linear_kernel":
        own = [
            (tile.within(shared, dtype.itemsize), num_inputs)
            for _, tiles in BY_ROWS.get(dtype, ())
            for tile in tiles
            for num_inputs in (2048, 2048 + SHORT)
        ]
        return [_of_tile(tile, sizes, num_inputs) for tile, num_inputs in [*own, (ONE[dtype], 576)]]
    if kind == "attention_kernel":
        beside = {"HAS_PAGES": False, "HAS_BIAS": True, "IS_SPLIT": False}
        forms = [{"IS_SPLIT": True}, {"IS_SPLIT": False}, beside]
        for head_dim in (64, 256):
            heads = {"HEAD_DIM": head_dim, "FILLED_DIM": head_dim, "HAS_SOFTCAP": False}
            forms += [heads | {"IS_SPLIT": is_split} for is_split in (True, False)]
        own_sizes = [sizes | own for own in forms]
        return [(own, attention_options(dtype, own["HEAD_DIM"])) for own in own_sizes]
    return [(sizes, {})]


def _of_tile(
    tile: Tile, sizes: dict[str, Any], num_inputs: int
) -> tuple[dict[str, Any], dict[str, int]]:
    inputs = tile.inputs if num_inputs % tile.inputs == 0 else SHORT
    own = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INPUTS": inputs}
    own |= {"OUTPUTS_FIRST": tile.outputs_first, "NUM_INPUTS": num_inputs}
    return sizes | own, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _compile(
    kernel: Any, name: str, sizes: dict[str, Any], options: dict[str, int], capability: int
) -> Any:
    kind = kernel.fn.__name__
    types = {
        own: _type(kind, own, name) if own not in sizes else "constexpr" for own in kernel.arg_names
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
        options={"enable_fp_fusion": False} | options,
    )
    spilled = _spilled_bytes(compiled.asm["cubin"])
    sys.stdout.write(f"compiled {kind} {name} {compiled.metadata.shared} {spilled}\n")
    return compiled


def _spilled_bytes(cubin: bytes) -> int:
    """Of a thread, by the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1])


def _layouts_of_sums(code: str) -> set[str]:
    """How the values of products and of sums along a tile lie in threads, in Triton's own code."""
    names = dict(re.findall(r"^(#\w+) = (#ttg[^\n]*)", code, re.MULTILINE))
    found = re.findall(r"tt\.dot .* -> (tensor<.*>)|\}\) : \((tensor<\d+x\d+x.*>)\) ->", code)
    return {
        re.sub(r"#\w+", lambda name: names.get(name[0], name[0]), product or total)
        for product, total in found
    }


def _type(kind: str, name: str, dtype: str) -> str:
    if name in WHOLE:
        return "i32"
    if name in REAL:
        return "fp32"
    if name in TABLES:
        return "*i64"
    is_wide = name in WIDE and kind in ("attention_kernel", "merge_kernel")
    return "*fp32" if is_wide else f"*{dtype}"


if __name__ == "__main__":
    compile_for(int(sys.argv[1]), int(sys.argv[2]))
