"""What would break the capture of a CUDA graph is refused before; what a card captures is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.kernels.interface import PagedTables, Rotation
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.models.draft.kernels import kernel_draft
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.layers.graphs import Graphs
from blockdraft.models.layers.waits import RefuseWaits, Waits
from blockdraft.models.target.packed_rows import PackedRows
from tests.parity.targets import make_target
from tests.tiny import KINDS, MOE_KINDS, tiny_drafter, tiny_target
from tests.unit.models.test_static_forward import card as card

CPU = torch.device("cpu")
NUMBERS = torch.tensor([3, 0, 2])
WAITING: dict[str, Callable[[], object]] = {
    "a number": lambda: NUMBERS[0].item(),
    "a condition": lambda: bool(NUMBERS.any()),
    "a comparison": lambda: torch.equal(NUMBERS, NUMBERS),
    "places": lambda: NUMBERS.nonzero(),
    "a mask": lambda: NUMBERS[NUMBERS > 0],
    "counts": lambda: NUMBERS.bincount(),
    "numbers of the host": lambda: torch.tensor([1, 2]),
    "a copy": lambda: NUMBERS.to("meta"),
}


@pytest.mark.parametrize("in_inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_refused(name, in_inference):
    """Also in inference mode, in which the forwards of a target run."""
    with torch.inference_mode(in_inference):
        with RefuseWaits(torch.device("cuda")):  # on another device it may
            WAITING[name]()
        with pytest.raises(Waits), RefuseWaits(CPU):
            WAITING[name]()


def test_what_does_not_wait_is_not():
    with torch.inference_mode(), RefuseWaits(CPU):
        found = torch.where(NUMBERS > 2, 1, NUMBERS)[NUMBERS - 1] + torch.arange(3)
    assert found.tolist() == [2, 3, 2]


def test_nothing_is_captured_of_what_waits(card, caplog):
    """A capture that failed would leave torch's allocator in it."""
    graphs = Graphs("the target", CPU, torch.clone)
    graphs.captures = True
    for _ in range(2):
        assert graphs(1, lambda: NUMBERS + NUMBERS[0].item()).tolist() == [6, 3, 5]
    assert not card
    assert caplog.text.count("no CUDA graphs of the target: aten._local_scalar_dense") == 1


class CardLike(TorchBackend):
    """Finds keys by tables and computes with no number of the host, as the kernels of a card do."""

    packs = reads_pages = True

    def gates(self, activation: object) -> bool:
        return True

    def rotate_(self, heads: Tensor, num_heads: Any, rotation: Rotation, norms: Any) -> Any:
        cos, signed_sin = (part.view(*heads.shape[:-2], 1, -1) for part in rotation)
        return super().rotate_(heads, num_heads, (cos, signed_sin), norms)

    def rows_of_tables(self, slots: Tensor, tables: PagedTables) -> "_Rows":
        return _Rows()


class _Rows:
    """Every row sees itself."""

    def seeing(self, ranges: Tensor) -> "_Rows":
        return self

    def run_layer(self, *layer: Any) -> None:
        return None

    def attend(self, kv: Any, layer: int, query: Tensor, *others: Any) -> Tensor:
        return query.transpose(0, 1)


@pytest.fixture
def card_like(monkeypatch):
    monkeypatch.setattr("blockdraft.kernels.backends.cpu_backend", CardLike)


@torch.inference_mode()
def run_refusing(kind: str, dtype: torch.dtype) -> None:
    target = make_target("paged", tiny_target(kind, dtype))
    assert target.use_static_shapes()
    rows = PackedRows()
    target.memory.open(0, [0], with_context=False)
    assert target.memory.reserve(0, PAGE_SIZE)
    rows.add(target.memory, 0, [3, 4, 5], 0, 1)
    target._static(rows)
    with RefuseWaits(CPU):
        target._static._run(target._static._inputs[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "qwen2"])
def test_a_forward_in_a_fixed_shape_waits_for_nothing(card_like, kind, dtype):
    run_refusing(kind, dtype)


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_experts_count_their_rows_on_the_host(card_like, kind):
    with pytest.raises(Waits, match="bincount"):
        run_refusing(kind, torch.float32)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_a_block_in_a_fixed_shape_waits_for_nothing(card_like, layer_type):
    model = tiny_drafter(num_hidden_layers=1, layer_types=(layer_type,), sliding_window=6)
    pages = Pages(8)
    contexts = PagedContexts(model.config, pages, model.fc.weight)
    contexts.backend = CardLike(torch.float32)
    pages.open(0, [0], with_context=True)
    assert pages.reserve(0, 9)
    draft = kernel_draft(model, contexts)
    assert draft.use_static_shapes()
    with torch.inference_mode():
        block = torch.ones(1, 3, model.config.hidden_size)
        draft(block, torch.tensor([[5, 6, 7]]), [0], [5], [3])
        with RefuseWaits(CPU):
            draft._static._run(draft._static._inputs[4])
