"""More planted faults, beside those of blockdraft.proof.faults. They wrap the system from outside.

Each is something that a real engine got wrong, or nearly.
"""

import copy
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from blockdraft.cache import pages as pages_module
from blockdraft.cache.kv import KVCache
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.cache.state_layer import StateLayer
from blockdraft.cache.states import PackedStates, StateCache
from blockdraft.core.plan import PlannedRow
from blockdraft.core.sequence import Row
from blockdraft.engine.scheduler import Scheduler
from blockdraft.models.attention.visibility import Visibility
from blockdraft.models.draft import convolution as draft_convolution
from blockdraft.models.draft import kernels as draft_kernels
from blockdraft.models.layers.recurrent import StepByStep
from blockdraft.models.target import paged as paged_module
from blockdraft.models.target.packed_rows import PackedRows
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.branches import Slot
from blockdraft.speculate.drafters.conditionals import Candidates
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.slots import SlotCandidates
from blockdraft.speculate.sampler import choose as choose_module
from blockdraft.speculate.sampler.choose import Choice
from blockdraft.speculate.sampler.logits import Place, Scores
from blockdraft.speculate.sampler.philox import Stream
from blockdraft.text.grammar import GrammarState


def noise_by_slot() -> AbstractContextManager[object]:
    """The noise belongs to the slot in the block instead of the absolute position."""

    def stream(place: Place) -> Stream:
        return Stream(place.sequence.seed, place.sequence.sample_index, place.num_ahead)

    return patch.object(Place, "stream", property(stream))


def one_noise_for_all_samples() -> AbstractContextManager[object]:
    """The n samples of a request share their noise."""

    def stream(place: Place) -> Stream:
        sequence = place.sequence
        return Stream(sequence.seed, 0, len(sequence.token_ids) + place.num_ahead)

    return patch.object(Place, "stream", property(stream))


_keep = SequentialTarget.keep


class CropOneTooFew(SequentialTarget):
    """After a rejection one rejected token stays in the cache."""

    def keep(self, planned: PlannedRow, nodes: Ids[int]) -> None:
        if not planned.tree.is_chain:
            _keep(self, planned, nodes)
            return
        cache = self._caches[planned.row.sequence.key]
        length = planned.row.sequence.num_cached + len(planned.row.new_ids) + len(nodes)
        cache.truncate(min(length + 1, cache.length))

    def _forward_row(self, planned: PlannedRow) -> tuple[Tensor, Tensor | None]:
        """As in the base class, without the assertion that would notice."""
        cache = self._caches.setdefault(planned.row.sequence.key, KVCache(len(self.layers)))
        if not planned.tree.is_chain:
            return self._run_paths(cache, planned)
        return self._run(cache, planned.token_ids, planned.num_choices)


def state_stays_behind() -> AbstractContextManager[object]:
    """A rejection crops keys and values only: recurrent states keep what the rejected ones did."""

    def go_back(layer: StateLayer, length: int) -> None:
        layer.num_steps = length

    return patch.object(StateLayer, "go_back", go_back)


def state_of_the_row_before() -> AbstractContextManager[object]:
    """A rejection leaves the state of one token fewer than was kept."""
    real = StateLayer.go_back

    def go_back(layer: StateLayer, length: int) -> None:
        was_kept = length - 1 in layer._copies or length - 1 in layer.steps_again
        earlier = length - 1 if length < layer.num_steps and was_kept else length
        real(layer, earlier)
        layer.num_steps = length

    return patch.object(StateLayer, "go_back", go_back)


def states_of_the_neighbor() -> AbstractContextManager[object]:
    """Every sequence of a forward goes on with the states of another one."""
    real = PackedStates.__init__

    def init(packed: PackedStates, spans: list[tuple[StateCache, int]]) -> None:
        caches = [cache for cache, _ in spans]
        turned = caches[1:] + caches[:1]
        real(packed, [(own, num) for own, (_, num) in zip(turned, spans, strict=True)])

    return patch.object(PackedStates, "__init__", init)


