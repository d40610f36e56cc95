"""Triton kernels, interpreted: rows keep their bits, trees read their paths, and faults are found.

test_backends.py compares them with torch, operation by operation.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gpucheck import triton_kernels
from gpucheck.notes import Notes
from gpucheck.settings import REHEARSAL, ModelSize, Settings
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.plan import Tree
from blockdraft.core.request import SamplingParams
from blockdraft.kernels.backends import card_kernels
from blockdraft.kernels.interface import Backend, Scoring, Span
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.weights import Norm
from blockdraft.models.attention import static_rows
from blockdraft.models.attention.plan import AttentionPlan, LayerAttention
from blockdraft.models.attention.visibility import CAUSAL, Visibility
from blockdraft.models.draft.kernels import kernel_draft
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.target import static_forward
from blockdraft.models.target.exact import RowsDepend
from tests import triton_interpreter
from tests.fakes import NoisyOracleDrafter
from tests.parity.checks import check_drafted_equals_plain, generate, generate_plain
from tests.parity.targets import make_dflash, make_target
from tests.parity.test_trees import Samples, same
from tests.pretend_cuda import PretendCuda
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target
from tests.triton_interpreter import triton_on_cpu

if not triton_interpreter.IS_ON:
    pytest.skip(triton_interpreter.WHY_NOT, allow_module_level=True)

from triton.runtime.errors import OutOfResources

from blockdraft.kernels.cuda import attention as over_pages
from blockdraft.kernels.cuda import backend as triton_backend
from blockdraft.kernels.cuda import check, choice, ops, tiles
from tests.tensors import draw

DTYPES = (torch.float32, torch.bfloat16)
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 16
NUM_PAGES = 6
SCORING = Scoring(0.25)
CHECKED_ROWS, CHECKED_PRODUCTS = check.NUMS_ROWS, check.PRODUCTS


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """An interpreter takes milliseconds for each row, and for each tile of keys."""
    monkeypatch.setattr(check, "NUMS_ROWS", (1, 2, 17, 18))
    monkeypatch.setattr(check, "PLACES", (0, 13))
    monkeypatch.setattr(check, "PRODUCTS", ((70, 144, 1),))
    monkeypatch.setattr(check, "NUM_PAGES", 5)
    monkeypatch.setattr(check, "WINDOW", 130)


@pytest.fixture
def small_parts(monkeypatch):
    """Of attention: a row of some hundred keys has several."""
    monkeypatch.setattr(ops, "LEAST_TILES", 1)
    monkeypatch.setattr(ops, "MAX_PARTS", 3)
    monkeypatch.setattr(ops, "FEW_ROWS", 17)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_product_has_its_bits_among_1_to_64(dtype):
    weight, x = draw(70, 80, dtype=dtype), draw(64, 80, dtype=dtype, seed=1)
    linear = triton_on_cpu(dtype).linear(weight, draw(70, dtype=dtype, seed=2))
    expected = linear(x)
    for num_rows in range(1, 65):
        first = 64 - num_rows
        assert torch.equal(linear(x[first:]), expected[first:]), num_rows


def all_tiles(dtype: torch.dtype) -> list[tiles.Tile]:
    by_rows = tiles.BY_ROWS.get(dtype, ())
    return list(dict.fromkeys(tile for _, own in by_rows for tile in own))


@pytest.mark.parametrize("num_inputs", [128, 150])
@pytest.mark.parametrize("num_rows", [3, 20, 130])
def test_a_row_of_a_product_has_its_bits_in_all_tiles(num_rows, num_inputs):
    dtype = torch.bfloat16
    weight, bias = draw(70, num_inputs, dtype=dtype), draw(70, dtype=dtype, seed=2)
    x = draw(num_rows, num_inputs, dtype=dtype, seed=1)
    expected = ops.product(x, weight, bias, tiles.ONE[dtype])
    torch.testing.assert_close(expected, torch.nn.functional.linear(x, weight, bias))
    for tile in all_tiles(dtype):
        assert torch.equal(ops.product(x, weight, bias, tile), expected), tile


def test_the_tiles_of_a_product():
    own = tiles.Tiles(torch.bfloat16, "cpu")
    assert own.are_many
    few, middle, many = own.tile(16, 960, 256), own.tile(17, 960, 256), own.tile(65, 960, 256)
    assert (few.rows, middle.rows, many.rows) == (16, 32, 64)
    assert own.tile(16, 50_000, 256).outputs > few.outputs
    assert own.tile(65, 50_000, 256).rows > many.rows
    assert own.tile(16, 960, 576) == replace(few, inputs=tiles.SHORT)
    for one in (tiles.Tiles(torch.bfloat16, "cpu", one=True), tiles.Tiles(torch.float32, "cpu")):
        assert not one.are_many
        assert one.tile(1, 960, 576) == one.tile(500, 50_000, 2048)


def test_a_tile_has_as_many_stages_as_fit():
    tile = tiles.Tile(16, 64, 128, num_stages=6)
    assert tile.within(227 * 1024, 2) == tile.within(100 * 1024, 2) == tile
    assert tile.within(99 * 1024, 2) == replace(tile, num_stages=5)
    assert tile.within(1024, 2) == replace(tile, num_stages=2)


def test_the_check_of_the_card_has_all_tiles():
    own = tiles.Tiles(torch.bfloat16, "cpu")
    found = {
        own.tile(num_rows, num_outputs * repeated, num_inputs)
        for num_rows in CHECKED_ROWS
        for num_outputs, num_inputs, repeated in CHECKED_PRODUCTS
    }
    table = {tile.within(tiles.SMALLEST_SHARED, 2) for tile in all_tiles(torch.bfloat16)}
    assert found == table | {replace(tile, inputs=tiles.SHORT) for tile in table}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_pass_the_check_of_the_card(dtype):
    assert check.first_fault(triton_on_cpu(dtype), dtype, "cpu") is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_passes_the_check_of_the_card(small_parts, dtype):
    assert triton_on_cpu(dtype).attends_over(24)
    assert not triton_on_cpu(dtype).attends_over(512)


def test_a_card_that_is_full_says_nothing_of_attention(small_parts, monkeypatch):
    backend, real = triton_on_cpu(torch.float32), triton_backend.attention_fault

    def run_out(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    monkeypatch.setattr(triton_backend, "attention_fault", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        backend.attends_over(24)
    monkeypatch.setattr(triton_backend, "attention_fault", real)
    assert backend.attends_over(24)


def sum_by_rows(x: Tensor, *args: object) -> Tensor:
    """As libraries choose: with few rows a sum is split."""
    weight, bias, tile = args
    if x.numel() >= 4 * x.shape[-1]:
        return ops.product(x, weight, bias, tile)
    half = x.shape[-1] // 2
    first = ops.product(x[..., :half], weight[:, :half], None, tile)
    return first + ops.product(x[..., half:], weight[:, half:], bias, tile)


def norm_by_rows(x: Tensor, norm: object) -> Tensor:
    """With few rows a sum is shared, and its parts are summed last."""
    if x.shape[0] >= 4:
        return ops.rms_norm(x, norm)
    variance = x.double().pow(2).mean(-1, keepdim=True)
    return (norm.weight * (x * torch.rsqrt(variance + norm.eps))).to(x.dtype)


def attends_otherwise(num_few: int, **changes: int) -> Callable[..., Tensor]:
    """Attention that is computed otherwise for a few rows."""

    def attend(query: Tensor, *args: object) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changes.items() if query.shape[1] <= num_few else ():
                patch.setattr(ops, name, value)
            return ops.attention(query, *args)

    return attend


def no_scale(query, keys, values, seen, scoring):
    return ops.attention(query, keys, values, seen, replace(scoring, scale=1.0))


@pytest.mark.parametrize(
    ("module", "name", "fault", "found"),
    [
        (triton_backend, "product", sum_by_rows, "a product: 1 rows have other bits"),
        (triton_backend, "rms_norm", norm_by_rows, "a norm: 1 rows have other bits"),
        (triton_backend, "gated_silu", lambda x: ops.gated_silu(x).neg(), "a gate differs from"),
        (
            triton_backend,
            "attention",
            attends_otherwise(2, TILE=16),
            "attention over heads of 24: 1 rows have other bits",
        ),
        (triton_backend, "attention", no_scale, "attention over heads of 24 differs from torch's"),
        (
            over_pages,
            "attention",
            attends_otherwise(2, MAX_PARTS=2),
            "attention over pages, heads of 24: 1 rows have other bits",
        ),
        # Few rows in longer parts than many: another program, and another partition.
        (
            over_pages,
            "attention",
            attends_otherwise(17, LEAST_TILES=2),
            "attention over pages, heads of 24: 1 rows have other bits",
        ),
        (over_pages, "attention", no_scale, "attention over pages, heads of 24 differs from"),
    ],
)
def test_the_check_of_the_card_finds(monkeypatch, caplog, small_parts, module, name, fault, found):
    monkeypatch.setattr(module, name, fault)
    backend = triton_on_cpu(torch.float32)
    if name == "attention":
        assert not backend.attends_over(24)
        assert found in caplog.text
    else:
        assert check.first_fault(backend, torch.float32, "cpu").startswith(found)


class Trees:
    """Two sequences over pages; the first one's tokens end in a tree, a span for each path.

    Keys of paths lie at slots of their own; what nobody may read is no number.
    """

    TABLES = ((5, 2), (3,))
    START = PAGE_SIZE - 3
    """Of the tree: its nodes are in two pages."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        first, second = self.TABLES
        at = self.START
        # Path a: 4 nodes in their places. b leaves it behind its first node, c at once.
        self.slots = self._slots(first, range(at, at + 8)) + self._slots(second, range(20, 22))
        own = self.slots
        self.spans = [
            Span(0, 4, at, at + 4, first),
            Span(4, 2, at + 1, at + 3, first, (own[0], own[4], own[5])),
            Span(6, 2, at, at + 2, first, (own[6], own[7])),
            Span(8, 2, 20, 22, second),
        ]
        self.query = draw(HEADS, 10, HEAD_DIM, dtype=dtype)
        self.key, self.value = (
            draw(KV_HEADS, 10, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2)
        )
        self.context = draw(2, KV_HEADS, at + 20, HEAD_DIM, dtype=dtype, seed=3)
        self.context_slots = self._slots(first, range(at)) + self._slots(second, range(20))

    @staticmethod
    def _slots(table: tuple[int, ...], positions: range) -> list[int]:
        return [table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]

    def run(
        self, backend: Backend, chosen: list[int], attention: LayerAttention, rest: float
    ) -> list[Tensor]:
        """[rows, heads, head_dim] of the chosen spans, the other nodes' keys written before."""
        kv = PagedKV([(KV_HEADS, HEAD_DIM)], NUM_PAGES, dtype=self.dtype, device="cpu")
        kv.pools[0].fill_(rest)
        kv.write(0, torch.tensor(self.context_slots), *self.context)
        kv.write(0, torch.tensor(self.slots), self.key, self.value)
        spans, rows = [], []
        for index in chosen:
            span = self.spans[index]
            spans.append(replace(span, first=len(rows)))
            rows += range(span.first, span.first + span.num_rows)
        num_fill = -len(rows) % backend.rule.row_multiple
        rows += rows[-1:] * num_fill
        slots = torch.tensor([self.slots[row] for row in rows])
        plan = AttentionPlan(backend, kv, spans, slots, backend.rule.row_multiple)
        found = plan.attend(
            0, attention, self.query[:, rows], self.key[:, rows], self.value[:, rows]
        )
        return list(torch.split(found[: len(rows) - num_fill], [s.num_rows for s in spans]))


