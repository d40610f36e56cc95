"""Where the keys of each row lie, as numbers that a kernel reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockdraft.kernels.interface import Span


@dataclass(slots=True)
class TableEntries:
    """Of the rows of spans, which follow each other from row 0 on.

    rows: three of each row: the place of its span's pages in `page_ids`, the first position whose
    key lies elsewhere, and the place of that key's slot in `path_slots`.
    """

    rows: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    path_slots: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "TableEntries":
        """Of all rows of a forward that belong to a span."""
        own = cls()
        for span in spans:
            first = len(own.page_ids), span.path_start, len(own.path_slots)
            own.rows += [*first] * span.num_rows
            own.page_ids += span.seen_page_ids
            own.path_slots += span.path_slots
        return own


def even_tables(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tables of the length of the longest, each filled up with its own first page.

    What is filled up is masked, but takes part in the products, so no other sequence may share it.
    """
    num_pages = max(map(len, tables))
    return [[*table, *[table[0]] * (num_pages - len(table))] for table in tables]
