"""Linear layers whose rows depend on their number run in blocks in which they do not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.core.errors import ModelError
from blockdraft.kernels.cpu.onednn import OneDnnLinear
from blockdraft.kernels.cpu.products import PackedProduct
from blockdraft.kernels.torch.rules import ROW_RULES, row_rule
from blockdraft.models.layers.fused import speed_up
from blockdraft.models.layers.fused_layer import FusedLayer
from blockdraft.models.layers.packed import PackedLinear
from blockdraft.models.layers.row_blocks import RowBlocks, keeps_any_rows, largest_block, tried_rows
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.sequential import SequentialTarget
from tests.tiny import tiny_target

RULE = row_rule(torch.float32)


class Variant:
    """A product with other bits from so many rows on, as a library that takes another kernel."""

    def __init__(self, weight: Tensor, first: int) -> None:
        self.weight, self.first = weight, first

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // x.shape[-1]
        return F.linear(x, self.weight) * (1.0 + 1e-5 * (num_rows >= self.first))


@pytest.mark.parametrize(("first", "expected"), [(8, 4), (36, 32), (64, 60), (65, 64)])
def test_the_largest_block_ends_where_bits_change(first: int, expected: int) -> None:
    weight = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    product = Variant(weight, first)
    found = largest_block(product, weight.shape, weight.dtype, RULE)
    assert found == expected
    x = torch.randn(1, 64, 48, generator=torch.Generator().manual_seed(1))
    blocks = RowBlocks(product, found)
    whole = blocks(x)
    assert whole.shape == (1, 64, 5)
    for num_rows in (4, 12, 40, 60):
        assert torch.equal(blocks(x[:, :num_rows]), whole[:, :num_rows])


@pytest.mark.parametrize("dtype", ROW_RULES, ids=str)
def test_small_shapes_are_tried_with_every_number_of_rows(dtype: torch.dtype) -> None:
    rule = row_rule(dtype)
    tried = tried_rows(rule, 1000)
    assert set(range(rule.row_multiple, 65, rule.row_multiple)) <= set(tried)
    assert tried[-1] == rule.max_rows
    assert tried_rows(rule, 2**40)[-1] == rule.max_rows


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_with_such_a_layer_is_exact_all_the_same(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault in packed layers and in torch's own."""
    own, linear = OneDnnLinear.__call__, F.linear

    def scale(x: Tensor) -> float:
        return 1.0 + 1e-5 * (x.numel() // x.shape[-1] > 16)

    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, x: own(self, x) * scale(x))
    monkeypatch.setattr(F, "linear", lambda x, *rest: linear(x, *rest) * scale(x))
    model = tiny_target(kind, dtype)
    with SequentialTarget(model).released_after() as target:
        target.check_row_invariance()
        layer: Any = vars(target.layers[0]).get("forward")
        if isinstance(layer, FusedLayer):
            assert all(isinstance(product, RowBlocks) for product in layer.layer.products)
    assert not any("forward" in vars(module) for module in model.modules())


def has_own_products(dtype: torch.dtype) -> bool:
    return isinstance(PackedLinear(torch.ones(16, 16, dtype=dtype)).linear, PackedProduct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_a_model_of_kernels_alone_takes_any_number_of_rows(dtype: torch.dtype) -> None:
    is_known = has_own_products(dtype)
    for kind, expected in (("llama", is_known), ("gemma3", False), ("gpt_oss", False)):
        with SequentialTarget(tiny_target(kind, dtype)).released_after() as target:
            assert (target.rule.row_multiple == 1) == expected, kind
    if not is_known:
        pytest.skip("this CPU multiplies otherwise")
    model = tiny_target("llama", dtype)
    with speed_up(model):
        assert keeps_any_rows(model)
        layer: Any = vars(decoder_layers(model)[1])["forward"]
        layer.layer.use_parts()
        assert not keeps_any_rows(model)
    assert not keeps_any_rows(model)


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_rows_are_filled_up() -> None:
    with SequentialTarget(tiny_target("llama", torch.float32)).released_after() as target:
        assert target.rule.row_multiple == RULE.row_multiple


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 7, 12])
def test_the_self_test_finds_a_product_that_adds_in_another_order(
    num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: so many rows add the second half of their inputs first."""
    if not has_own_products(dtype):
        pytest.skip("this CPU multiplies otherwise")
    real = PackedProduct.__call__

    def faulty(product: PackedProduct, x: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] != num_rows:
            return real(product, x)
        second = torch.arange(x.shape[-1]) >= x.shape[-1] // 2
        return real(product, x * second) + real(product, x * ~second)

    with SequentialTarget(tiny_target("llama", dtype)).released_after() as target:
        target.check_row_invariance()
        monkeypatch.setattr(PackedProduct, "__call__", faulty)
        with pytest.raises(ModelError, match="number of rows"):
            target.check_row_invariance()