ATTENTIONS = (
    LayerAttention(SCORING),
    LayerAttention(Scoring(0.3, softcap=3.0, sinks=torch.tensor([0.5, -0.5])), Visibility(True, 9)),
)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=("plain", "window, soft cap, sinks"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paths_of_trees(dtype, attention):
    """They are the reference's, and none changes with its company or with what lies unseen."""
    trees, backend = Trees(dtype), triton_on_cpu(dtype)
    found = trees.run(backend, [0, 1, 2, 3], attention, rest=torch.nan)
    expected = trees.run(TorchBackend(dtype), [0, 1, 2, 3], attention, rest=0.0)
    for index, (own, wanted) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(own, wanted, rtol=0, atol=16 * torch.finfo(dtype).eps)
        (alone,) = trees.run(backend, [index], attention, rest=7.0)
        assert torch.equal(alone, own), index


def wrong_slots(spans, slots):
    """A branch that reads what lies at the places of its path: its siblings."""
    return over_pages.RowTables.of([replace(span, path_slots=()) for span in spans], slots)


def test_a_sibling_that_is_read_shows(monkeypatch):
    trees = Trees(torch.float32)
    expected = trees.run(TorchBackend(torch.float32), [1], ATTENTIONS[0], rest=0.0)[0]
    monkeypatch.setattr(triton_backend, "RowTables", SimpleNamespace(of=wrong_slots))
    found = trees.run(triton_on_cpu(torch.float32), [1], ATTENTIONS[0], rest=0.0)[0]
    assert (found - expected).abs().max() > 0.01


def test_keys_of_a_path_count_as_if_in_their_places():
    """Bit for bit: the branch that reads by slots, and a sequence that has the same keys."""
    trees, backend = Trees(torch.float32), triton_on_cpu(torch.float32)
    branch = trees.run(backend, [2], ATTENTIONS[0], rest=torch.nan)[0]
    trees.spans[2] = replace(trees.spans[2], path_slots=())
    trees.slots[6:8] = trees.slots[0:2]
    for kept in (trees.key, trees.value):
        kept[:, 0:2] = kept[:, 6:8]
    assert torch.equal(trees.run(backend, [2], ATTENTIONS[0], rest=torch.nan)[0], branch)


class Long:
    """Rows that see up to 450 keys in pages, one of them through the slots of a path."""

    HEADS, KV_HEADS, HEAD_DIM, NUM_PAGES = 4, 2, 24, 9
    PAGES = (7, 2, 5, 1, 8, 4, 3)
    RANGES = ((0, 448), (0, 447), (130, 448), (0, 64), (63, 129), (0, 1), (5, 5), (9, 3), (0, 300))
    PATH_START = 200
    """Of the last row."""

    def __init__(self, dtype: torch.dtype) -> None:
        shape = self.KV_HEADS, self.NUM_PAGES * PAGE_SIZE, self.HEAD_DIM
        self.keys = 3 * draw(*shape, dtype=dtype, seed=1)
        self.values = draw(*shape, dtype=dtype, seed=2)
        self.query = draw(self.HEADS, len(self.RANGES), self.HEAD_DIM, dtype=dtype)
        slots = torch.arange(shape[1]).view(-1, PAGE_SIZE)[list(self.PAGES)].flatten()
        own = slots.clone()
        # Two pages that are in no table, keys of the path in another order.
        free = torch.cat((torch.arange(64), torch.arange(6 * 64, 7 * 64)))
        own[self.PATH_START : 300] = free[: 300 - self.PATH_START].flip(0)
        self.slots = [slots] * (len(self.RANGES) - 1) + [own]
        self.path = own[self.PATH_START : 300]

    def attend(self, rows: list[int], scoring: Scoring, rest: float | None = None) -> Tensor:
        """[rows, heads, head_dim]; rest: what is written where none of them looks."""
        keys, values = self.keys, self.values
        ranges = torch.tensor([self.RANGES[row] for row in rows])
        if rest is not None:
            seen = torch.cat([self.slots[r][slice(*self.RANGES[r])] for r in rows])
            hidden = torch.ones(keys.shape[1], dtype=torch.bool)
            hidden[seen] = False
            keys, values = (kept.clone() for kept in (keys, values))
            keys[:, hidden] = values[:, hidden] = rest
        last = len(self.RANGES) - 1
        table = [(0, self.PATH_START if row == last else self.RANGES[row][1], 0) for row in rows]
        tables = ops.PagedTables(torch.tensor(table).flatten(), torch.tensor(self.PAGES), self.path)
        return ops.attention(self.query[:, rows], keys, values, ops.Seen(ranges, tables), scoring)

    def expected(self, backend: Backend, row: int, scoring: Scoring) -> Tensor:
        """A row's, with the keys that it sees side by side in their places, the others hidden."""
        first, end = self.RANGES[row]
        bias = torch.full((1, 1, 448), -torch.inf)
        bias[..., first:end] = 0.0
        keys, values = (kept[:, self.slots[row]] for kept in (self.keys, self.values))
        return backend.attend(self.query[:, row : row + 1], keys, values, bias, scoring)[0]


LONG_SCORINGS = (
    Scoring(0.2),
    Scoring(0.3, softcap=3.0, sinks=torch.tensor([0.5, -0.5, 1.0, 0.0])),
)


@pytest.mark.parametrize("scoring", LONG_SCORINGS, ids=("plain", "soft cap, sinks"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_in_parts(monkeypatch, small_parts, dtype, scoring):
    """Torch's values; and the same bits by a program for each part and by one for all."""
    long, all_rows = Long(dtype), list(range(len(Long.RANGES)))
    found = long.attend(all_rows, scoring)
    monkeypatch.setattr(ops, "FEW_ROWS", 0)
    assert torch.equal(long.attend(all_rows, scoring), found)
    monkeypatch.undo()
    for row, (first, end) in enumerate(Long.RANGES):
        expected = torch.zeros_like(found[row])
        if first < end:
            expected = long.expected(TorchBackend(dtype), row, scoring)
        within = (32 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
        torch.testing.assert_close(found[row], expected, rtol=0, atol=within)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_few", [0, 17])
def test_a_row_in_parts_alone_and_without_pages(monkeypatch, small_parts, dtype, num_few):
    monkeypatch.setattr(ops, "FEW_ROWS", num_few)
    long, scoring = Long(dtype), LONG_SCORINGS[1]
    found = long.attend(list(range(len(Long.RANGES))), scoring)
    for row in range(len(Long.RANGES)):
        alone = long.attend([row], scoring, rest=torch.nan)[0]
        assert torch.equal(alone, found[row]), row
        beside = long.expected(triton_on_cpu(dtype), row, scoring)
        assert torch.equal(beside, found[row]), row


def test_up_to_256_keys_are_one_part(monkeypatch):
    """So nothing is rounded once more than in one go."""
    long = Long(torch.float32)
    rows = [row for row, (_, end) in enumerate(Long.RANGES) if end <= 4 * PAGE_SIZE]
    found = long.attend(rows, SCORING)
    monkeypatch.setattr(ops, "LEAST_TILES", 100)
    assert torch.equal(long.attend(rows, SCORING), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_that_a_row_does_not_see(dtype):
    """The first one, the last one, or all of them: hidden by a bias, they are as if not there."""
    query, key, value = (draw(1, n, 16, dtype=dtype, seed=n) for n in (4, 150, 151))
    value, seen = value[:, :150], [range(64, 150), range(64), range(0), range(150)]
    bias = torch.full((1, 4, 150), -torch.inf)
    for row, keys in enumerate(seen):
        bias[0, row, list(keys)] = 0.0
    found = triton_on_cpu(dtype).attend(query, key, value, bias, SCORING)
    for row, keys in enumerate(seen):
        own = (kept[:, keys.start : keys.stop] for kept in (key, value))
        expected = torch.zeros(1, 1, 16, dtype=dtype)
        if keys:
            expected = TorchBackend(dtype).attend(query[:, row : row + 1], *own, None, SCORING)
        within = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=within)


def compiled_for(monkeypatch, num_rows: int) -> list[tuple[object, ...]]:
    """What each launch is compiled for: the constants, and which tensors are aligned.

    Numbers of rows and tables are exempt, and compile_triton.py sees to it that they are.
    """
    launches = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid):
            def launch(*values, **constants):
                tensors = [value for value in values if isinstance(value, Tensor)]
                aligned = [t.data_ptr() % 16 == 0 for t in tensors if t.is_floating_point()]
                launches.append((self._name, sorted(constants.items()), aligned))

            return launch

    with monkeypatch.context() as patch:
        for name in [name for name in vars(ops) if name.endswith("_kernel")]:
            patch.setattr(ops, name, Recorded(name))
        # An odd width and a first row that is left out: most rows begin where nothing is aligned.
        backend, x = triton_backend.TritonBackend(torch.float32, "cpu"), draw(num_rows + 1, 37)[1:]
        norm, heads = Norm(draw(37), 1e-5, True), draw(num_rows, 4, 16)
        backend.linear(draw(19, 37))(x)
        backend.norm(x, norm)
        backend.add_norm(x, x, norm)
        backend.gate(draw(num_rows + 1, 38)[1:], torch.nn.SiLU())
        angles = draw(num_rows, 16), draw(num_rows, 16)
        backend.rotate_(heads, (2, 1, 1), angles, None)
        key, bias = draw(1, 70, 16), torch.zeros(1, num_rows, 70)
        backend.attend(heads[:, :2].transpose(0, 1), key, key, bias, SCORING)
    return launches


NUMS_ROWS = (1, 2, 15, 16, 17, 32, 64, 100, 300)


def test_no_program_is_compiled_for_a_number_of_rows(monkeypatch):
    """The interpreter gives a row the same bits in tiles of all sizes; a card need not."""
    expected = compiled_for(monkeypatch, NUMS_ROWS[0])
    assert len(expected) == 6
    for num_rows in NUMS_ROWS[1:]:
        assert compiled_for(monkeypatch, num_rows) == expected, num_rows


def over_pages_compiled_for(monkeypatch, num_rows: int, num_keys: int) -> list[tuple[object, ...]]:
    """Likewise of attention over pages, and the programs of each launch."""
    launches = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid):
            return lambda *values, **constants: launches.append(
                (self._name, grid, sorted(constants.items()))
            )

    ranges = torch.tensor([[0, num_keys]]).expand(num_rows, 2)
    tables = ops.PagedTables(*(torch.zeros(3 * num_rows, dtype=torch.int64) for _ in range(3)))
    key = draw(1, 640, 16)
    with monkeypatch.context() as patch:
        for name in ("attention_kernel", "merge_kernel"):
            patch.setattr(ops, name, Recorded(name))
        ops.attention(draw(2, num_rows, 16), key, key, ops.Seen(ranges, tables), SCORING)
    return launches


def test_only_the_number_of_rows_decides_whether_keys_are_split(monkeypatch):
    """So a graph holds for any number of keys, and there are two binaries."""
    compiled = {
        num_rows: over_pages_compiled_for(monkeypatch, num_rows, 600)
        for num_rows in (1, 2, 16, 64, 65, 300)
    }
    for num_rows, launches in compiled.items():
        assert over_pages_compiled_for(monkeypatch, num_rows, 1) == launches
        is_few = num_rows <= ops.FEW_ROWS
        names = ["attention_kernel", *(["merge_kernel"] if is_few else [])]
        assert [name for name, *_ in launches] == names
        assert launches[0][1] == (num_rows, 1, ops.MAX_PARTS if is_few else 1)
        other = compiled[1 if is_few else 300]
        assert [own[2] for own in launches] == [own[2] for own in other]
    few, many = (dict(compiled[num_rows][0][2]) for num_rows in (1, 300))
    assert few.pop("IS_SPLIT")
    assert not many.pop("IS_SPLIT")
    assert few == many
    assert max(static_rows.SHAPES) == ops.FEW_ROWS


def tile_of_rows(x: Tensor, *args: object) -> Tensor:
    """Few rows in a smaller tile: less is computed for nothing."""
    *weights, tile = args
    return ops.product(x, *weights, replace(tile, rows=16 if len(x) <= 16 else 128))


def test_a_tile_that_follows_the_rows_shows(monkeypatch):
    monkeypatch.setattr(triton_backend, "product", tile_of_rows)
    assert compiled_for(monkeypatch, 16) != compiled_for(monkeypatch, 17)


def test_a_tensor_that_is_not_aligned_shows(monkeypatch):
    monkeypatch.setattr(ops, "_aligned", lambda tensor: tensor)
    found = {str(compiled_for(monkeypatch, num_rows)) for num_rows in (1, 2)}
    monkeypatch.undo()
    assert found != {str(compiled_for(monkeypatch, 1))}


def guarded(tensor: Tensor) -> Tensor:
    """The same between values that are no numbers."""
    wide = tensor.new_full((tensor.numel() + 512,), torch.nan)
    inner = wide[256:-256].view(tensor.shape)
    return inner.copy_(tensor)


GUARDED: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "product": lambda g: ops.product(
        g(draw(3, 37)), g(draw(19, 37, seed=1)), g(draw(19, seed=2)), tiles.ONE[torch.float32]
    ),
    "norm": lambda g: ops.rms_norm(g(draw(3, 37)), Norm(g(draw(37, seed=1)), 1e-5, True)),
    "rotation": lambda g: ops.rotated_heads(
        g(draw(2, 4, 24)), 3, 2, (g(draw(2, 24, seed=1)), g(draw(2, 24, seed=2))), None
    ),
    "product, outputs first": lambda g: ops.product(
        *(g(draw(3, 37)), g(draw(19, 37, seed=1)), g(draw(19, seed=2))),
        tiles.Tile(16, 32, 32, outputs_first=True),
    ),
    "gate": lambda g: ops.gated_silu(g(draw(2, 38))),
    "attention": lambda g: ops.attention(
        g(draw(3, 2, 24)),
        g(draw(1, 70, 24, seed=1)),
        g(draw(1, 70, 24, seed=2)),
        ops.Seen(torch.tensor([[0, 70], [3, 69]]), bias=g(draw(2, 70, seed=3))),
        SCORING,
    ),
    "attention, split": lambda g: ops.attention(
        g(draw(3, 2, 24)),
        g(draw(1, 300, 24, seed=1)),
        g(draw(1, 300, 24, seed=2)),
        ops.Seen(torch.tensor([[0, 300], [3, 299]])),
        SCORING,
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_nothing_is_read_outside_of_a_tensor(name):
    run = GUARDED[name]
    found = run(guarded)
    assert found.isfinite().all()
    assert torch.equal(found, run(lambda tensor: tensor))


def test_tensors_that_do_not_fit_are_refused():
    x, weight, tile = draw(2, 8), draw(4, 8), tiles.ONE[torch.float32]
    with pytest.raises(RuntimeError, match="sizes"):
        ops.product(x, draw(4, 9), None, tile)
    with pytest.raises(RuntimeError, match=r"expected torch\.float32 on cpu"):
        ops.product(x, weight.bfloat16(), None, tile)
    with pytest.raises(RuntimeError, match=r"no Triton kernels for torch\.float64"):
        ops.product(x.double(), weight.double(), None, tile)
    with pytest.raises(RuntimeError, match="ranges"):
        over_pages.RowTables.of([Span(0, 2, 0, 2, [1])], torch.tensor([64, 65])).seeing(
            torch.tensor([[0, 1]])
        )


@pytest.fixture
def make_small(monkeypatch):
    monkeypatch.setattr("blockdraft.kernels.backends.cpu_backend", triton_on_cpu)
    # What the other tests have checked.
    monkeypatch.setattr(triton_backend.TritonBackend, "_may_attend", lambda *own: True)
    # Each is a program of its own, also where it has no key.
    monkeypatch.setattr(ops, "MAX_PARTS", 2)

    def make():
        model = tiny_target("qwen3", num_hidden_layers=1, max_position_embeddings=32)
        return make_target("paged", model, num_pages=12, layer_ids=(0,))

    return make


@pytest.fixture
def small_target(make_small):
    return make_small()


def test_a_model_computes_with_the_kernels(small_target):
    """Its layers and its last norm; it passes the check of a load, and drafts change nothing."""
    inner = small_target.model.model
    assert small_target.rule.row_multiple == 1
    assert isinstance(inner.layers[0].forward.layer.backend, triton_backend.TritonBackend)
    assert "forward" in vars(inner.norm)
    small_target.check_row_invariance(splits=((9,), (1, 3, 5)))
    params, drafter = SamplingParams(max_tokens=5), NoisyOracleDrafter(3, VOCAB_SIZE)
    check_drafted_equals_plain(small_target, drafter, [5, 17, 60, 2, 9], params)


def test_a_model_with_a_fault_is_refused(small_target, monkeypatch):
    monkeypatch.setattr(triton_backend, "product", sum_by_rows)
    with pytest.raises(RowsDepend, match="change with the number of rows"):
        small_target.check_row_invariance(splits=((9,), (1,) * 9))


def steps(target, is_static: bool) -> list[Tensor]:
    """Logits, features and kept keys of three sequences: prompts, trees, then a token each."""
    samples = Samples.__new__(Samples)
    samples.target, samples.samples = target, {}
    assert not is_static or target.use_static_shapes()
    lengths = {0: 5, 1: 2, 2: 9}
    for key, length in lengths.items():
        samples.open(key, range(key, key + length))
    for key, length in lengths.items():
        samples.pass_over(samples.plan(key, chunk=length - 1))
        samples.samples[key].num_cached = length - 1
    found: list[Tensor] = []
    trees = {0: Tree((7, 8, 9, 4), (-1, 0, 0, -1)), 1: Tree((3, 5), (-1, -1))}
    for chosen in (trees, {}):
        planned = {key: samples.plan(key, chosen.get(key)) for key in lengths}
        output = samples.pass_over(*planned.values())
        found += [output.logits, *map(output.features_of, range(len(planned)))]
        for key, one in planned.items():
            path = one.tree.path(len(one.tree) - 2) if len(one.tree) else []
            samples.commit(one, path, bonus=key + 1)
    return found + [kept for key in lengths for kept in samples.kept(key)]


def test_fixed_shapes_change_no_bit(make_small):
    """Of many sequences with trees; what they were, by a target whose shapes are its own."""
    target = make_small()
    expected, found = steps(make_small(), False), steps(target, True)
    assert same(found, expected)
    assert {1, 4, 8, 16} >= set(target._static._inputs) > {4, 8}


@pytest.mark.parametrize("fault", ["scratch page", "old tables"])
def test_faults_of_fixed_shapes_show(make_small, monkeypatch, fault):
    expected = steps(make_small(), False)
    if fault == "scratch page":  # rows that fill up write over the first page of a sequence
        monkeypatch.setattr(static_rows, "SCRATCH_PAGE", 1)
    else:
        write = static_forward.StaticInputs.write

        def write_once(self, rows):
            kept = self.tables.path_slots.clone()
            fits = write(self, rows)
            self.tables.path_slots.copy_(kept)
            return fits

        monkeypatch.setattr(static_forward.StaticInputs, "write", write_once)
    assert not same(steps(make_small(), True), expected)


def test_a_pretended_card(monkeypatch):
    """Everything is made on the card: the target, fixed shapes, and a drafter."""
    monkeypatch.setattr(choice, "_choices", {})
    monkeypatch.setattr(check, "NUMS_ROWS", (1, 3))
    monkeypatch.setattr(check, "PLACES", (0,))
    monkeypatch.setattr(ops, "MAX_PARTS", 2)
    model = tiny_target("qwen3", num_hidden_layers=1, max_position_embeddings=32)
    drafter = tiny_drafter(
        block_size=4,
        num_target_layers=1,
        target_layer_ids=(0,),
        num_hidden_layers=1,
        layer_types=("full_attention",),
    )
    prompt, params = [3, 4, 5, 6, 7], SamplingParams(max_tokens=4)
    plain = generate_plain(
        make_target("paged", copy.deepcopy(model), layer_ids=(0,)), prompt, params
    )
    with PretendCuda():
        target = make_target("paged", model.to("cuda"), num_pages=12, layer_ids=(0,))
        assert target.use_static_shapes()
        assert card_kernels(torch.float32, "cuda") == (True, "")
        dflash = make_dflash(target, drafter.to("cuda"))
        assert type(dflash.contexts.backend) is triton_backend.TritonBackend
        assert dflash._kernel_draft._static is not None
        found = generate(target, dflash, prompt, params)
    assert found.token_ids == plain.token_ids


def test_blocks_of_a_drafter_in_fixed_shapes_change_no_bit(monkeypatch):
    """Of two sequences, with slots that only fill up, and after others of the same shape."""
    monkeypatch.setattr("blockdraft.kernels.backends.cpu_backend", triton_on_cpu)
    monkeypatch.setattr(triton_backend.TritonBackend, "_may_attend", lambda *own: True)
    monkeypatch.setattr(ops, "MAX_PARTS", 2)
    model = tiny_drafter(
        block_size=4, num_hidden_layers=1, layer_types=("sliding_attention",), sliding_window=6
    )
    lengths, sizes, found = [7, 5], [2, 3], []
    positions = torch.tensor([[*range(7, 10)], [*range(5, 8)]])
    for is_static in (False, True):
        pages = Pages(8)
        contexts = PagedContexts(model.config, pages, model.fc.weight)
        for key, length in enumerate(lengths):
            pages.open(key, [0], with_context=True)
            assert pages.reserve(key, length + 3)
        contexts.kv.pools[0].copy_(draw(*contexts.kv.pools[0].shape))
        drafts = kernel_draft(model, contexts)
        assert not is_static or drafts.use_static_shapes()
        with torch.inference_mode():
            for seed in (1, 2):
                block = draw(2, 3, model.config.hidden_size, seed=seed)
                hidden = drafts(block, positions, [0, 1], lengths, sizes)
        found.append(hidden)
    assert torch.equal(found[0][0, :2], found[1][0, :2])
    assert torch.equal(found[0][1], found[1][1])


def test_what_triton_cannot_launch_is_told_as_torch_would(monkeypatch):
    """Its errors have a type of their own, and a load that meets one has torch's operations."""

    class Kernel:
        def __getitem__(self, grid):
            raise OutOfResources(200_000, 100_000, "shared memory")

    backend, rows = triton_on_cpu(torch.float32), torch.ones(2, 32)
    monkeypatch.setattr(ops, "norm_kernel", Kernel())
    with pytest.raises(RuntimeError, match="OutOfResources"):
        backend.norm(rows, Norm(rows[0], 1e-5, True))


def test_the_part_of_the_gpu_check(monkeypatch, tmp_path):
    """What it would do on a card, with numbers that say nothing about one."""
    size = ModelSize(32, 48, 2, 1, 16, 64, 1)
    settings = Settings(**REHEARSAL | {"rows": (1, 2, 5)})
    monkeypatch.setattr(triton_kernels, "backend_for", lambda dtype, *own: triton_on_cpu(dtype))
    monkeypatch.setattr(triton_kernels, "seconds_of", lambda call, device: call() is None)
    monkeypatch.setattr(triton_kernels, "TIMED_ROWS", (1, 2))
    monkeypatch.setattr(triton_kernels, "CONTEXTS", ((2, 2, 70),))
    notes = Notes(tmp_path / "triton.found.json")
    for part in (triton_kernels._operations, triton_kernels._attention):
        part(settings, notes, "float32", "small", size)
    found = notes.found
    assert set(found["bits"]["float32"]["small"].values()) == {"same bits"}
    assert all(float(error) < 1e-5 for error in found["largest error"]["float32"]["small"].values())
    assert set(found["ms"]["float32"]["small"]["down"]) > {"torch, 1 rows", "tile of 16, 2 rows"}
    assert set(found["attention ms"]["float32"]["small"]) == {
        f"2 x 2 rows, 70 keys, {way}" for way in ("torch", "Triton")
    }


def test_windows_ask_for_no_tile_that_nobody_sees():
    """The first tile begins at a multiple of its size, so a window moves no sum."""
    trees, backend = Trees(torch.float32), triton_on_cpu(torch.float32)
    wide = LayerAttention(SCORING, Visibility(window=10_000))
    causal = LayerAttention(SCORING, CAUSAL)
    assert torch.equal(
        trees.run(backend, [0], wide, rest=torch.nan)[0],
        trees.run(backend, [0], causal, rest=torch.nan)[0],
    )
