"""Attention of packed sequences over pages: it is attention, and company changes no bit."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.kernels.interface import Scoring, Span
from blockdraft.kernels.torch.attention import GroupedRows
from blockdraft.kernels.torch.rules import row_rule
from blockdraft.models.attention.plan import AttentionPlan, LayerAttention
from blockdraft.models.attention.visibility import Visibility
from tests.parity import faults

pytestmark = pytest.mark.usefixtures("either_way")

NUM_PAGES = 160
SCALE = 0.3


@dataclass(frozen=True)
class Part:
    """The rows of one sequence: its last `num_rows` tokens, behind `start` earlier ones."""

    start: int
    num_rows: int


@dataclass(frozen=True)
class Options:
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


class Case:
    """Sequences with random queries, keys and values [.., tokens, head_dim], kept in pages."""

    def __init__(
        self,
        parts: list[Part],
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        head_dim: int = 16,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parts, self.dtype = parts, dtype
        self.kv = PagedKV([(kv_heads, head_dim)], NUM_PAGES, dtype=dtype, device="cpu")
        self.sinks = torch.randn(heads, generator=generator).to(dtype)
        free = list(range(1, NUM_PAGES))
        random.Random(0).shuffle(free)
        self.tables, self.query, self.key, self.value = [], [], [], []
        for part in parts:
            num_tokens = part.start + part.num_rows
            self.tables.append([free.pop() for _ in range(-(-num_tokens // PAGE_SIZE) + 1)])
            for own, num_heads, num in (
                (self.query, heads, part.num_rows),
                (self.key, kv_heads, num_tokens),
                (self.value, kv_heads, num_tokens),
            ):
                own.append(torch.randn(num_heads, num, head_dim, generator=generator).to(dtype))

    def slots(self, index: int, start: int, end: int) -> list[int]:
        table = self.tables[index]
        return [table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, end)]

    def run(self, chosen: list[int], options: Options) -> list[Tensor]:
        """[rows, heads, head_dim] of each chosen sequence, all in one forward."""
        rule = row_rule(self.dtype)
        backend = backend_for(self.dtype, "cpu", [self.query[0].shape[-1]])
        # What another request left in the pages: it must not be seen. Products read it all the
        # same, and need numbers.
        for pool in self.kv.pools:
            pool.fill_(torch.nan if backend.reads_pages else 100.0)
        spans, slots, first = [], [], 0
        for index in chosen:
            part = self.parts[index]
            before = torch.tensor(self.slots(index, 0, part.start), dtype=torch.long)
            k, v = (t[index][:, : part.start] for t in (self.key, self.value))
            self.kv.write(0, before, k, v)
            end = part.start + part.num_rows
            spans.append(Span(first, part.num_rows, part.start, end, self.tables[index]))
            slots += self.slots(index, part.start, end)
            first += part.num_rows
        num_fill = -first % rule.row_multiple
        slots += [SCRATCH_PAGE * PAGE_SIZE] * num_fill
        plan = AttentionPlan(backend, self.kv, spans, torch.tensor(slots), rule.row_multiple)
        query = torch.cat([self.query[index] for index in chosen], dim=1)
        key, value = (
            torch.cat([t[index][:, self.parts[index].start :] for index in chosen], dim=1)
            for t in (self.key, self.value)
        )
        query, key, value = (
            torch.cat((t, t[:, -1:].expand(-1, num_fill, -1)), dim=1) for t in (query, key, value)
        )
        sinks = self.sinks if options.sinks else None
        scoring = Scoring(SCALE, options.softcap, sinks)
        layer = LayerAttention(scoring, Visibility(window=options.window))
        output = plan.attend(0, layer, query, key, value)
        assert output.shape == (first + num_fill, query.shape[0], query.shape[2])
        assert output.isfinite().all()
        return list(output[:first].split([self.parts[index].num_rows for index in chosen]))

    def expected(self, index: int, options: Options) -> Tensor:
        """[rows, heads, head_dim], head by head and row by row, in float64."""
        part, query = self.parts[index], self.query[index].double()
        key, value = self.key[index].double(), self.value[index].double()
        group = query.shape[0] // key.shape[0]
        output = torch.empty(part.num_rows, query.shape[0], query.shape[2], dtype=torch.float64)
        for row in range(part.num_rows):
            end = part.start + row + 1
            begin = 0 if options.window is None else max(0, end - options.window)
            for head in range(query.shape[0]):
                scores = SCALE * key[head // group, begin:end] @ query[head, row]
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                shares = scores.exp()
                total = shares.sum()
                if options.sinks:
                    total = total + self.sinks[head].double().exp()
                output[row, head] = shares / total @ value[head // group, begin:end]
        return output


PARTS = [
    Part(0, 1),
    Part(0, 70),
    Part(63, 1),
    Part(64, 1),
    Part(100, 6),
    Part(130, 3),
    Part(300, 1),
    Part(250, 5),
]
OPTIONS = [
    Options(),
    Options(window=24),
    Options(softcap=2.0),
    Options(sinks=True),
    Options(window=70, softcap=3.0, sinks=True),
]


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}
"""There are no kernels for the first. One key more or less makes a difference of 0.1 or more."""


def check_attention(
    dtype: torch.dtype, options: Options, *, heads: int = 4, kv_heads: int = 2
) -> None:
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    case = Case(PARTS, heads, kv_heads, dtype)
    found = case.run(list(range(len(PARTS))), options)
    for index in range(len(PARTS)):
        expected = case.expected(index, options)
        torch.testing.assert_close(found[index].double(), expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_is_attention(heads: int, kv_heads: int, options: Options, dtype: torch.dtype) -> None:
    check_attention(dtype, options, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.window is not None], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_window_one_key_too_wide_is_found(options: Options, dtype: torch.dtype) -> None:
    with faults.window_one_key_too_wide(), pytest.raises(AssertionError, match="not close"):
        check_attention(dtype, options)


@pytest.mark.parametrize("index", range(len(PARTS)))
def test_a_sequence_alone_is_attention_too(index: int) -> None:
    case = Case(PARTS, 4, 2, torch.float64)
    for options in OPTIONS:
        (found,) = case.run([index], options)
        torch.testing.assert_close(found, case.expected(index, options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_company_changes_no_bit(dtype: torch.dtype, options: Options) -> None:
    """Alone, in pairs, in any order, and among all: groups and filling differ each time."""
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    # Of one group each, with tables of different lengths: within a tile of keys, and across.
    medium = [Part(260, 1), Part(330, 1), Part(450, 1)]
    long = [Part(1050, 1), Part(1300, 1), Part(1900, 1)]
    parts = [*PARTS, Part(200, 40), *medium, *long]
    case, draw = Case(parts, 6, 2, dtype, head_dim=64), random.Random(1)
    alone = [case.run([index], options)[0] for index in range(len(parts))]
    for _ in range(12):
        chosen = draw.sample(range(len(parts)), draw.randint(2, len(parts)))
        for index, found in zip(chosen, case.run(chosen, options), strict=True):
            assert torch.equal(found, alone[index]), (index, chosen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_row_alone_has_the_bits_it_has_in_its_sequence(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    whole = Case([Part(90, 50)], 6, 2, dtype, head_dim=64)
    (expected,) = whole.run([0], Options())
    for first, num_rows in [(0, 1), (3, 2), (36, 9), (37, 8), (49, 1)]:
        cut = Case([Part(90, 50)], 6, 2, dtype, head_dim=64)
        cut.parts = [Part(90 + first, num_rows)]
        cut.query = [whole.query[0][:, first : first + num_rows]]
        cut.key, cut.value = ([t[0][:, : 90 + first + num_rows]] for t in (whole.key, whole.value))
        (found,) = cut.run([0], Options())
        assert torch.equal(found, expected[first : first + num_rows])


def rows_of(parts: list[Part], row_multiple: int = 2) -> GroupedRows:
    spans, first = [], 0
    for part in parts:
        end = part.start + part.num_rows
        num_pages = -(-end // PAGE_SIZE)
        spans.append(Span(first, part.num_rows, part.start, end, range(1, num_pages + 1)))
        first += part.num_rows
    slots = torch.zeros(first + -first % row_multiple, dtype=torch.long)
    return GroupedRows(spans, slots, row_multiple)


def test_a_sequence_alone_needs_no_copy_of_its_rows() -> None:
    rows = rows_of([Part(5, 3)])
    assert rows.is_whole
    assert rows.groups[0].rows.tolist() == [[0, 1, 2, 2]]
    assert not rows_of([Part(5, 3), Part(5, 3)]).is_whole


def test_no_group_is_filled_up_to_more_than_twice() -> None:
    draw = random.Random(3)
    parts = [Part(draw.randrange(2000), draw.choice([1, 2, 3, 5, 8, 33, 200])) for _ in range(40)]
    first_rows = [sum(part.num_rows for part in parts[:index]) for index in range(len(parts))]
    seen = []
    for group in rows_of(parts).groups:
        num_sequences, num_rows = group.rows.shape
        num_pages = group.page_ids.shape[0] // num_sequences
        for rows in group.rows.tolist():
            part = parts[first_rows.index(rows[0])]
            seen.append(part)
            assert num_rows <= 2 * part.num_rows
            assert num_pages < 2 * -(-(part.start + part.num_rows) // PAGE_SIZE)
            assert rows[: part.num_rows] == list(range(rows[0], rows[0] + part.num_rows))
    assert sorted(map(repr, seen)) == sorted(map(repr, parts))
