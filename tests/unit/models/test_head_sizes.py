"""A model of any head size loads: kernels take the sizes that they know, torch the others."""

from typing import Any

import pytest
import torch

from blockdraft.cache.pages import Pages
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.ops import attends_over
from blockdraft.models.layers.fused import FusedLayer
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from tests.tiny import tiny_target

SIZES = (4, 8, 16, 20, 24, 32, 40, 48, 100, 120, 128, 256, 496, 512, 520, 528, 1024, 1040)
NUM_TOKENS = 12


@pytest.fixture
def _products_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in one call also on a machine whose products other libraries multiply better."""
    kernels = library()
    if kernels is None:
        pytest.skip("no C++ compiler here")
    own = kernels.product_step
    monkeypatch.setattr(kernels, "product_step", lambda flag: own(flag) or 1)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_products_by_kernels")
@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_of_any_head_size_loads_and_runs(kind: str, head_dim: int) -> None:
    """With the bits of the sequential path, which runs no layer in one call."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": head_dim, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    ids = [7 * i % 97 for i in range(NUM_TOKENS)]
    found = []
    for path in ("paged", "sequential"):
        model = tiny_target(kind, torch.float32, **sizes)
        paged = path == "paged"
        target = PagedTarget(model, Pages(8)) if paged else SequentialTarget(model)
        with target.released_after():
            (layer,) = target.layers
            fused = vars(layer)["forward"]
            assert isinstance(fused, FusedLayer)
            assert (fused.layer.whole is not None) == attends_over(head_dim)
            found.append(target.logits_of_split(ids, (5, 1, NUM_TOKENS - 6)))
    assert torch.equal(*found)
    assert found[0].isfinite().all()
