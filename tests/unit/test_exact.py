"""The rule of exactness, and the self-test that must notice when it does not hold."""

import pytest
import torch
from torch import nn

from blockdraft.core.errors import ModelError
from blockdraft.models.exact import (
    PROBE_SPLITS,
    ROW_RULES,
    Split,
    first_variant_split,
    model_rule,
    row_rule,
    supports_bfloat16,
)
from blockdraft.models.sequential import STOCK_ATTENTION, SequentialTarget
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


def test_the_probes_cut_the_same_number_of_tokens() -> None:
    for splits in (PROBE_SPLITS, LONG_SPLITS):
        assert len({sum(split) for split in splits}) == 1


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ModelError, match="float16"):
        row_rule(torch.float16)


def test_small_layers_run_on_more_rows() -> None:
    """torch leaves products of up to 16^3 multiplications to another bfloat16 kernel."""
    assert model_rule(torch.bfloat16, 64 * 64).row_multiple == 2
    assert model_rule(torch.bfloat16, 64 * 32).row_multiple == 4
    assert model_rule(torch.bfloat16, 16 * 16).row_multiple == 32
    assert model_rule(torch.float32, 16 * 16) == row_rule(torch.float32)


def test_the_first_split_that_differs_is_named() -> None:
    def logits_of(split: Split) -> torch.Tensor:
        return torch.tensor([1.0, 2.0 + (1 in split)])

    splits: tuple[Split, ...] = ((4,), (2, 2), (3, 1), (1, 3))
    assert first_variant_split(logits_of, splits) == (3, 1)
    assert first_variant_split(logits_of, splits[:2]) is None


@pytest.mark.parametrize("dtype", ROW_RULES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_self_test_passes_past_every_growth_of_the_cache(kind: str, dtype: torch.dtype) -> None:
    skip_without_bfloat16(dtype)
    with SequentialTarget(tiny_target(kind, dtype)).released_after() as target:
        target.check_row_invariance()
        target.check_row_invariance(LONG_SPLITS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_test_fails_on_stock_attention(kind: str) -> None:
    with SequentialTarget(tiny_target(kind, torch.float32)).released_after() as target:
        target.model.set_attn_implementation(STOCK_ATTENTION)
        with pytest.raises(ModelError, match="change with the number of rows"):
            target.check_row_invariance(LONG_SPLITS)


class MixesRows(nn.Module):
    """A layer norm that looks at all rows: what a per-batch scale of a quantized layer does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + 1e-6 * x.abs().amax())


def test_the_self_test_fails_on_a_layer_that_mixes_rows() -> None:
    model = tiny_target("llama", torch.float64)
    model.model.layers[1].post_attention_layernorm = MixesRows()
    with (
        SequentialTarget(model).released_after() as target,
        pytest.raises(ModelError, match="change with the number of rows"),
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
