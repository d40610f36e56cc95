"""Products with int8 weights: whole numbers whose sums are exact, so the bits are known."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError
from blockdraft.kernels.backends import backend_for, reference_for
from blockdraft.kernels.cpu import products
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.products import Int8Product
from blockdraft.kernels.interface import Backend, LayerParts, Linear
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.torch.int8 import SMALLEST, Int8Linear
from blockdraft.kernels.weights import MAX_INT8, Int8Weight, Norm
from tests.guarded import check_stays_inside
from tests.small_llm import assert_nothing_left, load_llm, params
from tests.tensors import draw
from tests.torch_threads import threads

SHAPES = [(96, 64), (1, 2), (47, 34), (49, 66), (97, 98), (200, 576), (64, 1536)]
NUM_ROWS = 33
Numbers = NDArray[np.float32]


def rows_of(inputs: int) -> Tensor:
    """Of all sizes that float32 has, zeros too."""
    x = draw(NUM_ROWS, inputs, seed=1)
    x[3], x[4], x[5], x[6] = 0.0, x[4] * 1e-35, x[5] * 1e34, -x[5]
    x[7, 0] = 1e4
    return x


def native(weight: Int8Weight, bias: Tensor | None = None) -> Linear:
    linear = backend_for(torch.float32, "cpu").linear(weight, bias)
    if not isinstance(linear, Int8Product):
        pytest.skip("no int8 products by kernels on this machine")
    return linear


def by_numpy(weight: Int8Weight, x: Tensor, bias: Tensor | None) -> Numbers:
    """From the definition, with sums in int64."""
    rows, scales = x.numpy(), weight.scales.numpy()
    inputs = rows.shape[1]
    levels = np.float32(min(2**15 - 1, (2**31 - 1) // (MAX_INT8 * inputs)))
    output = np.empty((len(rows), len(scales)), np.float32)
    for row, found in zip(rows, output, strict=True):
        top = np.abs(row).max()
        usable = top > np.float32(SMALLEST)
        values = np.rint(row * (levels / top)) if usable else np.zeros_like(row)
        sums = weight.values.numpy().astype(np.int64) @ values.astype(np.int64)
        assert np.abs(sums).max() < 2**31
        found[:] = sums.astype(np.float32) * scales * (top / levels if usable else np.float32(0))
        if bias is not None:
            found += bias.numpy()
    return output


@pytest.mark.one_in(2)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by", ["kernels", "torch"])
def test_products_have_the_bits_of_the_definition(
    by: str, shape: tuple[int, int], with_bias: bool
) -> None:
    """For every number of rows and of threads, so also whatever rows share a call."""
    weight, x = Int8Weight.of(draw(*shape)), rows_of(shape[1])
    bias = draw(shape[0], 3, seed=2)[:, 1] if with_bias else None
    linear = native(weight, bias) if by == "kernels" else Int8Linear(weight, bias)
    expected = torch.from_numpy(by_numpy(weight, x, bias))
    assert (linear.shape, linear.dtype, linear.keeps_rows) == (shape, torch.float32, True)
    for num_threads in (1, 2):
        with threads(num_threads):
            for num_rows in range(1, NUM_ROWS + 1):
                assert torch.equal(linear(x[-num_rows:]), expected[-num_rows:]), num_rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_in_bfloat16_have_the_bits_of_torch(shape: tuple[int, int]) -> None:
    """Sums are rounded to bfloat16 once, after scales and bias."""
    weight = Int8Weight.of(draw(*shape).bfloat16())
    x, bias = rows_of(shape[1]).bfloat16(), draw(shape[0], seed=2).bfloat16()
    linear = backend_for(torch.bfloat16, "cpu").linear(weight, bias)
    if not isinstance(linear, Int8Product):
        pytest.skip("no int8 products by kernels on this machine")
    expected = Int8Linear(weight, bias)(x)
    assert linear.dtype == expected.dtype == torch.bfloat16
    for num_rows in range(1, NUM_ROWS + 1):
        assert torch.equal(linear(x[-num_rows:]), expected[-num_rows:]), num_rows


def test_the_largest_sums_fit() -> None:
    """All numbers at their ends, and of one sign."""
    for inputs in (2, 64, 2048):
        weight, x = Int8Weight.of(torch.ones(16, inputs)), torch.full((1, inputs), 3.0)
        for linear in (native(weight), Int8Linear(weight, None)):
            torch.testing.assert_close(linear(x), torch.full((1, 16), 3.0 * inputs))
            torch.testing.assert_close(linear(-x), torch.full((1, 16), -3.0 * inputs))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_and_in_its_row(broken: float) -> None:
    weight, x = Int8Weight.of(draw(48, 40)), rows_of(40)
    x[9, 39] = broken
    expected = Int8Linear(weight, None)(x)
    assert expected[9].isnan().all()
    found = native(weight)(x)
    assert found[9].isnan().all()
    others = [row for row in range(NUM_ROWS) if row != 9]
    assert torch.equal(found[others], expected[others])


def test_the_closest_weight() -> None:
    weight = draw(8, 64)
    weight[3] = 0.0
    closest = Int8Weight.of(weight)
    assert closest.values.dtype == torch.int8
    assert closest.values.abs().amax(1).tolist() == [MAX_INT8 * (row != 3) for row in range(8)]
    error = (closest.values * closest.scales[:, None] - weight).abs()
    assert (error <= 0.501 * closest.scales[:, None]).all()
    x = draw(5, 64, seed=1)
    found, expected = Int8Linear(closest, None)(x), F.linear(x, weight)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_an_odd_number_of_inputs_is_left_to_torch() -> None:
    weight, x = Int8Weight.of(draw(48, 33)), rows_of(33)
    linear = backend_for(torch.float32, "cpu").linear(weight)
    assert isinstance(linear, Int8Linear)
    assert torch.equal(linear(x), torch.from_numpy(by_numpy(weight, x, None)))


@pytest.mark.parametrize("fault", ["a scale", "a weight"])
def test_products_that_are_wrong_are_left_to_torch(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: one output counts a little more; a number of another one is off by one."""
    weight, x = Int8Weight.of(draw(112, 576)), rows_of(576)
    native(Int8Weight.of(draw(111, 576)))  # skips where there is none
    real = products._in_panels

    def faulty(tensor: Tensor, *sizes: int) -> Tensor:
        tensor = tensor.clone()
        if fault == "a scale" and tensor.dtype == torch.float32:
            tensor[70] *= 1.001
        if fault == "a weight" and tensor.dtype == torch.int8:
            tensor[90, 5] += 1 if tensor[90, 5] < 0 else -1
        return real(tensor, *sizes)

    monkeypatch.setattr(products, "_in_panels", faulty)
    linear = backend_for(torch.float32, "cpu").linear(weight)
    assert isinstance(linear, Int8Linear)
    assert "int8 matrix product by kernels is wrong" in caplog.text
    kernels = library()
    assert kernels is not None
    wrong = Int8Product(kernels, kernels.int8_step(), weight, None)(x)
    assert not torch.equal(wrong, torch.from_numpy(by_numpy(weight, x, None)))


