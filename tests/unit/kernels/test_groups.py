"""Products with weights in groups: exact sums added up in one order, so the bits are known."""

import sys

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.backends import backend_for, reference_for
from blockdraft.kernels.cpu import products
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.products import GroupProduct
from blockdraft.kernels.interface import LayerParts, Linear
from blockdraft.kernels.torch.groups import GroupLinear
from blockdraft.kernels.torch.int8 import SMALLEST
from blockdraft.kernels.weights import GROUP, GROUP_LEVELS, GroupWeight, Norm, joined_groups
from tests.guarded import check_stays_inside
from tests.tensors import draw
from tests.torch_threads import threads

SHAPES = [(1, 32), (16, 32), (47, 64), (96, 64), (97, 96), (200, 576), (64, 1536)]
KINDS = [(4, True), (4, False), (8, False), (8, True)]
"""Bits of a number, and whether there are minimums."""
NUM_ROWS = 20
Numbers = NDArray[np.float32]


def make_weight(
    shape: tuple[int, int],
    kind: tuple[int, bool] = (4, True),
    dtype: torch.dtype = torch.float32,
) -> GroupWeight:
    """All numbers that there are, the ends too."""
    (outputs, inputs), (num_bits, has_minimums) = shape, kind
    groups, generator = inputs // GROUP, torch.Generator().manual_seed(3)
    if num_bits == 4:
        size, low, number = GROUP // 2, 0, torch.uint8
    else:
        size, low, number = GROUP, -128, torch.int8
    sizes = (outputs, groups, size)
    numbers = torch.randint(low, low + 256, sizes, generator=generator).to(number)
    scales = draw(outputs, groups, seed=4).half()
    minimums = draw(outputs, groups, seed=5).half() if has_minimums else None
    return GroupWeight(numbers, scales, minimums, dtype)


def rows_of(inputs: int) -> Tensor:
    """Of all sizes that float32 has, zeros and zeros in one group too."""
    x = draw(NUM_ROWS, inputs, seed=1)
    x[3], x[4], x[5], x[6] = 0.0, x[4] * 1e-35, x[5] * 1e30, -x[5]
    x[7, 0] = 1e4
    x[8, :GROUP] = 0.0
    return x


def by_numpy(weight: GroupWeight, x: Tensor, bias: Tensor | None) -> Numbers:
    """From the definition, with sums in int64."""
    numbers = weight.unpacked().numpy().astype(np.int64)
    scales = weight.scales.float().numpy()
    minimums = None if weight.minimums is None else weight.minimums.float().numpy()
    rows = x.float().numpy().reshape(len(x), -1, GROUP)
    levels = np.float32(GROUP_LEVELS)
    output = np.zeros((len(x), len(scales)), np.float32)
    for row, found in zip(rows, output, strict=True):
        for group, values in enumerate(row):
            top = np.abs(values).max()
            usable = top > np.float32(SMALLEST)
            wholes = np.rint(values * (levels / top)) if usable else np.zeros_like(values)
            scale = top / levels if usable else np.float32(0)
            sums = numbers[:, group] @ wholes.astype(np.int64)
            assert np.abs(sums).max() < 2**31
            found += sums.astype(np.float32) * scales[:, group] * scale
            if minimums is not None:
                found += minimums[:, group] * (np.float32(wholes.sum()) * scale)
        if bias is not None:
            found += bias.float().numpy()
    return output


