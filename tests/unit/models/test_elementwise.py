"""Elementwise operations on a CPU: a value's bits do not depend on how many there are beside it."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.torch.rules import ROW_RULES
from blockdraft.kernels.torch.vectors import in_whole_vectors, is_whole, rows_in_whole_vectors
from blockdraft.models.layers.elementwise import Apart, keep_vectors_whole
from blockdraft.models.target.sequential import SequentialTarget
from tests.tiny import tiny_target
from tests.torch_threads import threads

FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
WIDTHS = (96, 100, 101, 130, 257, 2201)
NUM_ROWS = 64


def draw(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return (3 * torch.randn(num_rows, width, generator=generator)).to(dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ROW_RULES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_beside_any_number_of_rows(
    num_threads: int, name: str, dtype: torch.dtype
) -> None:
    """By any number of threads, too: a share that ends in the middle of a row changes nothing."""
    function = FUNCTIONS[name]
    for width in WIDTHS:
        x = draw(NUM_ROWS, width, dtype)
        with threads(1):
            expected = torch.cat([in_whole_vectors(function, row) for row in x.split(2)])
        with threads(num_threads):
            for num_rows in (1, 2, 4, 8, 12, 20, 36, 52, NUM_ROWS):
                assert torch.equal(in_whole_vectors(function, x[:num_rows]), expected[:num_rows])


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_what_is_whole_is_so_on_every_thread(num_threads: int) -> None:
    """Shares as torch makes them, with the grains of different operations."""
    with threads(num_threads):
        for num_values in (*range(1, 500), *range(16_000, 700_000, 997), *range(64, 700_000, 6400)):
            if not is_whole(num_values):
                continue
            gelu_grain = num_values // num_threads if num_values > 2**14 else 2**15
            for grain in (2**15, gelu_grain):
                num_shares = min(num_threads, -(-num_values // grain))
                share = -(-num_values // num_shares)
                assert share % 64 == 0
                assert share * num_shares == num_values


def test_gaps_and_shapes_make_no_difference() -> None:
    x = draw(6, 260, torch.float32)
    gate = x.chunk(2, dim=-1)[0][None]
    found = in_whole_vectors(F.silu, gate)
    assert found.shape == gate.shape
    assert torch.equal(found, in_whole_vectors(F.silu, gate.contiguous()))
    assert in_whole_vectors(F.silu, x[:0]).shape == (0, 260)


@pytest.mark.parametrize("width", [48, 100, 101, 2880])
def test_functions_of_rows(width: int) -> None:
    """As experts gate their rows: each has the bits that it has among others."""

    def gate(rows: Tensor) -> Tensor:
        first, second = rows[:, ::2], rows[:, 1::2]
        return first * torch.sigmoid(1.7 * first) * second

    x = draw(NUM_ROWS, 2 * width, torch.float32)
    expected = rows_in_whole_vectors(gate, x, width)
    torch.testing.assert_close(expected, gate(x))
    for num_rows in (1, 4, 5, 16, 37):
        found = rows_in_whole_vectors(gate, x[:num_rows], width)
        assert torch.equal(found, expected[:num_rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 4, 9])
def test_values_apart_stay_so_in_another_precision(width: int, dtype: torch.dtype) -> None:
    """As an attention gates its heads; without gaps the last rows would have other bits."""

    def gate(values: Tensor) -> Tensor:
        return F.softplus(Apart.of(values).float()).to(values.dtype).view(*values.shape, 1)

    x = draw(NUM_ROWS, width, dtype)
    expected = gate(x)
    torch.testing.assert_close(expected, F.softplus(x.float()).to(dtype)[..., None])
    wide = F.softplus(Apart.of(x).float())
    for num_rows in (1, 2, 5, 16, 37):
        assert torch.equal(gate(x[:num_rows]), expected[:num_rows])
        assert torch.equal(F.softplus(input=Apart.of(x[:num_rows]).float()), wide[:num_rows])
    product = torch.stack([Apart.of(x)] * 2, -1) * 2
    assert type(product) is Tensor
    whole = Apart.of(x).contiguous()
    assert type(whole) is Tensor
    assert whole.is_contiguous()
    assert torch.equal(whole, x)


def rotate(model: PreTrainedModel, num_rows: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
    rotary = model.get_decoder().rotary_emb
    result: tuple[Tensor, Tensor] = rotary(
        torch.zeros(1), position_ids=torch.arange(num_rows)[None], **kwargs
    )
    return result


@pytest.mark.parametrize("head_dim", [16, 20, 24, 100])
def test_rotations_are_those_of_the_model_for_any_number_of_rows(head_dim: int) -> None:
    model = tiny_target("llama", head_dim=head_dim)
    own = rotate(model, 64)
    with keep_vectors_whole(model):
        expected = rotate(model, 64)
        torch.testing.assert_close(expected, own)
        for num_rows in (1, 2, 4, 12, 33):
            for part, whole in zip(rotate(model, num_rows), expected, strict=True):
                assert torch.equal(part, whole[:, :num_rows])
    assert "forward" not in vars(model.get_decoder().rotary_emb)


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_model_of_an_odd_width_gives_rows_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    """Many rows: scalar and vector code differ in few values."""
    ids = torch.randint(97, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    for width in (100, 130, 257):
        model = tiny_target(kind, dtype, seed=width, intermediate_size=width)
        with SequentialTarget(model).released_after() as target:
            expected = target.logits_of_split(ids, (4,) * 64)
            for num_rows in (8, 12, 20, 28, 64):
                split = (*(num_rows,) * (256 // num_rows), 256 % num_rows)
                found = target.logits_of_split(ids, tuple(n for n in split if n))
                assert torch.equal(found, expected), (width, num_rows)


def test_activations_are_given_back() -> None:
    model = tiny_target("gemma3")
    layer: Any = model.get_decoder().layers[0]
    with keep_vectors_whole(model):
        assert "forward" in vars(layer.mlp.act_fn)
    assert "forward" not in vars(layer.mlp.act_fn)


def test_other_devices_are_left_alone() -> None:
    assert backend_for(torch.float32, "cpu").rule.runs_on_vectors
    assert not backend_for(torch.float32, "meta").rule.runs_on_vectors
