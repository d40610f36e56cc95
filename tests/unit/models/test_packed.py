"""Packed linear layers: the same product, the same module afterwards, and no harm to a trainer."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockdraft.cache.pages import Pages
from blockdraft.kernels.cpu import onednn, products
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.onednn import OneDnnLinear, supports_bfloat16
from blockdraft.kernels.cpu.products import PackedProduct
from blockdraft.kernels.torch.rules import ROW_RULES
from blockdraft.models.layers import packed
from blockdraft.models.layers.packed import (
    PackedLinear,
    can_pack,
    linear_of,
    pack_linears,
    packed_copy,
    plain_linears,
    side_by_side,
)
from tests.batched import paged_pair
from tests.tiny import tiny_drafter, tiny_target
from tests.torch_threads import threads

PACKED_DTYPES = [torch.float32, *([torch.bfloat16] if supports_bfloat16() else [])]
SHAPES = ((96, 64), (64, 96), (97, 64), (200, 576))


def weight_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).to(dtype)


def rows_of(num: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num, width, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_the_product_is_that_of_a_linear_layer(
    shape: tuple[int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    weight, x = weight_of(shape, dtype), rows_of(6, shape[1], dtype)
    bias = rows_of(1, shape[0], dtype)[0] if with_bias else None
    with torch.inference_mode():
        found = PackedLinear(weight, bias)(x[None])
    assert found.shape == (1, 6, shape[0])
    torch.testing.assert_close(found[0], F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear, x = PackedLinear(weight_of(shape, dtype)), rows_of(100, shape[1], dtype)
    multiple = ROW_RULES[dtype].row_multiple
    with torch.inference_mode():
        together = linear(x)
        for num_rows in range(multiple, 65, multiple):
            assert torch.equal(linear(x[:num_rows].clone()), together[:num_rows]), num_rows


@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2), (47, 34), (49, 33), (96, 576)], ids=str)
def test_products_by_kernels_for_any_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """With a bias that lies elsewhere in steps, which is read as what it is."""
    weight, x = weight_of(shape, dtype), rows_of(40, shape[1], dtype)
    bias = rows_of(shape[0], 3, dtype)[:, 1]
    linear = PackedLinear(weight, bias)
    if not isinstance(linear.linear, PackedProduct):
        pytest.skip("this CPU multiplies such weights otherwise")
    with torch.inference_mode():
        together = linear(x)
        torch.testing.assert_close(together, F.linear(x, weight, bias.contiguous()))
        for num_rows in range(1, 41):
            assert torch.equal(linear(x[-num_rows:]), together[-num_rows:]), num_rows


@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2), (47, 34), (49, 33), (96, 576)], ids=str)
def test_a_narrow_weight_has_the_bits_of_the_same_in_float32(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every number of rows and of threads."""
    weight = weight_of(shape, torch.bfloat16).float()
    x, bias = rows_of(33, shape[1], torch.float32), rows_of(1, shape[0], torch.float32)[0]
    narrow = PackedLinear(weight, bias)
    if not (isinstance(narrow.linear, PackedProduct) and narrow.linear.is_narrow):
        pytest.skip("this CPU has no narrow weights")
    assert narrow.linear.weight.dtype == torch.int16
    monkeypatch.setattr(products, "_narrow", lambda weight: None)
    wide = PackedLinear(weight, bias)
    assert isinstance(wide.linear, PackedProduct)
    assert wide.linear.weight.dtype == torch.float32
    with torch.inference_mode():
        expected = wide(x)
        torch.testing.assert_close(expected, F.linear(x, weight, bias))
        for num_threads, num_rows in itertools.product((1, 2), range(1, 34)):
            with threads(num_threads):
                assert torch.equal(narrow(x[-num_rows:]), expected[-num_rows:])
                assert torch.equal(wide(x[-num_rows:]), expected[-num_rows:])


@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
def test_a_weight_with_one_value_beyond_bfloat16_is_not_narrow() -> None:
    weight = weight_of((200, 576), torch.bfloat16).float()
    weight[3, 5], weight[199, 0] = -0.0, torch.finfo(torch.float32).smallest_normal / 2
    narrow = products._narrow(weight)
    assert narrow is not None
    assert torch.equal((narrow.int() << 16).view(torch.float32), weight)
    weight[150, 7] += torch.finfo(torch.float32).eps * weight[150, 7]
    assert products._narrow(weight) is None


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_a_bias_in_steps_is_read_as_what_it_is(dtype: torch.dtype, without_kernels: None) -> None:
    weight, x = weight_of((96, 64), dtype), rows_of(6, 64, dtype)
    bias = rows_of(96, 3, dtype)[:, 1]
    with torch.inference_mode():
        found = PackedLinear(weight, bias)(x)
    torch.testing.assert_close(found, F.linear(x, weight, bias.contiguous()))


