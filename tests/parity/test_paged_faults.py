"""Ways to break the paged path, planted from outside: the checks of it find every one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch

from blockdraft.cache import pages as pages_module
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE, Pages
from blockdraft.core.plan import Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.kernels.interface import Span
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.attention.visibility import Visibility
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.target.packed_rows import PackedRows
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from tests.batched import Request, paged_pair, run_batched
from tests.parity.paged_checks import AMPLE, FEW, check_batched, requests
from tests.tiny import tiny_drafter, tiny_target

Patch = pytest.MonkeyPatch


def fills_rows() -> bool:
    """True if rows of the target under test must come in multiples."""
    target = PagedTarget(tiny_target("llama", dtype=torch.float32), Pages(FEW))
    return target.rule.row_multiple > 1


def fill_rows_in_a_real_page(patch: Patch) -> None:
    """Rows that only fill up a forward write where the first sequence begins."""
    real = PagedTarget._filled

    def filled(self: PagedTarget, rows: PackedRows) -> list[list[int]]:
        *others, slots = real(self, rows)
        first = rows.spans[0].page_ids[0] * PAGE_SIZE
        scratch = SCRATCH_PAGE * PAGE_SIZE
        return [*others, [first if slot == scratch else slot for slot in slots]]

    patch.setattr(PagedTarget, "_filled", filled)


def change_pages(patch: Patch, of_spans: Callable[[list[Span]], list[Span]]) -> None:
    """Change the page tables of a plan."""
    real = AttentionPlan.__init__

    def init(self: AttentionPlan, backend: Any, kv: Any, spans: list[Span], *args: Any) -> None:
        real(self, backend, kv, of_spans(spans), *args)

    patch.setattr(AttentionPlan, "__init__", init)


def page_table_off_by_one(patch: Patch) -> None:
    """Attention looks at the page behind the right one."""

    def of_spans(spans: list[Span]) -> list[Span]:
        own = [span.seen_page_ids for span in spans]
        return [
            replace(span, page_ids=[*pages[1:], pages[0]])
            for span, pages in zip(spans, own, strict=True)
        ]

    change_pages(patch, of_spans)


def sequences_mixed_up(patch: Patch) -> None:
    """Each sequence has the pages of its neighbor."""

    def of_spans(spans: list[Span]) -> list[Span]:
        return [
            replace(span, page_ids=list(islice(cycle(other.page_ids), len(span.seen_page_ids))))
            for span, other in zip(spans, [spans[-1], *spans[:-1]], strict=True)
        ]

    change_pages(patch, of_spans)


def rows_see_one_key_ahead(patch: Patch) -> None:
    """In plans of the host, as all are here."""
    real = Visibility.key_range

    def one_more(self: Visibility, query: int, end: int) -> tuple[int, int]:
        first, last = real(self, query, end)
        # Where there is a page for it.
        return first, last + (last % PAGE_SIZE != 0)

    patch.setattr(Visibility, "key_range", one_more)


def digest_without_its_parent(patch: Patch) -> None:
    """A page is known by its own tokens, whatever stands before them."""
    real = pages_module._next_digest

    def next_digest(table: Any, token_ids: Sequence[int], index: int) -> bytes:
        own = token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
        return real(table, own, 0)

    patch.setattr(pages_module, "_next_digest", next_digest)


def pages_are_freed_too_early(patch: Patch) -> None:
    """A sequence gives its last page back and goes on writing to it."""
    real = Pages.publish

    def publish(self: Pages, key: int, token_ids: Sequence[int], num_tokens: int) -> None:
        real(self, key, token_ids, num_tokens)
        page_id = self.page_ids(key)[-1]
        if page_id not in self._digest_of and page_id not in self._free:
            self._free.append(page_id)

    patch.setattr(Pages, "publish", publish)
    patch.setattr(Pages, "check_integrity", lambda self: None)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("num_pages", [AMPLE, FEW])
def test_the_check_passes_without_a_fault(num_pages: int) -> None:
    check_batched("llama", torch.float32, "noisy", Pages(num_pages), chunk=37)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    "fault",
    [
        fill_rows_in_a_real_page,
        page_table_off_by_one,
        sequences_mixed_up,
        rows_see_one_key_ahead,
        digest_without_its_parent,
        pages_are_freed_too_early,
    ],
)
def test_the_check_finds(fault: Any, monkeypatch: Patch) -> None:
    if fault is fill_rows_in_a_real_page and not fills_rows():
        pytest.skip("kernels of this machine compute any number of rows")
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="differs from its lone run"):
        check_batched("llama", torch.float32, "noisy", Pages(AMPLE), chunk=37)


def record_drafts(drafter: DFlashDrafter) -> dict[tuple[int, int], list[int]]:
    """What it will draft, by the sequence's key and the position behind its anchor."""
    real, drafts = drafter.propose, {}

    def propose(rows: Sequence[Row]) -> list[Proposal]:
        proposals = real(rows)
        for row, proposal in zip(rows, proposals, strict=True):
            if proposal:
                place = row.sequence.key, len(row.sequence.token_ids)
                drafts[place] = list(proposal.tree.tokens)
        return proposals

    drafter.propose = propose
    return drafts


def attentive_drafter() -> DraftModel:
    """Random, with weights so large that its guesses depend on the context."""
    model = tiny_drafter(torch.float64, block_size=6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=2.0 * parameter.shape[1] ** -0.5, generator=generator)
    return model


def drafts_of(*, reuse: bool) -> tuple[list[dict[int, list[int]]], list[Any], int]:
    """What each request was drafted, its acceptance counts, and how many tokens were reused.

    Every second request never drafts: its pages hold no draft context.
    """
    pages = Pages(AMPLE, reuse=reuse)
    batched_requests = [
        Request(request.prompt, SamplingParams(max_tokens=24, num_draft_tokens=most), 40 * index)
        for index, request in enumerate(requests())
        for most in (0, None)
    ]
    target, drafter = paged_pair(tiny_target(dtype=torch.float64), attentive_drafter(), pages)
    drafts_by_key = record_drafts(drafter)
    with target.released_after():
        batched = run_batched(target, drafter, batched_requests)
    drafts: list[dict[int, list[int]]] = [{} for _ in batched_requests]
    for (key, position), guesses in drafts_by_key.items():
        drafts[batched.keys.index(key)][position] = guesses
    return drafts, [answer.acceptance for answer in batched.answers], pages.num_reused_tokens


def check_drafts_after_hits() -> None:
    """The drafter sees the same context, computed or taken over."""
    expected, expected_counts, _ = drafts_of(reuse=False)
    found, counts, num_reused = drafts_of(reuse=True)
    assert num_reused >= 4 * PAGE_SIZE
    assert any(expected)
    assert found == expected, "other drafts after a prefix hit"
    assert counts == expected_counts


@pytest.mark.slow
def test_acceptance_is_the_same_after_a_prefix_hit() -> None:
    check_drafts_after_hits()


@pytest.mark.slow
def test_the_drafts_find_context_reused_that_nobody_wrote(monkeypatch: Patch) -> None:
    real = Pages.open

    def open_any(
        self: Pages, key: int, token_ids: Sequence[int], *, with_context: bool, longest: int
    ) -> int:
        return real(self, key, token_ids, with_context=True, longest=longest)

    monkeypatch.setattr(Pages, "open", open_any)
    with pytest.raises(AssertionError, match="other drafts after a prefix hit"):
        check_drafts_after_hits()
