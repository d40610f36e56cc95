"""A model of any head size loads: kernels attend over all but the largest, torch over those."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.cache.pages import Pages
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.ops import attends_over
from blockdraft.kernels.heads import filled, stored_size
from blockdraft.models.layers.fused_layer import FusedLayer
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from tests.tiny import tiny_target

SIZES = (4, 8, 16, 20, 24, 32, 40, 48, 100, 120, 128, 256, 496, 500, 512)
LARGE = (514, 520, 528, 1024, 1040)
NUM_TOKENS = 12


@pytest.fixture
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in one call also on a machine whose products other libraries multiply better."""
    kernels = library()
    if kernels is None:
        pytest.skip("no C++ compiler here")
    own = kernels.product_step
    monkeypatch.setattr(kernels, "product_step", lambda flag: own(flag) or 1)


@pytest.fixture
def _no_attention_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products may give a row other bits beside others, as its libraries choose."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("attention by torch")

    monkeypatch.setattr("blockdraft.kernels.torch.backend.grouped_attention", fail)
    monkeypatch.setattr("blockdraft.kernels.torch.attention.grouped_attention", fail)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_by_kernels", "_no_attention_by_torch")
@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_kernels_attend_over_heads_of_any_size(kind: str, head_dim: int) -> None:
    """With the bits of the sequential path, which runs no layer in one call."""
    found = [_logits(kind, head_dim, path) for path in (PagedTarget, SequentialTarget)]
    assert torch.equal(*found)
    assert found[0].isfinite().all()


@pytest.mark.usefixtures("_by_kernels")
@pytest.mark.parametrize("head_dim", LARGE)
def test_torch_attends_over_larger_ones(head_dim: int) -> None:
    """Whether with the same bits, the check of a load finds out."""
    found = [_logits("llama", head_dim, path) for path in (PagedTarget, SequentialTarget)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("_by_kernels")
def test_what_lies_behind_a_head_changes_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: its first numbers again, instead of zeros."""

    def fault(heads: Tensor, size: int) -> Tensor:
        return torch.cat([heads, heads], dim=-1)[..., :size]

    expected = _logits("llama", 24, SequentialTarget)
    monkeypatch.setattr("blockdraft.models.attention.plan.filled", fault)
    assert (_logits("llama", 24, PagedTarget) - expected).abs().max() > 1e-2


def test_heads_are_filled_up_to_whole_steps() -> None:
    assert [stored_size(size) for size in (1, 16, 17, 100)] == [16, 16, 32, 112]
    heads = torch.ones(2, 3, 5)
    assert filled(heads, 5) is heads
    assert filled(heads, 7).tolist() == [[[1.0] * 5 + [0.0] * 2] * 3] * 2


def _logits(kind: str, head_dim: int, path: type[PagedTarget] | type[SequentialTarget]) -> Tensor:
    """Of one prompt in pieces. Only heads that fill whole steps are attended within a layer."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": head_dim, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    model = tiny_target(kind, torch.float32, **sizes)
    target = PagedTarget(model, Pages(8)) if path is PagedTarget else SequentialTarget(model)
    with target.released_after():
        (layer,) = target.layers
        fused = vars(layer)["forward"]
        assert isinstance(fused, FusedLayer)
        assert (fused.layer.whole is not None) == attends_over(head_dim)
        ids = [7 * i % 97 for i in range(NUM_TOKENS)]
        return target.logits_of_split(ids, (5, 1, NUM_TOKENS - 6))
