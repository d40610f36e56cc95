"""The draft block by kernels is the draft model's forward, whoever shares it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.kernels.interface import PagedTables, Rotation, Scoring
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.models.attention import static_rows
from blockdraft.models.draft.context import ContextSpan
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.kernels import kernel_draft
from blockdraft.models.draft.paged_context import PagedContexts
from tests.parity import faults
from tests.tensors import draw
from tests.tiny import DFLASH2, HIDDEN_SIZE, tiny_drafter

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

DTYPES = [torch.float32, *([torch.bfloat16] if supports_bfloat16() else [])]
LENGTHS = [5, PAGE_SIZE - 3, 130, 2 * PAGE_SIZE]
SIZES = [4, 6, 2, 5]


class Case:
    """Sequences with random features as context, and a block of random embeddings each.

    given_up: the first pages of long sequences have no context. by_tables: in fixed shapes, by a
    backend that reads tables.
    """

    def __init__(
        self, model: DraftModel, *, given_up: bool = False, by_tables: bool = False
    ) -> None:
        self.given_up, self.by_tables = given_up, by_tables
        self.model, dtype = model, model.fc.weight.dtype
        self.features = [
            draw(1, length, model.fc.in_features, seed=i).to(dtype)
            for i, length in enumerate(LENGTHS)
        ]
        self.embeddings = draw(len(SIZES), max(SIZES), HIDDEN_SIZE, seed=9).to(dtype)

    def expected(self, index: int) -> Tensor:
        """By the model's own forward, alone and no wider than its block."""
        length, size = LENGTHS[index], SIZES[index]
        context = self.model.new_context()
        known = torch.arange(PAGE_SIZE if self.gives_up(index) else 0, length)
        features = self.features[index][:, known]
        context.append(self.model.project_context(features, known[None]))
        positions = torch.arange(length, length + size)[None]
        masks = self.model.block_masks(len(known), size)
        return self.model(self.embeddings[index : index + 1, :size], positions, context, masks)[0]

    def gives_up(self, index: int) -> bool:
        return self.given_up and LENGTHS[index] > PAGE_SIZE

    def found(self, chosen: list[int]) -> list[Tensor]:
        """By kernels, in one forward; in pages where others left what is no number."""
        pages = Pages(32)
        contexts = PagedContexts(self.model.config, pages, self.model.fc.weight)
        for index in chosen:
            length = LENGTHS[index]
            pages.open(index, [0], with_context=True)
            assert pages.reserve(index, length + SIZES[index])
            for pool in contexts.kv.pools:
                pool[:, :, list(pages.page_ids(index))] = torch.nan
            if self.gives_up(index):
                contexts.give_up(index, 0, 1)
            contexts.keep(index, 0, self.features[index][0])
            needed = contexts.needed(ContextSpan(index, 0, length))
            known = torch.tensor(contexts.positions(index, length))
            features = self.features[index][:, known]
            contexts.write(needed, self.model.project_context(features, known[None]))
        lengths, sizes = ([values[i] for i in chosen] for values in (LENGTHS, SIZES))
        width = max(sizes)
        if self.by_tables:
            contexts.backend = TableBackend(self.model.fc.weight.dtype)
        draft = kernel_draft(self.model, contexts)
        assert draft is not None
        assert draft.use_static_shapes() == self.by_tables
        positions = [list(range(length, length + width)) for length in lengths]
        embeddings, places = self.embeddings[chosen][:, :width], torch.tensor(positions)
        if self.by_tables:  # other rows of the same shape, which must leave nothing
            draft(embeddings.flip(0), places.flip(0), chosen[::-1], lengths[::-1], sizes[::-1])
        hidden = draft(embeddings, places, chosen, lengths, sizes)
        return [hidden[place, : SIZES[index]] for place, index in enumerate(chosen)]


class TableBackend(TorchBackend):
    """Finds the keys of each row in tables, as kernels of a card do."""

    packs = reads_pages = True

    def gates(self, activation: object) -> bool:
        return True

    def rotate_(self, heads: Tensor, num_heads: Any, rotation: Rotation, norms: Any) -> Any:
        cos, signed_sin = rotation
        return super().rotate_(heads, num_heads, (cos[:, None], signed_sin[:, None]), norms)

    def rows_of_tables(self, slots: Tensor, tables: PagedTables) -> "TableRows":
        return TableRows(slots, tables)


