"""Products with packed weights are right at every shape, and rows are the same in any company."""

import pytest
import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.products import PackedProduct, packed_product
from tests.torch_threads import threads

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

INPUTS = (2, 30, 32, 34, 96, 130, 576)
"""Matrix registers take 32 at once; a rest is filled up."""
OUTPUTS = (1, 47, 48, 49, 200)
"""Panels hold 48."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(weight: Tensor, bias: Tensor | None = None) -> PackedProduct:
    kernels = library()
    assert isinstance(kernels, Library)
    product = packed_product(kernels, weight, bias)
    if product is None:
        pytest.skip("other libraries multiply better here")
    return product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_rows_are_right_and_alone(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    weight, bias = draw(outputs, inputs, seed=1).to(dtype), draw(outputs, seed=2).to(dtype)
    rows = draw(40, inputs, seed=3).to(dtype)
    for own_bias in (None, bias):
        product = packed(weight, own_bias)
        whole = product(rows)
        exact = rows.double() @ weight.double().T + (0 if own_bias is None else bias.double())
        size = rows.double().abs() @ weight.double().abs().T + 4
        error = (whole.double() - exact).abs()
        assert bool((error <= size * (torch.finfo(dtype).eps / 2 + 1e-6)).all())
        for num in range(1, len(rows)):
            assert torch.equal(product(rows[:num].contiguous()), whole[:num]), num
            assert torch.equal(product(rows[-num:].contiguous()), whole[-num:]), num


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    product = packed(draw(96, 100, seed=1).to(dtype))
    rows = draw(35, 100, seed=3).to(dtype)
    clean = product(rows)
    for place, value in ((0, float("nan")), (17, float("inf")), (34, float("-inf"))):
        rows[place, 99] = value
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
