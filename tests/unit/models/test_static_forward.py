"""Inputs of forwards in fixed shapes. Their values are in tests/unit/kernels/test_triton.py."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE
from blockdraft.kernels.interface import Span
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.measure.graphs import describe_graphs
from blockdraft.models.attention import static_rows
from blockdraft.models.attention.static_rows import SHAPES
from blockdraft.models.layers.graphs import NUM_WARM, Graphs
from blockdraft.models.target.packed_rows import PackedRows
from blockdraft.models.target.static_forward import (
    StaticForwards,
    StaticInputs,
    StaticOutput,
    static_forwards,
)
from blockdraft.proof import faults
from blockdraft.proof.summary import _graphs
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
    monkeypatch.setattr(static_rows, limit, 1)
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


class Graph:
    """Stands for a CUDA graph: a replay computes again what was captured, into the same memory."""

    def __init__(self) -> None:
        self.replay = lambda: pytest.fail("nothing was captured")


class Stream:
    """Stands for a stream of a card; the last of `current` is the one that is in use."""

    current: ClassVar[list["Stream"]] = []

    def wait_stream(self, other: "Stream") -> None:
        assert other is not self

    @contextmanager
    def used(self) -> Iterator[None]:
        before = list(self.current)
        self.current.append(self)
        try:
            yield
        finally:
            self.current[:] = before


@pytest.fixture
def card(monkeypatch) -> list[Graph]:
    """The graphs that are captured, on a card that is none."""
    graphs: list[Graph] = []
    monkeypatch.setattr(Stream, "current", [Stream()])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current[-1])
    monkeypatch.setattr(torch.cuda, "stream", Stream.used)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    @contextmanager
    def capture(graph: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        # As torch does: what fails inside leaves the stream in use.
        before = list(Stream.current)
        Stream.current.append(stream)
        graphs.append(graph)
        yield
        Stream.current[:] = before

    monkeypatch.setattr(torch.cuda, "graph", capture)
    return graphs


class Doubled:
    """Twice the token ids of the wanted rows, in memory that a captured graph keeps."""

    def __init__(self, graphs: list[Graph]) -> None:
        self._graphs = graphs
        self.num_calls = 0

    def __call__(self, plan, token_ids, positions, wanted) -> StaticOutput:
        self.num_calls += 1
        logits = torch.empty(wanted.shape[0], dtype=torch.int64)

        def compute() -> None:
            torch.mul(token_ids[0, wanted], 2, out=logits)

        compute()
        if self._graphs:
            self._graphs[-1].replay = compute
        return StaticOutput(logits, {})


def on_a_card(compute) -> StaticForwards:
    forwards = StaticForwards(Tables(torch.float32), None, compute, CPU)
    forwards.graphs = Graphs("the target", torch.device("cuda"), StaticOutput.copied)
    return forwards


def test_a_card_replays_one_capture_with_new_inputs(card):
    compute = Doubled(card)
    forwards = on_a_card(compute)
    four, three = forwards(packed(4)), forwards(packed(3))
    assert four.logits[:2].tolist() == [20, 26]
    assert three.logits[:2].tolist() == [20, 24]
    assert len(card) == 1
    assert compute.num_calls == NUM_WARM + 1


@pytest.mark.parametrize("begins_in_inference", [True, False])
def test_forwards_may_be_asked_for_in_any_mode(card, begins_in_inference):
    """Memory that stays is written in both, and a replay is in nobody's gradients."""
    forwards = on_a_card(Doubled(card))
    for in_inference in (begins_in_inference, not begins_in_inference):
        with torch.inference_mode(in_inference):
            for num_rows in (4, 3):
                found = forwards(packed(num_rows)).logits
                assert found[:2].tolist() == [20, 2 * (9 + num_rows)]
                assert not found.requires_grad


def test_no_graph_is_freed_while_another_is_captured(card):
    """Those of an engine that was dropped lie in a cycle, which Python may find at any time."""
    compute, collects = Doubled(card), []

    def noted(*args) -> StaticOutput:
        collects.append((len(Stream.current), gc.isenabled()))
        return compute(*args)

    on_a_card(noted)(packed(4))
    assert collects[-1] == (3, False)
    assert [is_on for _, is_on in collects[:-1]] == [True] * NUM_WARM
    assert gc.isenabled()


def test_what_was_captured_is_told(card):
    forwards = on_a_card(Doubled(card))
    target = SimpleNamespace(graphs=forwards.graphs)
    for num_rows in (4, 3, 8):
        forwards(packed(num_rows))
    assert describe_graphs(target, object()) == {"target": {"rows": [4, 8], "why_not": ""}}
    (line,) = _graphs(describe_graphs(target, object()))
    assert line.found == "of the target for 4, 8 rows"


def test_what_cannot_be_captured_runs_without(card, caplog):
    (usual,) = Stream.current
    compute = Doubled([])

    def waits(*args) -> StaticOutput:
        if card and len(Stream.current) > 1:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return compute(*args)

    forwards = on_a_card(waits)
    for num_rows in (4, 3, 8):
        assert forwards(packed(num_rows)).logits[:2].tolist() == [20, 2 * (9 + num_rows)]
    assert caplog.text.count("no CUDA graphs of the target: operation not permitted") == 1
    found = describe_graphs(SimpleNamespace(graphs=forwards.graphs), None)
    assert found["target"]["why_not"] == "operation not permitted when stream is capturing"
    assert len(card) == 1
    assert Stream.current == [usual]


def test_a_backend_without_tables_keeps_its_own_shapes():
    assert static_forwards(TorchBackend(torch.float32), None, None, CPU) is None
    target = make_target("paged", tiny_target())
    with target.released_after():
        assert not target.use_static_shapes()


def test_a_planted_fault_shows_though_graphs_were_captured(card):
    """And does not stay in one that is captured meanwhile."""
    compute = Doubled(card)
    forwards = on_a_card(compute)
    forwards(packed(4))
    before = compute.num_calls
    with faults.attention_by_company(None):
        forwards(packed(4))
        forwards(packed(8))
    assert compute.num_calls == before + 2
    assert forwards.graphs.shapes == [4]
    forwards(packed(4))
    assert compute.num_calls == before + 2