def native(weight: GroupWeight, bias: Tensor | None = None) -> Linear:
    linear = backend_for(weight.dtype, "cpu").linear(weight, bias)
    if not isinstance(linear, GroupProduct):
        pytest.skip("no products with groups by kernels on this machine")
    return linear


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by", ["kernels", "torch"])
def test_products_have_the_bits_of_the_definition(
    by: str, shape: tuple[int, int], kind: tuple[int, bool], dtype: torch.dtype
) -> None:
    """For every number of rows and of threads, so also whatever rows share a call."""
    weight, x = make_weight(shape, kind, dtype), rows_of(shape[1]).to(dtype)
    bias = draw(shape[0], 3, seed=2)[:, 1].to(dtype)
    for own in (None, bias):
        linear = native(weight, own) if by == "kernels" else GroupLinear(weight, own)
        expected = torch.from_numpy(by_numpy(weight, x, own)).to(dtype)
        assert (linear.shape, linear.dtype, linear.keeps_rows) == (shape, dtype, True)
        for num_threads in (1, 2):
            with threads(num_threads):
                for num_rows in range(1, NUM_ROWS + 1):
                    assert torch.equal(linear(x[-num_rows:]), expected[-num_rows:]), num_rows


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_product_is_that_of_what_the_weight_stands_for(kind: tuple[int, bool]) -> None:
    weight, x = make_weight((96, 576), kind), draw(5, 576, seed=1)
    expected = x @ weight.dequantized().T
    assert (GroupLinear(weight, None)(x) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_and_in_its_row(broken: float) -> None:
    weight, x = make_weight((48, 64)), rows_of(64)
    x[9, 63] = broken
    expected = GroupLinear(weight, None)(x)
    assert expected[9].isnan().all()
    found = native(weight)(x)
    assert found[9].isnan().all()
    others = [row for row in range(NUM_ROWS) if row != 9]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("fault", ["a scale", "a minimum", "a number", "another group's scale"])
def test_products_that_are_wrong_are_left_to_torch(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, x = make_weight((112, 576)), rows_of(576)
    native(weight)  # skips where there is none
    assert weight.minimums is not None
    faulty = GroupWeight(
        weight.numbers.clone(), weight.scales.clone(), weight.minimums.clone(), weight.dtype
    )
    if fault == "a scale":
        faulty.scales[70, 3] *= 1.01
    elif fault == "a minimum":
        faulty.minimums[70, 3] += 0.01  # type: ignore[index]
    elif fault == "a number":
        faulty.numbers[90, 5, 7] ^= 16
    else:
        faulty.scales[3] = faulty.scales[3].roll(1)
    real = products._group_panels
    monkeypatch.setattr(products, "_group_panels", lambda _, panel: real(faulty, panel))
    linear = backend_for(torch.float32, "cpu").linear(weight)
    assert isinstance(linear, GroupLinear)
    assert "int4 in groups by kernels is wrong" in caplog.text
    kernels = library()
    assert kernels is not None
    wrong = GroupProduct(kernels, weight, None)(x)
    assert not torch.equal(wrong, torch.from_numpy(by_numpy(weight, x, None)))


def test_weights_side_by_side_are_one() -> None:
    weights = [make_weight((outputs, 64)) for outputs in (48, 5, 16)]
    x = rows_of(64)
    apart = torch.cat([GroupLinear(weight, None)(x) for weight in weights], dim=-1)
    assert torch.equal(native(joined_groups(weights))(x), apart)
    with pytest.raises(TypeError, match="several kinds"):
        joined_groups([weights[0], make_weight((16, 64), (8, False))])


def test_some_outputs_of_a_weight() -> None:
    weight, x, outputs = make_weight((48, 64)), rows_of(64), torch.tensor([40, 3, 3, 17])
    expected = GroupLinear(weight, None)(x)[:, outputs]
    assert torch.equal(native(weight.at(outputs))(x), expected)


def test_the_packed_weight_is_as_small_as_its_parts() -> None:
    weight = make_weight((96, 576))
    linear = native(weight)
    assert isinstance(linear, GroupProduct)
    assert linear.weight.nbytes == weight.num_bytes == 96 * 576 * 5 // 8


def test_layers_run_whole() -> None:
    backend = backend_for(torch.float32, "cpu", [16])
    if not backend.multiplies_groups:
        pytest.skip("no products with groups by kernels on this machine")
    norm = Norm(torch.ones(64), 1e-5, rounds_first=True)
    parts = LayerParts(
        qkv=native(make_weight((128, 64))),
        o=native(make_weight((64, 64), (8, False))),
        gate_up=native(make_weight((192, 64))),
        down=native(make_weight((64, 96))),
        norm=norm,
        mlp_norm=norm,
        head_norms=None,
        num_heads=(4, 2, 2),
        head_dim=16,
        activation=torch.nn.SiLU(),
    )
    assert backend.layer(parts) is not None


def test_only_kernels_are_said_to_read_packed_numbers() -> None:
    assert not reference_for(torch.float32, "cpu").multiplies_groups
    assert not backend_for(torch.float64, "cpu").multiplies_groups
    kernels = library()
    has_products = kernels is not None and kernels.group_panel() > 0
    for dtype in (torch.float32, torch.bfloat16):
        assert backend_for(dtype, "cpu").multiplies_groups == has_products


@pytest.mark.skipif(sys.platform == "win32", reason="no mprotect there")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_is_read_or_written_beside_rows_and_outputs(
    at_end: bool, kind: tuple[int, bool]
) -> None:
    for shape in SHAPES[:5]:
        product = native(make_weight(shape, kind), draw(shape[0], seed=2))
        assert isinstance(product, GroupProduct)
        rows = (draw(num, shape[1], seed=3) for num in (1, 4, 12, 13, 30))
        check_stays_inside(product, rows, at_end=at_end)
