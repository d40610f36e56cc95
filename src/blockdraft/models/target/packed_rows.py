"""The rows of a forward over pages: from a plan, and what was computed back in its order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.cache.pages import Pages
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.kernels.interface import Span
from blockdraft.models.layers.tensors import joined
from blockdraft.models.target.interface import RowFeatures

_NO_PLACES: Mapping[int, int] = {}
"""Every position has its own slot."""


@dataclass(slots=True)
class PackedRows:
    """The rows of one forward: where they stand, where their K/V go, whose logits are wanted."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    """For each span its row of the ForwardPlan."""
    keys: list[int] = field(default_factory=list)
    """For each span its sequence."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(
        self,
        pages: Pages,
        key: int,
        token_ids: Sequence[int],
        start: int,
        num_wanted: int,
        owner: int = 0,
        places: Mapping[int, int] = _NO_PLACES,
    ) -> None:
        """Add tokens of a sequence from position `start` on, the last `num_wanted` with logits.

        places: of a branch, see _Path.
        """
        first, end = len(self), start + len(token_ids)
        path_slots = pages.slots_at(key, [at for p, at in places.items() if p < end])
        page_ids = pages.page_ids(key)
        self.spans.append(Span(first, len(token_ids), start, end, page_ids, path_slots))
        self.owners.append(owner)
        self.keys.append(key)
        self.token_ids += token_ids
        self.positions += range(start, end)
        self.slots += pages.slots_at(key, [places.get(p, p) for p in range(start, end)])
        self.wanted += range(len(self) - num_wanted, len(self))

    def by_owner(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each owner with its part of values [rows, ..]: its rows follow each other."""
        num_rows: dict[int, int] = {}
        for owner, span in zip(self.owners, self.spans, strict=True):
            num_rows[owner] = num_rows.get(owner, 0) + span.num_rows
        parts = torch.split(values, list(num_rows.values()))
        yield from zip(num_rows, parts, strict=True)


def pack(plan: ForwardPlan, pages: Pages, max_rows: int) -> Iterator[PackedRows]:
    """Forwards of at most `max_rows` rows, in order; what is longer is cut."""
    rows = PackedRows()
    for owner, planned in enumerate(plan):
        key, num_left = planned.row.sequence.key, planned.num_positions
        for path in _paths(planned):
            start, token_ids = path.start, path.token_ids
            while token_ids:
                if len(rows) == max_rows:
                    yield rows
                    rows = PackedRows()
                num = min(max_rows - len(rows), len(token_ids))
                # Nodes come last, and all of them are wanted.
                num_wanted = min(num, max(0, num - (num_left - planned.num_logits)))
                rows.add(pages, key, token_ids[:num], start, num_wanted, owner, path.places)
                start, token_ids, num_left = start + num, token_ids[num:], num_left - num
    if len(rows):
        yield rows


@dataclass(frozen=True, slots=True)
class _Path:
    """Tokens at positions from `start` on that are computed as one span.

    places: where a branch of a tree lies in the KV cache. It has the same positions as the first
    path, whose slots are taken, so its tokens have slots behind them: for each position between
    anchor and leaf, rising, the position whose slot holds the branch's keys and values.
    """

    token_ids: list[int]
    start: int
    places: Mapping[int, int]


def _paths(planned: PlannedRow) -> Iterator[_Path]:
    """The new tokens and the first path of the tree, then what each branch has of its own."""
    tree, new_ids = planned.tree, planned.row.new_ids
    first, *branches = tree.runs
    start = planned.row.sequence.num_cached
    yield _Path([*new_ids, *(tree.tokens[node] for node in first)], start, _NO_PLACES)
    base = start + len(new_ids)
    for nodes in branches:
        path = [*tree.path(tree.parents[nodes[0]]), *nodes]
        places = {base + depth: base + tree.order[node] for depth, node in enumerate(path)}
        first_position = base + tree.depths[nodes[0]] - 1
        yield _Path([tree.tokens[node] for node in nodes], first_position, places)


def row_features(planned: PlannedRow, parts: list[Tensor]) -> RowFeatures | None:
    """A row's features, from the parts [positions, ..] of the forwards that ran it, path by path.

    None if they computed none.
    """
    if not parts:
        return None
    values = joined(parts)
    if planned.tree.is_chain:
        return RowFeatures(values)
    num_new = len(planned.row.new_ids)
    places = [*range(num_new), *(num_new + place for place in planned.tree.order)]
    return RowFeatures(values, places)


def order_of_logits(plan: ForwardPlan) -> list[int] | None:
    """For each of the plan's logits its index among those of the forwards, which go path by path.

    None if no row has branches: the two orders are the same.
    """
    if all(planned.tree.is_chain for planned in plan):
        return None
    order: list[int] = []
    for planned in plan:
        first_node = len(order) + planned.num_logits - len(planned.tree)
        order += range(len(order), first_node)
        order += [first_node + place for place in planned.tree.order]
    return order