def layer_parts(backend: Backend) -> LayerParts:
    size, inner, heads, kv_heads, head_dim = 64, 96, 4, 2, 16

    def linear(outputs: int, inputs: int, seed: int) -> Linear:
        return backend.linear(Int8Weight.of(draw(outputs, inputs, seed=seed) * inputs**-0.5))

    norm = Norm(torch.ones(size), 1e-5, rounds_first=False)
    return LayerParts(
        qkv=linear((heads + 2 * kv_heads) * head_dim, size, 1),
        o=linear(size, heads * head_dim, 2),
        gate_up=linear(2 * inner, size, 3),
        down=linear(size, inner, 4),
        norm=norm,
        mlp_norm=norm,
        head_norms=None,
        num_heads=(heads, kv_heads, kv_heads),
        head_dim=head_dim,
        activation=torch.nn.SiLU(),
    )


def test_layers_run_whole_with_int8_weights() -> None:
    backend = backend_for(torch.float32, "cpu", [16])
    parts = layer_parts(backend)
    if not isinstance(parts.qkv, Int8Product):
        pytest.skip("no int8 products by kernels on this machine")
    assert backend.layer(parts) is not None


def test_only_kernels_are_said_to_be_faster() -> None:
    assert not TorchBackend(torch.float32).multiplies_int8
    assert not reference_for(torch.float32, "cpu").multiplies_int8
    kernels = library()
    for dtype, is_bfloat16 in ((torch.float32, 0), (torch.bfloat16, 1)):
        has_products = (
            kernels is not None and min(kernels.int8_step(), kernels.product_step(is_bfloat16)) > 0
        )
        assert backend_for(dtype, "cpu").multiplies_int8 == has_products


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 20}], ids=["chains", "trees"])
def test_drafts_in_int8_change_no_answer(folders, options, asked):
    """And by kernels they are the same for a request alone and among others."""
    prompts = ["the abc the abc the abc", "a b c d e f g a b c", "xyz"]
    drafted, alone = (load_llm(folders, draft_dtype="int8", **options) for _ in range(2))
    plain = load_llm(folders, draft_dtype="target")
    found = [one.completions[0] for one in drafted.generate(prompts, params(**asked))]
    for prompt, own in zip(prompts, found, strict=True):
        expected = plain.generate(prompt, params(num_draft_tokens=0, **asked)).completions[0]
        assert own.token_ids == expected.token_ids
        assert own.acceptance.num_drafted > 0
        by_itself = alone.generate(prompt, params(**asked)).completions[0]
        if backend_for(torch.float32, "cpu").multiplies_int8:  # else other operations may round
            assert by_itself.acceptance == own.acceptance
    assert drafted.engine.proposer.failures.num_failures == 0
    assert_nothing_left(drafted)


@pytest.mark.parametrize("draft_dtype", ["auto", "int8", "target"])
def test_the_option_decides_the_weights(folders, draft_dtype):
    head = load_llm(folders, draft_dtype=draft_dtype).engine.drafter._head
    in_int8 = isinstance(head, (Int8Product, Int8Linear))
    faster = backend_for(torch.float32, "cpu").multiplies_int8
    assert in_int8 == {"auto": faster, "int8": True, "target": False}[draft_dtype]


def test_an_unknown_draft_dtype_is_refused():
    with pytest.raises(ConfigError, match="it must be one of auto, int8, target"):
        LLMConfig(draft_dtype="int4")  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="no mprotect there")
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_is_read_or_written_beside_rows_and_outputs(at_end: bool) -> None:
    for outputs, inputs in SHAPES[:5]:
        weight = Int8Weight.of(draw(outputs, inputs))
        product = native(weight, draw(outputs, seed=2))
        assert isinstance(product, Int8Product)
        rows = (draw(num, inputs, seed=3) for num in (1, 8, 9, 10, 19))
        check_stays_inside(product, rows, at_end=at_end)
