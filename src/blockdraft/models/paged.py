"""Many sequences in one forward: packed in one row, their K/V in pages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE, Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.models.attention.paged import (
    PAGED_ATTENTION,
    Span,
    follow,
    kernels_for_pages,
    plan_attention,
)
from blockdraft.models.exact import TAIL_SPLIT, Split
from blockdraft.models.paged_support import layer_shapes
from blockdraft.models.target import TargetOutput
from blockdraft.models.transformers_target import TransformersTarget, filled

_PROBE, _CROWD = -1, -2
"""Keys of the sequences of the self-test; those of the engine are not negative."""
CROWD_LEN = 2 * PAGE_SIZE + 3


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens of one sequence that one forward computes, the last `num_choices` with logits."""

    key: int
    token_ids: list[int]
    start: int
    num_choices: int
    row_index: int = 0


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
        super().__init__(model, PAGED_ATTENTION, layer_ids=layer_ids, exact=exact)
        self.memory: Pages = memory
        self.kv = PagedKV(shapes, memory.num_pages, dtype=model.dtype, device=model.device)
        self._kernels = kernels_for_pages(self.kv)

    @torch.inference_mode()
    def forward(self, plan: ForwardPlan) -> TargetOutput:
        """See Target.forward. The scheduler has reserved the pages."""
        stretches = [
            _Stretch(
                planned.row.sequence.key,
                planned.token_ids,
                planned.row.sequence.num_cached,
                planned.num_logits,
                index,
            )
            for index, planned in enumerate(plan)
        ]
        with_features = plan.wants_features
        logits: list[Tensor] = []
        features: list[list[Tensor]] = [[] for _ in plan]
        for packed in _packed(stretches, self.rule.max_rows):
            piece_logits, piece_features = self._run(packed, with_features=with_features)
            logits.append(piece_logits)
            if piece_features is not None:
                parts = torch.split(piece_features, [len(s.token_ids) for s in packed])
                for stretch, part in zip(packed, parts, strict=True):
                    features[stretch.row_index].append(part)
        joined = [_joined(parts) for parts in features]
        return TargetOutput(torch.cat(logits), joined, num_forwards=len(logits))

    def _run(
        self, packed: list[_Stretch], *, with_features: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the wanted rows and features of all rows of one forward."""
        ids, positions, slots, wanted = self._layout(packed)
        device = self.model.device
        inputs = torch.tensor([ids, positions, slots], device=device)
        spans, first = [], 0
        for stretch in packed:
            num, page_ids = len(stretch.token_ids), self.memory.page_ids(stretch.key)
            spans.append(Span(first, num, stretch.start, page_ids))
            first += num
        self.kv.clear_begun(slots[:first])
        plan = plan_attention(self.kv, spans, inputs[2], self.rule.row_multiple, self._kernels)
        with follow(plan):
            logits = self.model(
                input_ids=inputs[:1],
                position_ids=inputs[1:2],
                use_cache=False,
                logits_to_keep=torch.tensor(self._head_rows(wanted), device=device),
            ).logits[0]
        return logits[: len(wanted)], self._take_features(first, with_features)

    def _layout(self, packed: list[_Stretch]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Token ids, positions and slots of all rows, and the rows whose logits are wanted.

        Rows that only fill up repeat the last one, and write to the scratch page.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for stretch in packed:
            end = stretch.start + len(stretch.token_ids)
            ids += stretch.token_ids
            positions += range(stretch.start, end)
            slots += self.memory.slots(stretch.key, stretch.start, end)
            wanted += range(len(ids) - stretch.num_choices, len(ids))
        num_fill = filled(len(ids), self.rule) - len(ids)
        ids += ids[-1:] * num_fill
        positions += positions[-1:] * num_fill
        slots += [SCRATCH_PAGE * PAGE_SIZE] * num_fill
        return ids, positions, slots, wanted

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
        with self._opened(_PROBE, len(token_ids)), self._opened(_CROWD, CROWD_LEN):
            return self._logits_behind(token_ids, 0, split)

    @torch.inference_mode()
    def logits_at_border(self, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """See TransformersTarget.logits_at_border; the pages before are copies of one."""
        tail, end = sum(TAIL_SPLIT), start + len(token_ids)
        with self._opened(_PROBE, end), self._opened(_CROWD, CROWD_LEN):
            self._run([_Stretch(_PROBE, list(token_ids[:PAGE_SIZE]), 0, 0)])
            self.kv.repeat_first(self.memory.page_ids(_PROBE))
            together, _ = self._run([_Stretch(_PROBE, list(token_ids), start, tail)])
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
        logits, done = [], 0
        for index, length in enumerate(split):
            own = list(token_ids[done : done + length])
            packed = [_Stretch(_PROBE, own, start + done, length)]
            if index % 2:
                packed.insert(0, _Stretch(_CROWD, own[:1] * 3, CROWD_LEN - 3, 0))
                packed.append(_Stretch(_CROWD, own[:1], 5, 0))
            logits.append(self._run(packed)[0])
            done += length
        return torch.cat(logits)


def _packed(stretches: Sequence[_Stretch], max_rows: int) -> Iterator[list[_Stretch]]:
    """Forwards of at most `max_rows` rows, in order; what does not fit is cut."""
    packed: list[_Stretch] = []
    room = max_rows
    for stretch in stretches:
        rest: _Stretch | None = stretch
        while rest is not None:
            if not room:
                yield packed
                packed, room = [], max_rows
            part, rest = _cut(rest, room)
            packed.append(part)
            room -= len(part.token_ids)
    if packed:
        yield packed


def _cut(stretch: _Stretch, room: int) -> tuple[_Stretch, _Stretch | None]:
    """The first `room` tokens, and the others if there are more."""
    num_behind = len(stretch.token_ids) - room
    if num_behind <= 0:
        return stretch, None
    return (
        replace(
            stretch,
            token_ids=stretch.token_ids[:room],
            num_choices=max(0, stretch.num_choices - num_behind),
        ),
        replace(
            stretch,
            token_ids=stretch.token_ids[room:],
            start=stretch.start + room,
            num_choices=min(stretch.num_choices, num_behind),
        ),
    )


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