def scan_over_the_rows() -> AbstractContextManager[object]:
    """Rows are scanned together, as transformers does; the states stay those of single steps.

    Of mixers that no kernel runs.
    """
    real = StepByStep.__call__

    def call(mixer: StepByStep, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache = next(v for v in (*args, *kwargs.values()) if isinstance(v, StateCache))
        layer = cache.layers[mixer._mixer.layer_idx]
        before = copy.deepcopy(layer)
        num_real = cache.num_rows
        whole = mixer._own(hidden_states[:, :num_real], *args, **kwargs)
        vars(layer).update(vars(before))
        real(mixer, hidden_states, *args, **kwargs)
        fill = whole[:, -1:].expand(-1, hidden_states.shape[1] - num_real, -1)
        return torch.cat((whole, fill), dim=1)

    return patch.object(StepByStep, "__call__", call)


class AnchorInContext(DFlashDrafter):
    """The draft context also holds features for the anchor's position."""

    def committed(self, row: Row, token_ids: Ids[int], features: Tensor | None) -> None:
        assert features is not None
        super().committed(row, token_ids, torch.cat([features, features[-1:]]))


class ShiftedContext(DFlashDrafter):
    """The draft context has the right length, and each position the features of its neighbor."""

    def committed(self, row: Row, token_ids: Ids[int], features: Tensor | None) -> None:
        assert features is not None
        super().committed(row, token_ids, features.roll(1, dims=0))


class ContextOutlivesPages(DFlashDrafter):
    """The drafter is not told when a sequence is preempted: it believes its context is written."""

    def close(self, key: int) -> None:
        self.contexts.close(key)


Nodes = Callable[[PlannedRow, list[int]], list[int]]
"""The nodes that are kept, from those that should be."""


def other_branch(planned: PlannedRow, nodes: list[int]) -> list[int]:
    """A path of the same length that is not the right one, if the tree has one."""
    paths = [planned.tree.path(node) for node in range(len(planned.tree))]
    return next((path for path in paths if len(path) == len(nodes) and path != nodes), nodes)


def in_wrong_order(planned: PlannedRow, nodes: list[int]) -> list[int]:
    """The right nodes, from the last to the first."""
    return nodes[::-1]


def keeping(target_type: Any, choose: Nodes) -> AbstractContextManager[object]:
    """Let targets keep other nodes than those that they are told to."""
    real = target_type.keep

    def keep(target: Any, planned: PlannedRow, nodes: Ids[int]) -> None:
        real(target, planned, choose(planned, list(nodes)))

    return patch.object(target_type, "keep", keep)


def page_turned_too_early() -> AbstractContextManager[object]:
    """The last token of each page is written into the page after it."""
    real = PackedRows.add

    def add(rows: PackedRows, pages: Pages, key: int, *args: Any) -> None:
        begin = len(rows)
        real(rows, pages, key, *args)
        page_ids = pages.page_ids(key)
        for row in range(begin, len(rows)):
            position = rows.positions[row]
            page_id = page_ids[min((position + 1) // PAGE_SIZE, len(page_ids) - 1)]
            rows.slots[row] = page_id * PAGE_SIZE + position % PAGE_SIZE

    return patch.object(PackedRows, "add", add)


def fill_rows_in_a_real_page() -> AbstractContextManager[object]:
    """Rows that only fill up a forward write into the first page that a sequence got."""
    return patch.object(paged_module, "SCRATCH_PAGE", 1)


@contextmanager
def window_one_key_too_wide() -> Iterator[None]:
    """Rows over pages see one key more than the window of their layer, the drafter's slots too."""
    one, several = Visibility.key_range, Visibility.key_ranges

    def wider(rule: Visibility) -> Visibility:
        return replace(rule, window=None if rule.window is None else rule.window + 1)

    def of_one(rule: Visibility, query: int, end: int) -> tuple[int, int]:
        return one(wider(rule), query, end)

    def of_several(rule: Visibility, queries: Tensor, ends: Tensor) -> Tensor:
        return several(wider(rule), queries, ends)

    with (
        patch.object(Visibility, "key_range", of_one),
        patch.object(Visibility, "key_ranges", of_several),
    ):
        yield


def digest_without_parent() -> AbstractContextManager[object]:
    """A page is known by its own tokens, whatever stands before them."""

    def next_digest(table: Any, token_ids: Any, index: int) -> bytes:
        own = token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
        return repr((table.domain, list(own))).encode()

    return patch.object(pages_module, "_next_digest", next_digest)


def anchor_published() -> AbstractContextManager[object]:
    """A page enters the prefix chain though the K/V of its last token is not written."""
    real = Pages.publish

    def publish(pages: Pages, key: int, token_ids: Any, num_tokens: int) -> None:
        real(pages, key, token_ids, min(num_tokens + 1, len(token_ids)))

    return patch.object(Pages, "publish", publish)


def context_never_written() -> AbstractContextManager[object]:
    """Pages of a request that never drafts are taken over by one that does."""
    real = Pages.open

    def open_pages(pages: Pages, key: int, token_ids: Any, **options: Any) -> int:
        return real(pages, key, token_ids, **options | {"with_context": False})

    return patch.object(Pages, "open", open_pages)


def contexts_of_one_kind() -> AbstractContextManager[object]:
    """A page is the same whether its draft context was written or not."""
    real = pages_module._next_digest

    def next_digest(table: Any, token_ids: Any, index: int) -> bytes:
        return real(replace(table, domain=b""), token_ids, index)

    return patch.object(pages_module, "_next_digest", next_digest)


def everybody_has_a_context() -> AbstractContextManager[object]:
    """Pages of requests that never draft count as pages with draft context."""
    return patch.object(Scheduler, "_with_context", lambda scheduler, sequence: True)


def one_noise_for_all_slots() -> AbstractContextManager[object]:
    """The drafter guesses all slots of a block with the noise of the first; none is wrong."""
    real = DFlashDrafter._slots

    def stream(place: Place) -> Stream:
        sequence = place.sequence
        return Stream(sequence.seed, sequence.sample_index, len(sequence.token_ids))

    def slots(
        drafter: DFlashDrafter, logits: Tensor, row: Row, known: SlotCandidates | None = None
    ) -> list[Slot]:
        with patch.object(Place, "stream", property(stream)):
            return real(drafter, logits, row, known)

    return patch.object(DFlashDrafter, "_slots", slots)


def grammar_advanced_by_rejected_drafts() -> AbstractContextManager[object]:
    """The parser never goes back over what was drafted and rejected."""

    def move_on(state: GrammarState, output_ids: list[int], ahead: list[int]) -> bool:
        path = output_ids[state._num_committed :] + ahead
        new = path[len(state._behind) :]
        reached = state._behind + new[: state._matcher.try_consume_tokens(new)]
        num_committed = min(len(output_ids) - state._num_committed, len(reached))
        state._num_committed += num_committed
        state._behind = reached[num_committed:]
        return len(reached) >= len(path)

    return patch.object(GrammarState, "_move_to", move_on)


def one_mask_for_the_block() -> AbstractContextManager[object]:
    """What the grammar allows in the first slot is allowed in all of them."""
    real = GrammarState.allowed

    def allowed(state: GrammarState, output_ids: list[int], ahead: list[int]) -> Any:
        return real(state, output_ids, [])

    return patch.object(GrammarState, "allowed", allowed)


def grammar_after_the_choice() -> AbstractContextManager[object]:
    """A choice that the grammar refuses is replaced by the most likely token that it allows."""
    real = choose_module._chosen

    def chosen(rows: list[tuple[Scores, Place]]) -> list[Choice]:
        ((scores, place),) = rows
        free = copy.copy(place.sequence)
        free.constraint = None
        (found,) = real([(scores, Place(free, place.num_ahead, place.ahead))])
        assert place.sequence.constraint is not None
        assert isinstance(found, int)
        allowed = place.sequence.constraint.allowed(place.sequence.output_ids, place.path)
        if allowed is None or allowed[found]:
            return [found]
        return [int(np.where(allowed, scores, -np.inf).argmax())]

    return patch.object(choose_module, "_chosen", chosen)


def _patched_convolve(faulty: Callable[[Tensor, Tensor], Tensor]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for module in (draft_convolution, draft_kernels):
        stack.enter_context(patch.object(module, "convolve", faulty))
    return stack


def convolution_over_all_rows() -> AbstractContextManager[Any]:
    """The first slot of a block reads the last one of the block before it, of another sequence."""
    real = draft_convolution.convolve

    def convolve(x: Tensor, taps: Tensor) -> Tensor:
        rows = x.reshape(1, -1, x.shape[-1]), taps.reshape(1, -1, *taps.shape[-2:])
        return real(*rows).view(x.shape)

    return _patched_convolve(convolve)


def convolution_of_the_future() -> AbstractContextManager[Any]:
    """A slot reads the slot behind it instead of the one before."""
    real = draft_convolution.convolve

    def convolve(x: Tensor, taps: Tensor) -> Tensor:
        return real(x.flip(-2), taps.flip(-3)).flip(-2)

    return _patched_convolve(convolve)


def convolution_that_remembers() -> AbstractContextManager[Any]:
    """A block's first slot reads the last one of the forward before, whose tokens were rejected."""
    real = draft_convolution.convolve
    last: list[Tensor] = []

    def convolve(x: Tensor, taps: Tensor) -> Tensor:
        out = real(x, taps)
        if last and last[-1].shape == x[..., 0, :].shape:
            out[..., 0, :] += taps[..., 0, 1, :] * last[-1]
        last.append(x[..., -1, :])
        return out

    return _patched_convolve(convolve)


def selector_behind_the_anchor() -> AbstractContextManager[object]:
    """Every slot's candidates are scored behind the anchor, not behind the token before them."""
    real = Candidates.behind

    def behind(candidates: Candidates, path: Ids[int]) -> Any:
        first = copy.copy(candidates)
        return real(first, []) if not path else first.table[len(path), 0]

    return patch.object(Candidates, "behind", behind)
