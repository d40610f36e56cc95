"""Inputs of forwards in fixed shapes. Their values are in tests/unit/kernels/test_triton.py."""

import pytest
import torch

from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE
from blockdraft.kernels.interface import Span
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.models import static_forward
from blockdraft.models.packed_rows import PackedRows
from blockdraft.models.static_forward import (
    SHAPES,
    StaticForwards,
    StaticInputs,
    StaticOutput,
    static_forwards,
)
from tests.parity.targets import make_target
from tests.tiny import tiny_target

CPU = torch.device("cpu")


def packed(num_rows: int) -> PackedRows:
    """A row with a path, then a sequence of the others."""
    first = Span(0, 1, 70, 71, (4, 9, 2), (300, 301))
    second = Span(1, num_rows - 1, 3, 2 + num_rows, (5,))
    return PackedRows(
        token_ids=list(range(10, 10 + num_rows)),
        positions=[70, *range(3, 2 + num_rows)],
        slots=list(range(600, 600 + num_rows)),
        wanted=[0, num_rows - 1],
        spans=[first, second],
    )


def test_rows_are_filled_up_on_the_scratch_page():
    inputs = StaticInputs(4, CPU)
    assert inputs.write(packed(3))
    assert inputs.token_ids.tolist() == [10, 11, 12, 12]
    assert inputs.slots.tolist() == [600, 601, 602, SCRATCH_PAGE * PAGE_SIZE]
    assert inputs.wanted.tolist() == [0, 2, 0, 0]
    assert inputs.places.tolist() == [[70, 3, 4, 0], [71, 5, 5, 1]]
    tables = inputs.tables
    rows = tables.rows.view(4, 3).tolist()
    assert rows == [[0, 69, 0], [2, 5, 2], [2, 5, 2], [3, 1, 0]]
    # Of three pages of the first span its rows look at two.
    assert tables.page_ids[:4].tolist() == [4, 9, 5, SCRATCH_PAGE]
    assert tables.path_slots[:2].tolist() == [300, 301]


def test_inputs_stay_where_they_are():
    inputs = StaticInputs(4, CPU)
    inputs.write(packed(4))
    addresses = [part.data_ptr() for part in (inputs.token_ids, inputs.places, inputs.tables.rows)]
    assert inputs.write(packed(3))
    assert inputs.token_ids.tolist() == [10, 11, 12, 12]
    assert addresses == [
        part.data_ptr() for part in (inputs.token_ids, inputs.places, inputs.tables.rows)
    ]


@pytest.mark.parametrize("limit", ["MAX_PAGES", "MAX_PATH_SLOTS"])
def test_too_many_keys_fit_no_shape(monkeypatch, limit):
    monkeypatch.setattr(static_forward, limit, 1)
    inputs = StaticInputs(4, CPU)
    assert not inputs.write(packed(3))
    assert not inputs.token_ids.any()


class Tables(TorchBackend):
    """A backend that would read tables."""

    def rows_of_tables(self, slots, tables):
        return self.paged_rows([Span(0, 1, 0, 1, [1])], slots, 1)


def test_each_forward_takes_the_next_shape():
    shapes = []

    def compute(plan, token_ids, positions, wanted):
        shapes.append(token_ids.shape[1])
        assert token_ids.shape == positions.shape == (1, *wanted.shape)
        return StaticOutput(torch.zeros(1), {})

    forwards = StaticForwards(Tables(torch.float32), None, compute, CPU)
    for num_rows in (2, 3, 5, 8, 64):
        assert forwards(packed(num_rows)) is not None
    assert forwards(packed(SHAPES[-1] + 1)) is None
    assert shapes == [2, 4, 8, 8, 64]


def test_a_backend_without_tables_keeps_its_own_shapes():
    assert static_forwards(TorchBackend(torch.float32), None, None, CPU) is None
    target = make_target("paged", tiny_target())
    with target.released_after():
        assert not target.use_static_shapes()
