"""The rule of exactness, and the self-test that must notice when it does not hold."""

import pytest
import torch
from torch import nn

from blockdraft.core.errors import ModelError
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.kernels.interface import RowRule
from blockdraft.kernels.torch import attention
from blockdraft.kernels.torch.rules import ROW_RULES, row_rule
from blockdraft.models.attention.exact import STOCK_ATTENTION
from blockdraft.models.target.exact import CHECK_SPLITS, Split, border_check, first_variant_split
from blockdraft.models.target.sequential import SequentialTarget
from tests.stock_products import must_differ
from tests.tiny import KINDS, tiny_target

LONG_SPLITS: tuple[Split, ...] = (
    (64, 64, 64, 64, 20),
    (1,) * 276,
    (7, 50, 16, 16, 1, 3, 60) + (8,) * 15 + (3,),
    (60, 9, 64, 1, 1, 57) + (6,) * 14,
)


def skip_without_bfloat16(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")


def test_the_checks_cut_the_same_number_of_tokens() -> None:
    for splits in (CHECK_SPLITS, LONG_SPLITS):
        assert len({sum(split) for split in splits}) == 1


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ModelError, match="float16"):
        row_rule(torch.float16)


def test_small_layers_run_on_more_rows() -> None:
    """torch leaves products of up to 16^3 multiplications to another bfloat16 kernel."""
    assert row_rule(torch.bfloat16).for_weights_from(64 * 64).row_multiple == 2
    assert row_rule(torch.bfloat16).for_weights_from(64 * 32).row_multiple == 4
    assert row_rule(torch.bfloat16).for_weights_from(16 * 16).row_multiple == 32
    assert row_rule(torch.float32).for_weights_from(16 * 16) == row_rule(torch.float32)


def test_the_first_split_that_differs_is_named() -> None:
    def logits_of(split: Split) -> torch.Tensor:
        return torch.tensor([1.0, 2.0 + (1 in split)])

    splits: tuple[Split, ...] = ((4,), (2, 2), (3, 1), (1, 3))
    assert first_variant_split(logits_of, splits) == (3, 1)
    assert first_variant_split(logits_of, splits[:2]) is None


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ROW_RULES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_self_test_passes_past_every_growth_of_the_cache(kind: str, dtype: torch.dtype) -> None:
    skip_without_bfloat16(dtype)
    with SequentialTarget(tiny_target(kind, dtype)).released_after() as target:
        target.check_row_invariance()
        target.check_row_invariance(LONG_SPLITS)


@must_differ
@pytest.mark.parametrize("kind", KINDS)
def test_the_self_test_fails_on_stock_attention(kind: str) -> None:
    with SequentialTarget(tiny_target(kind, torch.float32)).released_after() as target:
        target.model.set_attn_implementation(STOCK_ATTENTION)
        with pytest.raises(ModelError, match="change with the number of rows"):
            target.check_row_invariance(LONG_SPLITS)


class MixesRows(nn.Module):
    """A layer norm that looks at all rows: what a per-batch scale of a quantized layer does."""

    def __init__(self, from_rows: int = 0) -> None:
        super().__init__()
        self.from_rows = from_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + 1e-6 * x.abs().amax()) if x.shape[1] >= self.from_rows else x


@pytest.mark.parametrize("from_rows", [0, 64])
def test_the_self_test_fails_on_a_layer_that_mixes_rows(from_rows: int) -> None:
    """Also on one that does so in the widest forward only."""
    model = tiny_target("llama", torch.float64)
    model.model.layers[1].post_attention_layernorm = MixesRows(from_rows)
    with (
        SequentialTarget(model).released_after() as target,
        pytest.raises(ModelError, match="change with the number of rows"),
    ):
        target.check_row_invariance()


def test_the_self_test_fails_on_a_second_key_tile_that_sees_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = attention._weighted_sum

    def faulty(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = real(weights, value)
        return output * (1.0 + 1e-9 * weights.shape[1]) if value.shape[1] > 64 else output

    monkeypatch.setattr(attention, "_weighted_sum", faulty)
    with (
        SequentialTarget(tiny_target("llama", torch.float64)).released_after() as target,
        pytest.raises(ModelError, match="change with the number of rows"),
    ):
        target.check_row_invariance()


def test_the_widest_check_crosses_a_border_of_the_key_tiles() -> None:
    assert border_check(row_rule(torch.bfloat16), 8192) == (520, 512)
    assert border_check(row_rule(torch.float32), 8192) == (200, 64)
    assert border_check(RowRule(2, 512, 1024), 600) == (88, 512)
    assert border_check(RowRule(2, 512, 1024), 256) == (0, 256)


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [(torch.float32, "; use --exact off"), (torch.bfloat16, "; use float32 or --exact off")],
    ids=str,
)
def test_the_remedy_is_not_what_the_model_already_is(dtype: torch.dtype, remedy: str) -> None:
    skip_without_bfloat16(dtype)
    model = tiny_target("llama", dtype)
    model.model.layers[1].post_attention_layernorm = MixesRows()
    # In bfloat16 a factor this near to one is lost.
    model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: out * out.shape[1])
    with SequentialTarget(model).released_after() as target, pytest.raises(ModelError) as caught:
        target.check_row_invariance()
    assert str(caught.value).endswith(remedy)


def test_a_model_that_torch_cannot_run_is_a_model_error() -> None:
    model = tiny_target()

    def fail(module: nn.Module, args: object) -> None:
        raise RuntimeError("expected scalar type Float but found Double\nmore")

    model.model.layers[0].register_forward_pre_hook(fail)
    with (
        SequentialTarget(model).released_after() as target,
        pytest.raises(ModelError, match=r"does not run: expected .* Double; use another dtype"),
    ):
        target.check_row_invariance()


def test_released_models_are_as_they_were() -> None:
    model = tiny_target()
    ids = torch.arange(9)[None]
    before, attention = model(ids).logits, model.config._attn_implementation
    with SequentialTarget(model, layer_ids=(1,)).released_after() as target:
        target.check_row_invariance()
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, before)
    assert not model.get_output_embeddings()._forward_pre_hooks
    assert not any(layer._forward_hooks for layer in model.model.layers)
