"""Pages of K/V memory: who holds which, and which can be reused. No tensors here.

A sequence's K/V lies in whole pages of `PAGE_SIZE` tokens, in the order of its page table. A page
whose tokens are all committed enters the prefix chain: its digest covers every token up to its end,
so that a later sequence with the same beginning takes the page over instead of computing it again.
Shared pages are full, and therefore never written. Pages that nobody holds stay in the chain until
their memory is needed, the longest unused first.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blockdraft.cache.memory import Memory
from blockdraft.core.uninterrupted import uninterrupted

PAGE_SIZE = 64
SCRATCH_PAGE = 0
"""Never given to a sequence: rows that only fill up a forward write there."""


@dataclass(slots=True)
class _Digests:
    """Of the first pages of one sequence, as far as they were asked for: its tokens stay.

    `domain` parts the chain, see `_domain`.
    """

    domain: bytes
    known: list[bytes] = field(default_factory=list)

    def of(self, index: int, token_ids: Sequence[int]) -> bytes:
        """That of a page."""
        while len(self.known) <= index:
            self.known.append(_next_digest(self, token_ids, len(self.known)))
        return self.known[index]


@dataclass(slots=True)
class _Table:
    """The pages of one sequence; the first `num_chained` of them are in the prefix chain.

    `chains` are the digests by which it may take pages over, its own first. `num_uncounted` tokens
    were taken over, by a sequence that may still be sent away.
    """

    chains: list[_Digests]
    page_ids: list[int]
    is_long: bool
    num_chained: int
    num_uncounted: int

    @property
    def digests(self) -> _Digests:
        """Those under which its pages are published."""
        return self.chains[0]


class Borders(Protocol):
    """States at borders of pages, without which what lies in pages cannot be gone on with."""

    def has(self, digest: bytes) -> bool:
        """True if the state behind a page is kept."""

    def opened(self, key: int, digest: bytes | None, num_tokens: int) -> None:
        """A sequence goes on behind the page of `digest`, with `num_tokens` tokens; None: anew."""


class Pages(Memory):
    """A fixed number of pages, shared by all sequences; a sequence is addressed by its key.

    With `reuse` off nothing enters the prefix chain. `on_forget` is told each page whose content
    nobody can reach any more. With `borders` a sequence takes over no more than what it can go on
    behind. `long_from`: texts that may have more tokens than this have keys of their own.
    """

    def __init__(self, num_pages: int, *, reuse: bool = True) -> None:
        assert num_pages > 1, "one page is scratch"
        self.num_pages = num_pages
        self.reuse = reuse
        self.num_reused_tokens = 0
        self.on_forget: Callable[[int], None] | None = None
        self.borders: Borders | None = None
        self.long_from: int | None = None
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._tables: dict[int, _Table] = {}
        self._put_back: dict[int, list[_Digests]] = {}
        self._num_holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The most tokens that all sequences together can hold."""
        return (self.num_pages - 1) * PAGE_SIZE

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that can be given out now, those that only the prefix chain keeps included."""
        return len(self._free) + len(self._idle)

    def open(
        self, key: int, token_ids: Sequence[int], *, with_context: bool, longest: int = 0
    ) -> int:
        """Start a sequence with all the pages that the prefix chain has for its tokens.

        At least one token stays to be computed: its forward gives the first choice.

        Returns:
            the number of tokens whose K/V is there, whole pages.
        """
        assert key not in self._tables
        is_long = self.long_from is not None and longest > self.long_from
        chains, page_ids = self._chains(key, with_context, is_long), list[int]()
        for index in range((len(token_ids) - 1) // PAGE_SIZE if self.reuse else 0):
            found = (self._page_of.get(own.of(index, token_ids)) for own in chains)
            page_id = next((page_id for page_id in found if page_id is not None), None)
            if page_id is None:
                break
            page_ids.append(page_id)
        if self.borders is not None:
            known = chains[0].known
            while page_ids and not self.borders.has(known[len(page_ids) - 1]):
                page_ids.pop()
            last = known[len(page_ids) - 1] if page_ids else None
            self.borders.opened(key, last, len(page_ids) * PAGE_SIZE)
        num_reused = len(page_ids) * PAGE_SIZE
        with uninterrupted():
            self._tables[key] = _Table(chains, page_ids, is_long, len(page_ids), num_reused)
            for page_id in page_ids:
                self._hold(page_id)
        return num_reused

    def is_long(self, key: int) -> bool:
        """True if the sequence may have more tokens than `long_from`."""
        return self._tables[key].is_long

    def _chains(self, key: int, with_context: bool, is_long: bool) -> list[_Digests]:
        """See _Table.chains; what was hashed of a sequence that was put back is known."""
        domains = [_domain(with_context=with_context, is_long=is_long)]
        if not with_context and self.borders is None:
            # Keys and values of the target are the same, whatever else a page has.
            domains.append(_domain(with_context=True, is_long=is_long))
        known = self._put_back.pop(key, [])
        if [digests.domain for digests in known] == domains:
            return known
        return [_Digests(domain) for domain in domains]

    def num_shared(
        self, key: int, token_ids: Sequence[int], other_key: int, other_ids: Sequence[int]
    ) -> int:
        """See Memory.num_shared: whole pages."""
        num_pages = min(len(token_ids) - 1, len(other_ids)) // PAGE_SIZE if self.reuse else 0
        own, other = self._tables[key].digests, self._tables[other_key].digests
        # A digest covers all tokens before it too, so behind the first that differs all do.
        return PAGE_SIZE * bisect_left(
            range(num_pages),
            True,
            key=lambda index: own.of(index, token_ids) != other.of(index, other_ids),
        )

    def reserve(self, key: int, num_tokens: int) -> bool:
        """Give a sequence room for so many tokens; False, and nothing changes, if there is none."""
        table = self._tables[key]
        num_new = -(-num_tokens // PAGE_SIZE) - len(table.page_ids)
        if num_new > self.num_available:
            return False
        if num_new > 0:
            with uninterrupted():
                table.page_ids.extend(self._take() for _ in range(num_new))
        self.num_reused_tokens += table.num_uncounted
        table.num_uncounted = 0
        return True

    def room(self, key: int) -> int:
        """Tokens that the pages of a sequence can hold."""
        return len(self._tables[key].page_ids) * PAGE_SIZE

    def trim(self, key: int, num_tokens: int) -> None:
        """See Memory.trim: whole pages, none of them published."""
        table = self._tables[key]
        num_kept = -(-num_tokens // PAGE_SIZE)
        assert table.num_chained <= num_kept
        with uninterrupted():
            while len(table.page_ids) > num_kept:
                self._release(table.page_ids.pop())

    def is_held(self, page_id: int) -> bool:
        """True if a sequence has the page; else only the prefix chain keeps it, if anything."""
        return self._num_holders[page_id] > 0

    def page_ids(self, key: int) -> Sequence[int]:
        """The page table of a sequence."""
        return self._tables[key].page_ids

    def slots(self, key: int, start: int, end: int) -> list[int]:
        """Where the tokens of positions `start` to `end` lie: page times PAGE_SIZE plus place."""
        return self.slots_at(key, range(start, end))

    def slots_at(self, key: int, positions: Iterable[int]) -> list[int]:
        """The same of any positions."""
        page_ids = self._tables[key].page_ids
        return [page_ids[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]

    def digest(self, key: int, index: int, token_ids: Sequence[int]) -> bytes:
        """Of a page of a sequence with these tokens, and of all before it."""
        return self._tables[key].digests.of(index, token_ids)

    def publish(self, key: int, token_ids: Sequence[int], num_tokens: int) -> None:
        """Enter the full pages of the first `num_tokens` tokens, all committed, into the chain.

        A page whose content another one already stands for stays the sequence's own.
        """
        table = self._tables[key]
        for index in range(table.num_chained, num_tokens // PAGE_SIZE if self.reuse else 0):
            digest, page_id = table.digests.of(index, token_ids), table.page_ids[index]
            if digest not in self._page_of:
                self._page_of[digest] = page_id
                self._digest_of[page_id] = digest
            table.num_chained = index + 1

    def put_back(self, key: int) -> None:
        """See Memory.put_back. Its pages are free; what was hashed of its tokens is remembered."""
        with uninterrupted():
            if (table := self._tables.pop(key, None)) is not None:
                self._put_back[key] = table.chains
                self._release_all(table)

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        with uninterrupted():
            self._put_back.pop(key, None)
            if (table := self._tables.pop(key, None)) is not None:
                self._release_all(table)

    def _release_all(self, table: _Table) -> None:
        # The end of a chain is useless without its beginning, so it goes first.
        for page_id in reversed(table.page_ids):
            self._release(page_id)

    def check_integrity(self) -> None:
        """Assert that every page is free, kept by the chain, or held, and counted right."""
        held = Counter(i for table in self._tables.values() for i in table.page_ids)
        assert [held[i] for i in range(self.num_pages)] == self._num_holders
        assert all(i in self._digest_of for i, count in held.items() if count > 1)
        parts = [*self._free, *self._idle, *held]
        assert sorted(parts) == list(range(1, self.num_pages)), "a page is lost, or in two places"
        assert set(self._idle) <= set(self._digest_of)
        assert not set(self._free) & set(self._digest_of)
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of

    def _take(self) -> int:
        if self._free:
            page_id = self._free.pop()
        else:
            page_id, _ = self._idle.popitem(last=False)
            del self._page_of[self._digest_of.pop(page_id)]
            self._forget(page_id)
        self._num_holders[page_id] = 1
        return page_id

    def _hold(self, page_id: int) -> None:
        self._idle.pop(page_id, None)
        self._num_holders[page_id] += 1

    def _release(self, page_id: int) -> None:
        self._num_holders[page_id] -= 1
        if self._num_holders[page_id] == 0:
            if page_id in self._digest_of:
                self._idle[page_id] = None
            else:
                self._free.append(page_id)
                self._forget(page_id)

    def _forget(self, page_id: int) -> None:
        if self.on_forget is not None:
            self.on_forget(page_id)


def _domain(*, with_context: bool, is_long: bool) -> bytes:
    """Parts the chain: pages with a draft context and pages without, pages of long texts."""
    return (b"context" if with_context else b"plain") + (b" long" if is_long else b"")


def _next_digest(digests: _Digests, token_ids: Sequence[int], index: int) -> bytes:
    """Of a page, from the digest of the page before it and its own tokens."""
    before = digests.known[index - 1] if index else digests.domain
    tokens = array("q", token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()
