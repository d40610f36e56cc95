"""What a backend offers: the operations of a decoder layer on one device, in one precision.

A backend gives every row the bits that it has alone, if forwards keep to its RowRule. All backends
pass the same tests: equal to the reference (`kernels.torch`) within rounding, and invariant in rows
to the bit. Model code gets one from `backends.backend_for` and knows none by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.recurrence_interface import Recurrence, RecurrentStep
from blockdraft.kernels.weights import AnyWeight, Norm

TILE = 64
"""Tokens of a page of keys and values, and keys of a tile of attention by native kernels."""
Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of each row, [.., rows, 1, head_dim]: halves of a head turn by the same
angles, and the sign of the rotated first half is in the sine."""
Words = NDArray[np.uint64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowRule:
    """What forwards must keep to so that a row's bits do not depend on its company.

    Forwards run on a multiple of `row_multiple` rows, at most `max_rows`. Attention multiplies
    `key_tile` keys at a time. `runs_on_vectors`: elementwise operations must get whole vectors of
    values, and linear layers of libraries are tried and run in blocks, see
    `models.layers.elementwise` and `models.layers.row_blocks`. Products of up to `small_work`
    multiplications run in another kernel. `replaces_norms`: a model's norms are the backend's,
    since they depend on the number of rows, or for their time.
    """

    row_multiple: int
    max_rows: int
    key_tile: int
    runs_on_vectors: bool = False
    small_work: int = 0
    replaces_norms: bool = False

    def for_weights_from(self, num_weights: int) -> "RowRule":
        """The rule for a model whose smallest linear layer has so many weights."""
        multiple = self.row_multiple
        while multiple * num_weights <= self.small_work:
            multiple *= 2
        return replace(self, row_multiple=multiple)


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How products of queries and keys become weights: scale, soft cap, sink logits [heads]."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one sequence in a forward: `num_rows` from row `first` on.

    They stand at the positions `start`, `start + 1`, ... and may see keys before position `end`,
    which lie in the pages `page_ids`, position 0 in the first one. The last of them lie at
    `path_slots` instead, in the order of their positions: a branch of a tree is a span of its own,
    and all branches of a sequence have the same positions.
    """

    first: int
    num_rows: int
    start: int
    end: int
    page_ids: Sequence[int]
    path_slots: Sequence[int] = ()

    @property
    def path_start(self) -> int:
        """The first position whose key lies at a slot of its own; `end` if there is none."""
        return self.end - len(self.path_slots)

    @property
    def seen_page_ids(self) -> Sequence[int]:
        """The pages that the rows may look at."""
        return self.page_ids[: -(-self.end // TILE)]


class Linear(Protocol):
    """A linear layer, made once from its weight.

    keeps_rows: any number of rows gives each the bits that it has alone; without, it must be tried.
    """

    shape: torch.Size
    """Outputs and inputs."""
    dtype: torch.dtype
    keeps_rows: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a pre-norm decoder layer with rotated heads and a gated MLP is made of.

    qkv: queries, keys and values side by side; gate_up: likewise. head_norms: of queries and keys,
    before they are rotated. num_heads: of queries, keys and values.
    """

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norm: Norm
    mlp_norm: Norm
    head_norms: tuple[Norm, Norm] | None
    num_heads: tuple[int, int, int]
    head_dim: int
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What makes logits of the last layer's output."""

    norm: Norm
    linear: Linear


class KVPages(Protocol):
    """Keys and values of all layers in pages.

    pools: [2, kv_heads, pages, TILE, head_dim] each. scales: of a pool in int8 what one of its
    numbers counts, [2, kv_heads, pages, TILE, 1], float32; else None.
    """

    @property
    def pools(self) -> Sequence[Tensor]:
        """Of each layer."""

    @property
    def scales(self) -> Sequence[Tensor | None]:
        """Of each layer."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [kv_heads, n, head_dim] at slots [n]."""

    def gather(
        self, layer: int, page_ids: Tensor, moves: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """[2, kv_heads, n * TILE, head_dim] of pages [n], valid until the next call.

        moves: slots [m], and the places in what is returned where their keys and values go.
        """


class WholeLayer(Protocol):
    """A decoder layer that runs in one call, by the backend that made it."""


class LayerStack(Protocol):
    """Whole layers one behind another, over the pages that they were bound to."""

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        seen: Sequence["PagedAttention"],
        wanted: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[.., size] -> the outputs that are kept [rows, kept, size], and the last one [.., size].

        rotation: cos and signed sin, [rows, head_dim] each. seen: of each kind of layer. wanted: of
        hidden [1, rows, size] the n rows whose last output is returned, [1, n, size]; None: all.
        With a head that is their logits, [1, n, V].
        """


class PagedAttention(Protocol):
    """Attention of the rows of a forward that see certain ranges of keys."""

    def attend(
        self, kv: KVPages, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Store a layer's keys and values, then attend.

        query: [heads, rows, head_dim]; key, value: [kv_heads, rows, head_dim].
        Returns [rows, heads, head_dim]; rows of no span are undefined but finite.
        """

    def run_layer(
        self,
        whole: WholeLayer,
        kv: KVPages,
        layer: int,
        hidden: Tensor,
        rotation: Rotation,
        scoring: Scoring,
    ) -> Tensor | None:
        """A whole layer, [.., size] -> the same; None where the backend cannot."""
        return None


class PagedRows(Protocol):
    """The rows of a forward and their pages, ready for attention."""

    def seeing(self, ranges: Tensor) -> PagedAttention:
        """Attention in which each row sees the keys from the first up to, without, the second.

        ranges: [rows of the spans, 2], positions.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PagedTables:
    """Where the keys of each row of a forward lie, int64; see `kernels.tables.TableEntries`.

    rows: [3 * rows]. page_ids, path_slots: as long as need be.
    """

    rows: Tensor
    page_ids: Tensor
    path_slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The largest scores of some rows, the largest first, equal ones in any order.

    values: [rows, k], float32. places: [rows, k]. totals: [rows], of exp(score - largest) over the
    whole row; not meant where the largest is infinite. A NaN counts as minus infinity.
    """

    values: NDArray[np.float32]
    places: Ids
    totals: NDArray[np.float32]


class Backend(Protocol):
    """The operations of one device in one precision; without more, by nothing but torch's."""

    @property
    def in_hardware(self) -> bool:
        """False if the device only emulates the precision, so that another one is faster."""
        return True

    @property
    def packs(self) -> bool:
        """True if linear layers compute from copies of their weights, as large as these."""
        return False

    @property
    def multiplies_int8(self) -> bool:
        """True if products with an Int8Weight take less time than with what it was made of."""
        return False

    @property
    def multiplies_groups(self) -> bool:
        """True if products with a GroupWeight read its packed numbers; else they unpack them."""
        return False

    @property
    def reads_pages(self) -> bool:
        """True if attention reads pages where they lie; else it copies them side by side."""
        return False

    @property
    def takes_int8_pages(self) -> bool:
        """True if attention, and so a whole layer, takes pages in int8."""
        return True

    @property
    def rule(self) -> RowRule:
        """What forwards must keep to.

        Raises:
            ModelError: no rule is known for this precision.
        """

    def attends_over(self, head_dim: int) -> bool:
        """True if attention, and so a whole layer, knows heads of this size."""
        return True

    def gates(self, activation: object) -> bool:
        """True if `gate` is one operation for this activation."""
        return False

    def linear(self, weight: AnyWeight, bias: Tensor | None = None) -> Linear:
        """The linear layer of `weight` [outputs, inputs] and `bias` [outputs], as they are now."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """[..., size] -> the same, normed."""

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + residual, and the norm of that."""

    def rotate_(
        self,
        heads: Tensor,
        num_heads: tuple[int, int, int],
        rotation: Rotation,
        norms: tuple[Norm, Norm] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [..., rows, heads, head_dim], the first two rotated.

        num_heads: of each, in this order. norms: of queries and keys, before. May overwrite
        `heads`, and what it returns may lie there.
        """

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """activation(gate) * up of [..., 2 * size], gates first -> [..., size]."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Attention of one sequence over keys that lie side by side.

        query: [heads, rows, head_dim]; key, value: [kv_heads, keys, head_dim]; bias: added to the
        scores, [1 or heads, rows, keys]. Returns [rows, heads, head_dim].
        """

    def paged_rows(self, spans: Sequence[Span], slots: Tensor, row_multiple: int) -> PagedRows:
        """Get ready for attention over pages.

        spans: they follow each other from row 0 on. slots: [rows], where keys and values go; rows
        behind the spans only fill up, to a multiple of `row_multiple`.
        """

    def rows_of_tables(self, slots: Tensor, tables: PagedTables) -> PagedRows | None:
        """The same, with every row in a span; None if the backend reads no tables.

        They are read when attention is computed, so other numbers may have been written by then.
        """
        return None

    def recurrent_step(self, rule: Recurrence) -> RecurrentStep | None:
        """A recurrence for rows of many sequences; None where the model's own step has to do.

        torch's operations on few values would have bits that depend on their number.
        """
        return None

    def layer(self, parts: LayerParts) -> WholeLayer | None:
        """The layer in one call, over pages; None where that cannot be."""
        return None

    def largest(self, scores: Tensor, num: int) -> Largest:
        """The `num` largest of each row of scores [rows, n], or all n."""

    def store_context(
        self, kv: KVPages, slots: Tensor, projected: Tensor, key_norms: Norm, rotation: Rotation
    ) -> None:
        """Store keys, normed and rotated, and values of all layers, which have heads alike.

        slots: [tokens]. projected: [tokens, layers, 2, kv_heads, head_dim], keys before values; may
        be overwritten. key_norms: a weight [layers, head_dim] that rounds first. rotation: cos and
        signed sin, [tokens, 1, head_dim] each.
        """

    def stack(
        self,
        layers: Sequence[WholeLayer],
        kv: KVPages,
        scorings: Sequence[Scoring],
        kinds: Sequence[int],
        kept: Sequence[int],
        head: HeadParts | None = None,
    ) -> LayerStack | None:
        """Layers of this backend, one for each of the pages' pools, in one call.

        kinds: of each layer, the place of its attention among those that a call gives. kept:
        numbers of layers whose outputs are wanted, rising. head: behind the last layer. None where
        that cannot be.
        """
        return None


class RandomWords(Protocol):
    """The words of numpy's Philox generator at random access.

    A stream is three words: the two of the key, and the second of the counter.
    """

    def words_at(self, streams: Words, counts: Ids, ids: Ids) -> Words:
        """Words number `ids` [n]: the first `counts[0]` of the first of streams [k, 3], and so on.

        Raises:
            ValueError: shapes do not fit each other, or a number is negative.
        """

    def words_below(
        self, stream: Words, num: int, limit: int, capacity: int
    ) -> tuple[Ids, Words] | None:
        """Which of the first `num` words of a stream [3] are below `limit`, ascending, and they.

        None if a thread finds more than `capacity`.

        Raises:
            ValueError: as for `words_at`.
        """
