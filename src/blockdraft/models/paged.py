"""Many sequences in one forward: packed in one row, their K/V in pages."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE, Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import Span
from blockdraft.models.attention.paged import PAGED_ATTENTION, give_plan
from blockdraft.models.attention.plan import AttentionPlan, PlanInForce
from blockdraft.models.exact import TAIL_SPLIT, Split
from blockdraft.models.fused import speed_up
from blockdraft.models.paged_support import layer_shapes
from blockdraft.models.target import TargetOutput
from blockdraft.models.transformers_target import TransformersTarget, filled

_PROBE, _NEIGHBOR = -1, -2
"""Keys of the sequences of the self-test; those of the engine are not negative."""
NEIGHBOR_LEN = 2 * PAGE_SIZE + 3


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

    def __len__(self) -> int:
        return len(self.token_ids)


class PagedTarget(TransformersTarget):
    """A transformers model that runs all rows of a batch in one forward. See TransformersTarget.

    `memory` says what fits. The rows of a plan are chains.

    Raises:
        NotPaged: the model needs the sequential path.
        ModelError: the model is not supported at all.
    """

    takes_trees = False

    def __init__(
        self,
        model: PreTrainedModel,
        memory: Pages,
        *,
        layer_ids: Sequence[int] = (),
        exact: bool = True,
    ) -> None:
        shapes = layer_shapes(model)
        self._in_force = PlanInForce()
        super().__init__(model, PAGED_ATTENTION, layer_ids=layer_ids, exact=exact)
        self.memory: Pages = memory
        self.kv = PagedKV(shapes, memory.num_pages, dtype=model.dtype, device=model.device)
        head_dims = {head_dim for _, head_dim in shapes}
        self._backend = backend_for(model.dtype, model.device, head_dims)

    def _prepare(self, attention: str) -> None:
        super()._prepare(attention)
        self._undo.enter_context(give_plan(self.model, self._in_force))

    def _speed_up(self) -> ExitStack:
        return speed_up(self.model, self._in_force)

    @torch.inference_mode()
    def forward(self, plan: ForwardPlan) -> TargetOutput:
        """See Target.forward. The scheduler has reserved the pages."""
        with_features = plan.wants_features
        logits: list[Tensor] = []
        features: list[list[Tensor]] = [[] for _ in plan]
        for rows in self._packed(plan):
            own_logits, own_features = self._run(rows, with_features=with_features)
            logits.append(own_logits)
            if own_features is not None:
                parts = torch.split(own_features, [span.num_rows for span in rows.spans])
                for owner, part in zip(rows.owners, parts, strict=True):
                    features[owner].append(part)
        joined = [_joined(parts) for parts in features]
        return TargetOutput(torch.cat(logits), joined, num_forwards=len(logits))

    def _packed(self, plan: ForwardPlan) -> Iterator[PackedRows]:
        """Forwards of at most as many rows as the rule allows, in order; what is longer is cut."""
        rows = PackedRows()
        for owner, planned in enumerate(plan):
            sequence, token_ids = planned.row.sequence, planned.token_ids
            first_wanted, done = len(token_ids) - planned.num_logits, 0
            while done < len(token_ids):
                if len(rows) == self.rule.max_rows:
                    yield rows
                    rows = PackedRows()
                end = min(done + self.rule.max_rows - len(rows), len(token_ids))
                num_wanted = max(0, end - max(done, first_wanted))
                start = sequence.num_cached + done
                self._add(rows, sequence.key, token_ids[done:end], start, num_wanted, owner)
                done = end
        if len(rows):
            yield rows

    def _add(
        self,
        rows: PackedRows,
        key: int,
        token_ids: Sequence[int],
        start: int,
        num_wanted: int,
        owner: int = 0,
    ) -> None:
        """Add tokens of a sequence from position `start` on, the last `num_wanted` with logits."""
        end = start + len(token_ids)
        rows.spans.append(Span(len(rows), len(token_ids), start, end, self.memory.page_ids(key)))
        rows.owners.append(owner)
        rows.token_ids += token_ids
        rows.positions += range(start, end)
        rows.slots += self.memory.slots(key, start, end)
        rows.wanted += range(len(rows) - num_wanted, len(rows))

    def _run(
        self, rows: PackedRows, *, with_features: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the wanted rows and features of all rows of one forward."""
        device, num_rows = self.model.device, len(rows)
        self.kv.clear_begun(rows.slots)
        inputs = torch.tensor(self._filled(rows), device=device)
        plan = AttentionPlan(self._backend, self.kv, rows.spans, inputs[2], self.rule.row_multiple)
        with self._in_force.follow(plan):
            logits = self.model(
                input_ids=inputs[:1],
                position_ids=inputs[1:2],
                use_cache=False,
                logits_to_keep=torch.tensor(self._head_rows(rows.wanted), device=device),
            ).logits[0]
        return logits[: len(rows.wanted)], self._take_features(num_rows, with_features)

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
        """See Target.keep. Slots behind the end are written again before they are read."""

    def truncate(self, key: int, length: int) -> None:
        """See Target.truncate; likewise nothing is to be done."""

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self.memory.close(key)

    @torch.inference_mode()
    def logits_of_split(self, token_ids: Sequence[int], split: Split) -> Tensor:
        """See TransformersTarget.logits_of_split. Every second forward has other sequences too."""
        with self._opened(_PROBE, len(token_ids)), self._opened(_NEIGHBOR, NEIGHBOR_LEN):
            return self._logits_behind(token_ids, 0, split)

    @torch.inference_mode()
    def logits_at_border(self, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """See TransformersTarget.logits_at_border; the pages before are copies of one."""
        tail, end = sum(TAIL_SPLIT), start + len(token_ids)
        with self._opened(_PROBE, end), self._opened(_NEIGHBOR, NEIGHBOR_LEN):
            first, whole = PackedRows(), PackedRows()
            self._add(first, _PROBE, token_ids[:PAGE_SIZE], 0, 0)
            self._run(first)
            self.kv.repeat_first(self.memory.page_ids(_PROBE))
            self._add(whole, _PROBE, token_ids, start, tail)
            together, _ = self._run(whole)
            return together, self._logits_behind(token_ids[-tail:], end - tail, TAIL_SPLIT)

    @contextmanager
    def _opened(self, key: int, num_tokens: int) -> Iterator[None]:
        self.memory.open(key, [0], with_context=False)
        try:
            if not self.memory.reserve(key, num_tokens):
                raise ModelError(
                    f"the K/V memory of {self.memory.num_tokens} tokens is too small to test the "
                    "model in; give more --memory"
                )
            yield
        finally:
            self.memory.close(key)

    def _logits_behind(self, token_ids: Sequence[int], start: int, split: Split) -> Tensor:
        logits: list[Tensor] = []
        done = 0
        for index, length in enumerate(split):
            own, rows = token_ids[done : done + length], PackedRows()
            if index % 2:
                self._add(rows, _NEIGHBOR, [own[0]] * 3, NEIGHBOR_LEN - 3, 0)
            self._add(rows, _PROBE, own, start + done, length)
            if index % 2:
                self._add(rows, _NEIGHBOR, own[:1], 5, 0)
            logits.append(self._run(rows)[0])
            done += length
        return torch.cat(logits)


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
