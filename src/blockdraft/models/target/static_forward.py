"""Forwards of few rows in a few fixed shapes, which a card can replay as CUDA graphs.

The inputs of a shape lie in memory that stays. A forward is filled up to the next shape with rows
that stand alone on the scratch page; as rows do not depend on each other, nothing else changes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE
from blockdraft.kernels.interface import Backend, PagedTables
from blockdraft.kernels.tables import TableEntries
from blockdraft.models.attention.plan import AttentionPlan, TablePlan
from blockdraft.models.target.packed_rows import PackedRows

SHAPES = (1, 2, 4, 8, 16, 32, 64)
"""Rows."""
MAX_PAGES = 4096
"""Pages of all spans of a forward; each branch of a tree counts those before it again."""
MAX_PATH_SLOTS = 4096
"""Keys of all branches that lie elsewhere than their positions."""
NUM_WARM = 2
"""Forwards before a graph is made of one: kernels are compiled, and libraries set up."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StaticOutput:
    """logits: [rows, V], of the wanted rows first. captured: by layer, [1, rows, hidden]."""

    logits: Tensor
    captured: dict[int, Tensor]


Compute = Callable[[AttentionPlan, Tensor, Tensor, Tensor], StaticOutput]
"""Of a plan, token ids and positions [1, rows] each, and the rows wanted [rows]."""


class StaticForwards:
    """The forwards of a target over its pages; see `static_forwards`.

    On a card one forward of each shape is captured, and replayed from then on.
    """

    def __init__(
        self, backend: Backend, kv: PagedKV, compute: Compute, device: torch.device
    ) -> None:
        self._backend, self._kv, self._compute, self._device = backend, kv, compute, device
        self._captures = device.type == "cuda"
        self._inputs: dict[int, StaticInputs] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, StaticOutput]] = {}

    def __call__(self, rows: PackedRows) -> StaticOutput | None:
        """What the rows give; None if they fit no shape."""
        shape = next((shape for shape in SHAPES if shape >= len(rows)), None)
        if shape is None:
            return None
        if shape not in self._inputs:
            self._inputs[shape] = StaticInputs(shape, self._device)
        inputs = self._inputs[shape]
        if not inputs.write(rows):
            return None
        if self._captures and shape not in self._graphs:
            self._capture(shape)
        if shape not in self._graphs:
            return self._run(inputs)
        graph, output = self._graphs[shape]
        graph.replay()
        # The next replay writes to the same memory.
        captured = {index: value.clone() for index, value in output.captured.items()}
        return StaticOutput(output.logits.clone(), captured)

    def _run(self, inputs: "StaticInputs") -> StaticOutput:
        paged = self._backend.rows_of_tables(inputs.slots, inputs.tables)
        assert paged is not None, "the backend reads no tables"
        plan = TablePlan(paged, self._kv, inputs.places)
        positions = inputs.places[:1]
        return self._compute(plan, inputs.token_ids[None], positions, inputs.wanted)

    def _capture(self, shape: int) -> None:
        inputs = self._inputs[shape]
        try:
            # The current card of this thread may be another one.
            with torch.cuda.device(self._device):
                usual = torch.cuda.current_stream()
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_stream(usual)
                # A capture that fails does not leave its stream, so this one is around it; and
                # without a stream it takes one of the card that was captured on first.
                with torch.cuda.stream(stream):
                    for _ in range(NUM_WARM):
                        self._run(inputs)
                    graph = torch.cuda.CUDAGraph()
                    # Other threads may use the card meanwhile.
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        output = self._run(inputs)
                usual.wait_stream(stream)
            self._graphs[shape] = graph, output
        except RuntimeError as error:  # an operation of the model waits for the card
            logger.warning("no CUDA graphs: %s", str(error).split("\n")[0])
            self._captures = False


def static_forwards(
    backend: Backend, kv: PagedKV, compute: Compute, device: torch.device
) -> StaticForwards | None:
    """Forwards in fixed shapes; None if the backend reads no tables."""
    one = torch.zeros(3, dtype=torch.int64, device=device)
    if backend.rows_of_tables(one[:1], PagedTables(one, one, one)) is None:
        return None
    return StaticForwards(backend, kv, compute, device)


class StaticInputs:
    """The inputs of forwards of `num_rows` rows: one tensor on the device, written in one copy.

    places: [2, rows], positions, and the ends of the keys that rows may see.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        n = num_rows
        self._sizes = [n, n, n, n, n, 3 * n, MAX_PAGES + 1, MAX_PATH_SLOTS]
        self._host = torch.zeros(sum(self._sizes), dtype=torch.int64, device="cpu")
        self._own = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._own, self._sizes)
        self.token_ids, self.slots, self.wanted = parts[:3]
        self.places = self._own[3 * n : 5 * n].view(2, n)
        self.tables = PagedTables(*parts[5:])

    def write(self, rows: PackedRows) -> bool:
        """Write these rows, and others that fill up; False if they have too many keys."""
        entries = TableEntries.of(rows.spans)
        if len(entries.page_ids) > MAX_PAGES or len(entries.path_slots) > MAX_PATH_SLOTS:
            return False
        num_fill = self._num_rows - len(rows)
        ends = [span.end for span in rows.spans for _ in range(span.num_rows)]
        # One key, at position 0 of the scratch page: what all of these rows write there.
        alone = [len(entries.page_ids), 1, 0]
        parts = (
            rows.token_ids + rows.token_ids[-1:] * num_fill,
            rows.slots + [SCRATCH_PAGE * PAGE_SIZE] * num_fill,
            rows.wanted + [0] * (self._num_rows - len(rows.wanted)),
            rows.positions + [0] * num_fill,
            ends + [1] * num_fill,
            entries.rows + alone * num_fill,
            [*entries.page_ids, SCRATCH_PAGE],
            entries.path_slots,
        )
        for place, part in zip(torch.split(self._host, self._sizes), parts, strict=True):
            place[: len(part)] = torch.tensor(part, dtype=torch.int64, device="cpu")
        self._own.copy_(self._host)
        return True
