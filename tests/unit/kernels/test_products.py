"""Products with packed weights are right at every shape, and rows are the same in any company."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.core.machine import cpu_features, cpu_vendor
from blockdraft.kernels.cpu.build import EXTRA_FLAGS
from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.ops import IS_BFLOAT16
from blockdraft.kernels.cpu.products import PackedProduct, packed_product
from tests.guarded import check_stays_inside
from tests.tensors import draw
from tests.torch_threads import threads

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")


def may_use_matrices() -> bool:
    """Asks the system itself, which may refuse them (as sandboxes do)."""
    if "amx_bf16" not in cpu_features() or sys.platform != "linux":
        return False
    arch_prctl, ask, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data) == 0)


has_matrices = pytest.mark.skipif(not may_use_matrices(), reason="no matrix registers here")

INPUTS = (2, 30, 32, 34, 96, 130, 576)
"""Matrix registers take 32 at once; a rest is filled up."""
OUTPUTS = (1, 47, 48, 49, 200)
"""Panels hold 48."""
NUM_ROWS = 40
NO_PAIRS = "-mno-avx512bf16"
"""Flag of a compiler: no instruction for pairs of bfloat16."""


def kernels_here() -> Library:
    kernels = library()
    assert isinstance(kernels, Library)
    return kernels


def packed(weight: Tensor, bias: Tensor | None = None) -> PackedProduct:
    """Not `packed_product`, which gives a product that is wrong to torch."""
    kernels = kernels_here()
    step = kernels.product_step(IS_BFLOAT16[weight.dtype])
    if not step:
        pytest.skip("other libraries multiply better here")
    return PackedProduct(kernels, step, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_damaged_weights_are_no_fault_of_the_kernels(
    damage: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    weight = draw(49, 96, seed=1).to(dtype)
    packed(weight)  # or there are no such products here
    weight[5, 7] = damage
    product = packed_product(kernels_here(), weight)
    assert product is not None
    assert not caplog.text
    x = draw(3, 96, seed=2).to(dtype)
    found, expected = product(x), F.linear(x, weight)
    assert torch.equal(found[:, 5].nan_to_num(), expected[:, 5].nan_to_num())
    assert found[:, :5].isfinite().all()
    assert found[:, 6:].isfinite().all()


def check_company(product: PackedProduct, rows: Tensor) -> None:
    """Rows have the same bits in any number."""
    whole = product(rows)
    for num in range(1, len(rows)):
        assert torch.equal(product(rows[:num].contiguous()), whole[:num]), num
        assert torch.equal(product(rows[-num:].contiguous()), whole[-num:]), num


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_rows_are_right_and_alone(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, bias = draw(outputs, inputs, seed=1).to(dtype), draw(outputs, seed=2).to(dtype)
    rows = draw(NUM_ROWS, inputs, seed=3).to(dtype)
    for own_bias in (None, bias):
        product = packed(weight, own_bias)
        exact = rows.double() @ weight.double().T + (0 if own_bias is None else bias.double())
        size = rows.double().abs() @ weight.double().abs().T + 4
        error = (product(rows).double() - exact).abs()
        assert bool((error <= size * (torch.finfo(dtype).eps / 2 + 1e-6)).all())
        check_company(product, rows)


def errors_alone(inputs: int) -> tuple[Tensor, Tensor]:
    """Weight [49, inputs] and rows whose products are 0 but for the rounding of sums.

    So bfloat16 shows in which order and precision they were summed.
    """
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(4))
    weight, rows = draw(49, inputs // 2, seed=1), draw(NUM_ROWS, inputs // 2, seed=3)
    weight, rows = torch.cat((weight, -weight), 1), torch.cat((rows, rows), 1)
    return weight[:, order].bfloat16().contiguous(), rows[:, order].bfloat16().contiguous()


@pytest.mark.parametrize("inputs", [130, 576])
def test_sums_round_alike_in_any_company(inputs: int) -> None:
    weight, rows = errors_alone(inputs)
    product = packed(weight)
    assert product(rows).count_nonzero() > weight.shape[0] * NUM_ROWS / 10
    check_company(product, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("column", [98, 99])
def test_what_is_no_number_stays_in_its_row(column: int, dtype: torch.dtype) -> None:
    product = packed(draw(96, 100, seed=1).to(dtype))
    rows = draw(35, 100, seed=3).to(dtype)
    clean = product(rows)
    for place, value in ((0, float("nan")), (17, float("inf")), (34, float("-inf"))):
        rows[place, column] = value
    whole, others = product(rows), [row for row in range(35) if row not in (0, 17, 34)]
    assert torch.equal(whole[others], clean[others])
    assert not bool(whole[[0, 17, 34]].isfinite().any())


@pytest.mark.parametrize("num", [1, 2])
def test_threads_do_not_matter(num: int) -> None:
    product = packed(draw(1000, 576, seed=1).bfloat16())
    rows = draw(50, 576, seed=3).bfloat16()
    expected = product(rows)
    with threads(num):
        assert torch.equal(product(rows), expected)


@pytest.mark.skipif(sys.platform == "win32", reason="no mprotect there")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_is_read_or_written_beside_rows_and_outputs(
    at_end: bool, dtype: torch.dtype
) -> None:
    for inputs in (2, 34, 96):
        for outputs in (1, 48, 49, 95):
            bias = draw(outputs, seed=2).to(dtype) if outputs > 1 else None
            product = packed(draw(outputs, inputs, seed=1).to(dtype), bias)
            rows = (draw(num, inputs, seed=3).to(dtype) for num in (1, 15, 16, 17, 33, 49))
            check_stays_inside(product, rows, at_end=at_end)


WITH_SMALL_STACK = """
import ctypes, threading
class Stack(ctypes.Structure):
    _fields_ = [("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory, is_there, ends = ctypes.create_string_buffer(4096), threading.Event(), threading.Event()
def keep_a_small_stack_for_signals():
    stack = Stack(ctypes.addressof(memory), 0, 4096)
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
    is_there.set()
    ends.wait()
threading.Thread(target=keep_a_small_stack_for_signals, daemon=True).start()
is_there.wait()
"""
"""A program in which the system allows no matrix registers."""
CHECKED = """
import torch
from blockdraft.kernels.backends import describe_kernels
from blockdraft.kernels.cpu.library import library
from tests.unit.kernels.test_kernels import check_rounding
from tests.unit.kernels.test_products import check_company, errors_alone, packed
weight, rows = errors_alone(576)
product = packed(weight)
check_company(product, rows)
told = describe_kernels(torch.bfloat16, "cpu")["matrix_registers"]
print(told, product(rows).double().abs().sum().item())
for found in check_rounding(library(), (9, 3, 64), torch.bfloat16):
    print(found.double().sum().item())
"""


@has_matrices
def test_where_the_system_allows_none_lanes_multiply_and_it_is_told() -> None:
    with_them, without = (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
        for script in (CHECKED, WITH_SMALL_STACK + CHECKED)
    )
    assert (with_them[0], without[0]) == ("True", "False")
    assert with_them[1] != without[1]
    assert with_them[2] != without[2], "scores of attention"
    assert with_them[3] != without[3], "scores and weighted values"


def takes_pairs_apart() -> bool:
    """Whether this build multiplies bfloat16 in float32."""
    has_pairs = "avx512_bf16" in cpu_features() and NO_PAIRS not in os.environ.get(EXTRA_FLAGS, "")
    is_slow = cpu_vendor() == "GenuineIntel" and not may_use_matrices()
    return "avx512bw" in cpu_features() and (is_slow or not has_pairs)


@pytest.mark.skipif(not takes_pairs_apart(), reason="pairs are multiplied as they are here")
def test_pairs_taken_apart_are_summed_input_by_input() -> None:
    """Each product is exact in float32, and added with one rounding."""
    weight, rows = draw(200, 130, seed=1).bfloat16(), draw(NUM_ROWS, 130, seed=3).bfloat16()
    sums = torch.zeros(NUM_ROWS, 200)
    for i in range(130):
        sums = (sums.double() + rows[:, i, None].double() * weight[:, i].double()).float()
    assert torch.equal(packed(weight)(rows), sums.bfloat16())


def test_more_rows_than_are_widened_at_once() -> None:
    product, rows = packed(draw(96, 34, seed=1).bfloat16()), draw(1030, 34, seed=3).bfloat16()
    whole = product(rows)
    for first in (0, 511, 512, 1000, 1024):
        assert torch.equal(product(rows[first:].contiguous()), whole[first:])


def test_no_rows() -> None:
    assert packed(draw(96, 34, seed=1).bfloat16())(torch.empty(0, 34).bfloat16()).shape == (0, 96)


WITHOUT_PAIRS = """
import sys
import pytest
from blockdraft.kernels.cpu.library import library
assert library().product_step(1) == 2
sys.exit(pytest.main(["-q", "-m", "not slow", "-k", "not allows_none", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512bw" not in cpu_features(), reason="no pairs of bfloat16 are taken apart")
def test_kernels_without_an_instruction_for_pairs_pass_the_same_tests() -> None:
    """As on Intel's servers of 2017 to 2022."""
    flags = f"-O1 {NO_PAIRS} {os.environ.get(EXTRA_FLAGS, '')}"
    here = Path(__file__).parent
    names = (here / "test_kernels.py", here / "test_int8.py", here.parent / "models/test_fused.py")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PAIRS, __file__, *map(str, names)],
        env=os.environ | {EXTRA_FLAGS: flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
