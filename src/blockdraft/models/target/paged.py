"""Many sequences in one forward: packed in one row, their K/V in pages."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import Int8KV, PagedKV
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE, Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.kernels.backends import backend_for, reference_for
from blockdraft.kernels.interface import Backend
from blockdraft.models.attention.paged import PAGED_ATTENTION, give_plan
from blockdraft.models.attention.plan import AttentionPlan, PlanInForce, SpreadPlan
from blockdraft.models.layers.fused import speed_up
from blockdraft.models.layers.graphs import Graphs
from blockdraft.models.layers.recurrent import is_recurrent
from blockdraft.models.target.direct import direct_forward
from blockdraft.models.target.exact import TAIL_SPLIT, Split
from blockdraft.models.target.interface import TargetOutput
from blockdraft.models.target.packed_rows import PackedRows, order_of_logits, pack, row_features
from blockdraft.models.target.paged_states import PagedStates
from blockdraft.models.target.paged_support import layer_shapes
from blockdraft.models.target.spread import layer_devices
from blockdraft.models.target.static_forward import StaticForwards, StaticOutput, static_forwards
from blockdraft.models.target.transformers import TransformersTarget, filled

_CHECKED, _NEIGHBOR = -1, -2
"""Keys of the sequences of the self-test; those of the engine are not negative."""
DEFAULT_STATE_BYTES = 2**28
NEIGHBOR_LEN = 2 * PAGE_SIZE + 3
"""Tokens of the second one, where the context holds as many."""

_NO_CACHE: Mapping[str, Any] = {"use_cache": False}
"""Arguments for a model whose memory lies in pages alone."""


class PagedTarget(TransformersTarget):
    """A transformers model that runs all rows of a batch in one forward. See TransformersTarget.

    `memory` says what fits. The nodes of a tree lie in the sequence's own pages behind its tokens,
    in the order in which they are computed, until commit says which stay. Each branch is a span
    that reads the keys of its path where they lie, in the order and the tiles of plain decoding.

    A model with recurrent layers takes chains only. Each sequence has states beside its pages, and
    rows of all sequences share the linear layers; see PagedStates.

    state_bytes: for states at the borders of pages that are kept for other requests.
    kv_in_int8: keys and values are rounded. Where no kernel takes these, attention is the
    reference's.

    Raises:
        NotPaged: the model needs the sequential path.
        ModelError: the model is not supported at all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: Pages,
        *,
        layer_ids: Sequence[int] = (),
        exact: bool = True,
        keep_weights: bool = True,
        state_bytes: int = DEFAULT_STATE_BYTES,
        kv_in_int8: bool = False,
    ) -> None:
        shapes = layer_shapes(model)
        devices = layer_devices(model, len(shapes))
        head_dims = {head_dim for _, head_dim in shapes if head_dim}
        self._backends = {
            device: _backend(model.dtype, device, head_dims, kv_in_int8)
            for device in (model.device, *devices)
        }
        self._keep_weights = keep_weights
        self._in_force = PlanInForce()
        super().__init__(model, PAGED_ATTENTION, layer_ids=layer_ids, exact=exact)
        self.memory: Pages = memory
        memory.long_from = self._rotation.long_from
        kv = Int8KV if kv_in_int8 else PagedKV
        self.kv = kv(shapes, memory.num_pages, dtype=model.dtype, device=devices)
        is_spread = len(self._backends) > 1
        self._direct = None if is_spread else direct_forward(model, self.kv, self.layer_ids)
        self._states = PagedStates(model, memory, state_bytes) if is_recurrent(model) else None
        self.takes_trees = self._states is None
        self._static: StaticForwards | None = None
        # Some models for text and images compute the logits of all rows.
        self._chooses_rows = "logits_to_keep" in signature(model.forward).parameters

    def use_static_shapes(self) -> bool:
        """Run forwards of few rows in fixed shapes, on a card as CUDA graphs, with the same bits.

        Returns:
            False if the model has recurrent layers, rotations that differ from text to text, or
            layers on several devices, or the backend cannot, and nothing changes.
        """
        device = self.device
        is_spread = len(self._backends) > 1
        if self._states is None and self._rotation.long_from is None and not is_spread:
            self._static = static_forwards(
                self._backends[device], self.kv, self._static_forward, device
            )
        return self._static is not None

    @property
    def graphs(self) -> Graphs[StaticOutput] | None:
        """Of its forwards; None if their shapes are not fixed."""
        return None if self._static is None else self._static.graphs

    def _prepare(self, attention: str) -> None:
        super()._prepare(attention)
        self._undo.enter_context(give_plan(self.model, self._in_force))

    def _speed_up(self) -> ExitStack:
        return speed_up(self.model, self._in_force, keep_weights=self._keep_weights)

    @torch.inference_mode()
    def forward(self, plan: ForwardPlan) -> TargetOutput:
        """See Target.forward. The scheduler has reserved the pages."""
        with_features = plan.wants_features
        if self._states is not None:
            for planned in plan:
                self._states.begin(planned)
        features: list[list[Tensor]] = [[] for _ in plan]
        packed, order = list(pack(plan, self.memory, self.rule.max_rows)), order_of_logits(plan)
        if order is not None and len(packed) == 1:
            # The head puts them in order, which a copy of logits would do later.
            packed[0].wanted, order = [packed[0].wanted[place] for place in order], None
        found = _Logits(sum(planned.num_logits for planned in plan), len(packed), order)
        for rows in packed:
            own_logits, own_features = self._run(rows, with_features=with_features)
            found.take(own_logits)
            if own_features is not None:
                for owner, part in rows.by_owner(own_features):
                    features[owner].append(part)
        of_rows = [
            row_features(planned, parts) for planned, parts in zip(plan, features, strict=True)
        ]
        assert found.values is not None
        return TargetOutput(found.values, of_rows, num_forwards=len(packed))

    def _run(
        self, rows: PackedRows, *, with_features: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the wanted rows and features of all rows of one forward."""
        device, num_rows = self.device, len(rows)
        if self._static is not None and (output := self._static(rows)) is not None:
            self._captured = output.captured
            features = self._take_features(num_rows, with_features)
            return output.logits[: len(rows.wanted)], features
        inputs = torch.tensor(self._filled(rows), device=device)
        wanted, plan = self._head_rows(rows.wanted), self._plan(rows, inputs[2])
        if self._rotation.long_from is not None:
            self._rotation.follow(self._long_rows(rows), inputs.shape[1], device)
        if self._direct is not None and self._direct.may_run():
            logits, found = self._direct(plan, inputs, wanted, max(rows.positions) + 1)
            features = found[:num_rows] if with_features and self.layer_ids else None
        else:
            cache, which = self._cache_arguments(rows), torch.tensor(wanted, device=device)
            logits = self._by_transformers(plan, inputs[:1], inputs[1:2], which, cache)
            features = self._take_features(num_rows, with_features)
        return logits[: len(rows.wanted)], features

    def _plan(self, rows: PackedRows, slots: Tensor) -> AttentionPlan:
        plans = {
            device: AttentionPlan(
                backend, self.kv, rows.spans, slots.to(device), self.rule.row_multiple
            )
            for device, backend in self._backends.items()
        }
        return SpreadPlan(plans) if len(plans) > 1 else plans[self.device]

    def _long_rows(self, rows: PackedRows) -> Iterator[bool]:
        """Of each row whether its text is a long one."""
        for key, span in zip(rows.keys, rows.spans, strict=True):
            yield from repeat(self.memory.is_long(key), span.num_rows)

    def _static_forward(
        self, plan: AttentionPlan, token_ids: Tensor, positions: Tensor, wanted: Tensor
    ) -> StaticOutput:
        logits = self._by_transformers(plan, token_ids, positions, wanted, _NO_CACHE)
        captured, self._captured = self._captured, {}
        return StaticOutput(logits, captured)

    def _cache_arguments(self, rows: PackedRows) -> Mapping[str, Any]:
        """None for a model whose memory lies in pages alone."""
        if self._states is None:
            return _NO_CACHE
        num_rows = [span.num_rows for span in rows.spans]
        return self._states.arguments(list(zip(rows.keys, num_rows, strict=True)))

    def _by_transformers(
        self,
        plan: AttentionPlan,
        token_ids: Tensor,
        positions: Tensor,
        wanted: Tensor,
        cache: Mapping[str, Any],
    ) -> Tensor:
        """Logits of the rows `wanted` by the model's own forward; see DirectForward.__call__."""
        given: dict[str, Any] = {"logits_to_keep": wanted} if self._chooses_rows else {}
        with self._in_force.follow(plan):
            logits: Tensor = self.model(
                input_ids=token_ids, position_ids=positions, **given, **cache
            ).logits[0]
        return logits if self._chooses_rows else logits[wanted]

    def _filled(self, rows: PackedRows) -> list[list[int]]:
        """Token ids, positions and slots of all rows.

        Rows that only fill up repeat the last one, and write to the scratch page.
        """
        num_fill = filled(len(rows), self.rule) - len(rows)
        return [
            rows.token_ids + rows.token_ids[-1:] * num_fill,
            rows.positions + rows.positions[-1:] * num_fill,
            rows.slots + [SCRATCH_PAGE * PAGE_SIZE] * num_fill,
        ]

    def _head_rows(self, wanted: list[int]) -> list[int]:
        """The head is a linear layer like the others; it runs on a few rows even if none counts."""
        return wanted + [0] * (filled(max(len(wanted), 1), self.rule) - len(wanted))

    @property
    def _num_memory_tokens(self) -> int:
        return self.memory.num_tokens

    def keep(self, planned: PlannedRow, nodes: Sequence[int]) -> None:
        """See Target.keep. The path moves to its places; all behind it is written before read."""
        # Where many sequences run, most keep no node: to enter inference mode would take longer
        # than all the rest.
        if self._states is not None:
            with torch.inference_mode():
                self._states.keep(planned, nodes)
        if nodes:
            self._move(planned, nodes)

    @torch.inference_mode()
    def _move(self, planned: PlannedRow, nodes: Sequence[int]) -> None:
        """Move the keys and values of a path to its places."""
        sequence, order = planned.row.sequence, planned.tree.order
        base = sequence.num_cached + len(planned.row.new_ids)
        moves = [(order[node], place) for place, node in enumerate(nodes) if order[node] != place]
        if moves:
            slots, to = (
                self.memory.slots_at(sequence.key, [base + place for place in places])
                for places in zip(*moves, strict=True)
            )
            self.kv.move(slots, to)

    def truncate(self, key: int, length: int) -> None:
        """See Target.truncate. Slots behind the end are written again before they are read."""
        if self._states is not None:
            self._states.go_back(key, length)

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self.memory.close(key)
        if self._states is not None:
            self._states.close(key)

    @torch.inference_mode()
    def state_bytes(self) -> int:
        """Of the recurrent states of a sequence; see `recurrent.copies_states` for candidates."""
        if self._states is None:
            return 0
        with self._opened(_CHECKED, 1):
            rows = PackedRows()
            rows.add(self.memory, _CHECKED, [0], 0, 0)
            self._run(rows)
            return self._states.num_bytes(_CHECKED)

    @torch.inference_mode()
    def logits_of_split(self, token_ids: Sequence[int], split: Split) -> Tensor:
        """See TransformersTarget.logits_of_split. Every second forward has other sequences too."""
        with self._opened(_CHECKED, len(token_ids)), self._opened(_NEIGHBOR, self._neighbor_len):
            return self._logits_behind(token_ids, 0, split)

    @torch.inference_mode()
    def logits_at_border(self, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """See TransformersTarget.logits_at_border; the pages before are copies of one."""
        tail, end = sum(TAIL_SPLIT), start + len(token_ids)
        with self._opened(_CHECKED, end), self._opened(_NEIGHBOR, self._neighbor_len):
            first, whole = PackedRows(), PackedRows()
            first.add(self.memory, _CHECKED, token_ids[:PAGE_SIZE], 0, 0)
            self._run(first)
            self.kv.repeat_first(self.memory.page_ids(_CHECKED))
            if self._states is not None:
                self._states.pretend(_CHECKED, start, end - tail)
            whole.add(self.memory, _CHECKED, token_ids, start, tail)
            together, _ = self._run(whole)
            self.truncate(_CHECKED, end - tail)
            return together, self._logits_behind(token_ids[-tail:], end - tail, TAIL_SPLIT)

    @property
    def _neighbor_len(self) -> int:
        return min(NEIGHBOR_LEN, self.max_context)

    @contextmanager
    def _opened(self, key: int, num_tokens: int) -> Iterator[None]:
        # Long texts and others in one forward, where they differ.
        longest = 2**31 if key == _NEIGHBOR else 0
        self.memory.open(key, [0], with_context=False, longest=longest)
        try:
            if not self.memory.reserve(key, num_tokens):
                raise ModelError(
                    f"the KV cache of {self.memory.num_tokens} tokens is too small to test the "
                    "model; give more --memory"
                )
            # The last split left what this one writes, and who reads a place too early finds it.
            self.kv.clear_begun(self.memory.slots(key, 0, num_tokens))
            yield
        finally:
            self.close(key)

    def _logits_behind(self, token_ids: Sequence[int], start: int, split: Split) -> Tensor:
        logits: list[Tensor] = []
        done = 0
        for index, length in enumerate(split):
            own, rows = token_ids[done : done + length], PackedRows()
            if index % 2:
                rows.add(self.memory, _NEIGHBOR, [own[0]] * 3, self._neighbor_len - 3, 0)
            rows.add(self.memory, _CHECKED, own, start + done, length)
            if index % 2:
                rows.add(self.memory, _NEIGHBOR, own[:1], 5, 0)
            logits.append(self._run(rows)[0])
            done += length
        return torch.cat(logits)


class _Logits:
    """The logits of a plan, put in order as its forwards compute them.

    Of large vocabularies they take hundreds of MiB, so none are held twice but those of a forward.

    order: of each its index among those of the forwards, or None if that is the same.
    """

    def __init__(self, num: int, num_forwards: int, order: list[int] | None) -> None:
        self.values: Tensor | None = None
        self._num, self._num_forwards, self._num_taken = num, num_forwards, 0
        self._places = None if order is None else torch.tensor(order).argsort()

    def take(self, logits: Tensor) -> None:
        """Take those of the next forward, [wanted, V]."""
        if self._num_forwards == 1:
            self.values = logits
            return
        if self.values is None:
            self.values = logits.new_empty((self._num, logits.shape[1]))
        own = slice(self._num_taken, self._num_taken + logits.shape[0])
        if self._places is None:
            self.values[own] = logits
        else:
            self.values[self._places[own].to(logits.device)] = logits
        self._num_taken = own.stop


def _backend(
    dtype: torch.dtype, device: torch.device, head_dims: Collection[int], in_int8: bool
) -> Backend:
    """What computes attention over pages that may be in int8."""
    backend = backend_for(dtype, device, head_dims)
    is_right = backend.takes_int8_pages or not in_int8
    return backend if is_right else reference_for(dtype, device)
