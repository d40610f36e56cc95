"""Rows of forwards of a few fixed sizes: where they lie and what they see, in memory that stays.

A forward is filled up to the next size with rows that stand alone on the scratch page; as rows do
not depend on each other, nothing else changes.
"""

from collections.abc import Sequence

import torch

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE
from blockdraft.kernels.interface import Backend, PagedTables, Span
from blockdraft.kernels.tables import TableEntries
from blockdraft.models.attention.plan import TablePlan

SHAPES = (1, 2, 4, 8, 16, 32, 64)
"""Rows."""
MAX_PAGES = 4096
"""Pages of all spans of a forward; each branch of a tree counts those before it again."""
MAX_PATH_SLOTS = 4096
"""Keys of all branches that lie elsewhere than their positions."""


def shape_of(num_rows: int) -> int | None:
    """The next shape with so many rows; None if all have fewer."""
    return next((shape for shape in SHAPES if shape >= num_rows), None)


def reads_tables(backend: Backend, device: torch.device) -> bool:
    """Whether a backend finds keys by tables, which may be written anew between two forwards."""
    one = torch.zeros(3, dtype=torch.int64, device=device)
    return backend.rows_of_tables(one[:1], PagedTables(one, one, one)) is not None


class StaticRows:
    """Numbers of `num_rows` rows: one tensor on the device, written in one copy.

    own: [num_own, rows], what else each row has. places: [2, rows], positions, and the ends of the
    keys that rows may see.
    """

    # Else they could be written in inference mode only, if it was on when they were first needed.
    @torch.inference_mode(False)
    def __init__(self, num_rows: int, device: torch.device, num_own: int = 0) -> None:
        self._num_rows = n = num_rows
        self._sizes = [*[n] * num_own, n, n, n, 3 * n, MAX_PAGES + 1, MAX_PATH_SLOTS]
        self._host = torch.zeros(sum(self._sizes), dtype=torch.int64, device="cpu")
        self._numbers = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._numbers, self._sizes)
        self.own = self._numbers[: num_own * n].view(num_own, n)
        self.slots = parts[num_own]
        self.places = self._numbers[(num_own + 1) * n : (num_own + 3) * n].view(2, n)
        self.tables = PagedTables(*parts[num_own + 3 :])

    def write_rows(
        self,
        spans: Sequence[Span],
        slots: Sequence[int],
        positions: Sequence[int],
        own: Sequence[Sequence[int]] = (),
    ) -> bool:
        """Write the rows of these spans, and others that fill up; False for too many keys.

        own: where these are too short, what is there stays.
        """
        entries = TableEntries.of(spans)
        if len(entries.page_ids) > MAX_PAGES or len(entries.path_slots) > MAX_PATH_SLOTS:
            return False
        num_fill = self._num_rows - len(slots)
        ends = [span.end for span in spans for _ in range(span.num_rows)]
        # One key, at position 0 of the scratch page: what all of these rows write there.
        alone = [len(entries.page_ids), 1, 0]
        parts = (
            *own,
            [*slots, *[SCRATCH_PAGE * PAGE_SIZE] * num_fill],
            [*positions, *[0] * num_fill],
            ends + [1] * num_fill,
            entries.rows + alone * num_fill,
            [*entries.page_ids, SCRATCH_PAGE],
            entries.path_slots,
        )
        for place, part in zip(torch.split(self._host, self._sizes), parts, strict=True):
            place[: len(part)] = torch.tensor(part, dtype=torch.int64, device="cpu")
        self._numbers.copy_(self._host)
        return True

    def plan(self, backend: Backend, kv: PagedKV) -> TablePlan:
        """What the rows attend to, whatever is written by then; of a backend that reads tables."""
        rows = backend.rows_of_tables(self.slots, self.tables)
        assert rows is not None, "the backend reads no tables"
        return TablePlan(rows, kv, self.places)