@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_products_that_are_wrong_are_left_to_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planted fault: one input of one output is lost."""
    weight, x = weight_of((200, 576), dtype), rows_of(6, 576, dtype)
    if not isinstance(PackedLinear(weight).linear, PackedProduct):
        pytest.skip("this CPU multiplies otherwise")
    real = products._in_panels

    def faulty(weight: torch.Tensor, *sizes: int) -> torch.Tensor:
        weight = weight.clone()
        weight[150, weight[150].abs().argmax()] = 0.0
        return real(weight, *sizes)

    monkeypatch.setattr(products, "_in_panels", faulty)
    linear = PackedLinear(weight)
    assert isinstance(linear.linear, OneDnnLinear)
    assert "is wrong on this machine" in caplog.text
    with torch.inference_mode():
        torch.testing.assert_close(linear(x), F.linear(x, weight))


@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
def test_what_kernels_cannot_read_is_refused() -> None:
    linear = PackedLinear(weight_of((96, 64), torch.float32))
    if not isinstance(linear.linear, PackedProduct):
        pytest.skip("this CPU multiplies otherwise")
    with pytest.raises(RuntimeError, match="meta"):
        linear(torch.empty(2, 64, device="meta"))
    with pytest.raises(RuntimeError, match="gradients"):
        linear(torch.ones(2, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match="sizes"):
        linear(torch.ones(2, 32))


def test_only_what_the_kernels_read_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_pack(torch.zeros(4, 4))
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float64))
    assert not can_pack(torch.zeros(4, 4, device="meta"))
    monkeypatch.setattr(onednn, "supports_bfloat16", lambda: False)
    assert not can_pack(torch.zeros(4, 4, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.zeros(4, 4))
    assert not isinstance(linear_of(torch.zeros(4, 4)), PackedLinear)


def test_closing_gives_the_layers_back() -> None:
    linear, other = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64)
    with pack_linears([linear, other]):
        assert "forward" in vars(linear)
        assert "forward" not in vars(other)
    assert "forward" not in vars(linear)
    assert list(linear.state_dict()) == ["weight", "bias"]


def test_layers_with_more_to_them_are_not_plain() -> None:
    class Adapter(nn.Linear):
        pass

    hooked = nn.Linear(4, 4)
    hooked.register_forward_pre_hook(lambda module, args: None)
    plain = nn.Linear(4, 4)
    assert plain_linears(nn.Sequential(plain, hooked, Adapter(4, 4))) == [plain]


def test_a_packed_copy_leaves_the_module_to_its_trainer() -> None:
    drafter = tiny_drafter()
    features, positions = torch.randn(1, 5, drafter.fc.in_features), torch.arange(5)[None]
    twin = packed_copy(drafter)
    assert twin.fc.weight is drafter.fc.weight
    with torch.inference_mode():
        for found, expected in zip(
            twin.project_context(features, positions),
            drafter.project_context(features, positions),
            strict=True,
        ):
            torch.testing.assert_close(found, expected)

    drafter.project_context(features, positions)[0][0].sum().backward()
    assert drafter.fc.weight.grad is not None
    assert not any("forward" in vars(module) for module in drafter.modules())


@pytest.fixture
def head() -> nn.Linear:
    return nn.Linear(64, 96, bias=False).requires_grad_(False)


def test_a_head_is_packed_once_for_target_and_drafter(head: nn.Linear) -> None:
    with pack_linears([head]):
        shared = linear_of(head.weight)
        assert shared is vars(head)["forward"]
        copied = linear_of(head.weight.clone())
        assert isinstance(copied, PackedLinear)
        assert copied is not shared


def test_a_loaded_pair_shares_its_head() -> None:
    model, drafter_model = tiny_target("llama", torch.float32), tiny_drafter(torch.float32)
    _, drafter = paged_pair(model, drafter_model, Pages(8))
    assert drafter._head is vars(model.get_output_embeddings())["forward"]


def test_a_changed_head_is_packed_again(head: nn.Linear) -> None:
    x = rows_of(6, 64, torch.float32)
    with pack_linears([head]), torch.no_grad():
        head.weight.mul_(2)
        changed = linear_of(head.weight)
        assert changed is not vars(head)["forward"]
        torch.testing.assert_close(changed(x), F.linear(x, head.weight))


def test_a_packed_head_with_bias_is_not_shared() -> None:
    head = nn.Linear(64, 96)
    x = rows_of(6, 64, torch.float32)
    with pack_linears([head]), torch.inference_mode():
        torch.testing.assert_close(linear_of(head.weight)(x), F.linear(x, head.weight))


def test_a_head_that_nobody_holds_is_forgotten(head: nn.Linear) -> None:
    with pack_linears([head]):
        pass
    assert head.weight.data_ptr() not in packed._packed


class _OtherTensor(torch.Tensor):
    """What torchao puts in the place of a linear layer's weight."""


class _OtherLayer(nn.Module):
    """What GPTQ's package puts in the place of a linear layer: its `weight` only describes one."""

    weight, bias = torch.Size((4, 4)), None


def test_weights_of_other_packages_are_left_to_them() -> None:
    plain, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    other.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(_OtherTensor), requires_grad=False)
    assert plain_linears(nn.ModuleList([plain, other])) == [plain]


def test_layers_of_other_packages_do_not_lie_side_by_side() -> None:
    """Whoever tries to fuse them is told so, and leaves them as they are."""
    for layers in ([_OtherLayer(), _OtherLayer()], [nn.Linear(4, 4, bias=False), _OtherLayer()]):
        with pytest.raises(TypeError, match="of several kinds do not lie side by side"):
            side_by_side(*layers)