class TableRows:
    """Attention row by row, over what lies in the tables when it is computed."""

    def __init__(self, slots: Tensor, tables: PagedTables, ranges: Tensor | None = None) -> None:
        self.slots, self.tables, self.ranges = slots, tables, ranges

    def seeing(self, ranges: Tensor) -> "TableRows":
        return TableRows(self.slots, self.tables, ranges)

    def attend(
        self, kv: PagedKV, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        kv.write(layer, self.slots, key, value)
        pool, found = kv.pools[layer].flatten(2, 3), []
        group = query.shape[0] // key.shape[0]
        for row, (first, end) in enumerate(self.ranges.tolist()):
            table = int(self.tables.rows[3 * row])
            positions = torch.arange(first, end)
            pages = self.tables.page_ids[table + positions // PAGE_SIZE]
            seen = pool[:, :, pages * PAGE_SIZE + positions % PAGE_SIZE]
            keys, values = seen.repeat_interleave(group, 1)
            weights = (keys @ query[:, row, :, None] * scoring.scale).softmax(1)
            found.append((weights * values).sum(1))
        return torch.stack(found)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 40},
    {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3},
    {"dflash2": DFLASH2},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.inference_mode()
def test_blocks_by_kernels_are_those_of_the_model(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    check_blocks(options, dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.inference_mode()
def test_blocks_do_without_pages_that_were_given_up(options: dict[str, Any]) -> None:
    check_blocks(options, torch.float32, given_up=True)


def check_blocks(options: dict[str, Any], dtype: torch.dtype, **kind: bool) -> None:
    case = Case(tiny_drafter(dtype, **options), **kind)
    alone = [case.found([index])[0] for index in range(len(SIZES))]
    for index, found in enumerate(alone):
        expected = case.expected(index)
        error = (found - expected).float().abs().max()
        assert error <= 64 * torch.finfo(dtype).eps * expected.abs().max(), "not the model's block"
    for chosen in ([0, 1], [3, 0, 2], [2, 1, 0, 3]):
        for index, found in zip(chosen, case.found(chosen), strict=True):
            error = (found - alone[index]).float().abs().max()
            # Products of other numbers of rows may round differently, which drafts may.
            assert error <= 64 * torch.finfo(dtype).eps * alone[index].abs().max(), index


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@torch.inference_mode()
def test_blocks_in_fixed_shapes_are_those_of_the_model(
    options: dict[str, Any], given_up: bool
) -> None:
    check_blocks(options, torch.float32, given_up=given_up, by_tables=True)


@torch.inference_mode()
def test_more_rows_than_any_shape_keep_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_rows, "SHAPES", (1, 2))
    case = Case(tiny_drafter(torch.float32), by_tables=True)
    monkeypatch.setattr(TableBackend, "paged_rows", refused)
    with pytest.raises(RuntimeError, match="its own shape"):
        case.found([0])


def refused(*args: object) -> None:
    raise RuntimeError("its own shape")


@torch.inference_mode()
def test_blocks_that_are_convolved_have_no_fixed_shapes() -> None:
    """Their rows are not independent."""
    case = Case(tiny_drafter(torch.float32, dflash2=DFLASH2), by_tables=True)
    with pytest.raises(AssertionError):
        case.found([0])


@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
@torch.inference_mode()
def test_a_window_one_key_too_wide_is_found(options: dict[str, Any]) -> None:
    """It would cost acceptance only, and so show nowhere else."""
    with faults.window_one_key_too_wide(), pytest.raises(AssertionError, match="not the model's"):
        check_blocks(options, torch.float32)


@torch.inference_mode()
def test_a_convolution_over_the_next_block_is_found() -> None:
    with faults.convolution_over_all_rows(), pytest.raises(AssertionError):
        check_blocks({"dflash2": DFLASH2}, torch.float32)


def test_other_drafters_are_left_to_torch() -> None:
    def by_kernels(model: DraftModel) -> bool:
        return (
            kernel_draft(model, PagedContexts(model.config, Pages(2), model.fc.weight)) is not None
        )

    assert by_kernels(tiny_drafter(torch.float32))
    assert not by_kernels(tiny_drafter(torch.float64))
    assert not by_kernels(tiny_drafter(torch.float32, hidden_act="gelu"))
    assert not by_kernels(tiny_drafter(torch.float32, head_dim=24))
