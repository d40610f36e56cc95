"""The default target as deployed: a row's bits do not depend on the rows beside it."""

import pytest
import torch

from blockdraft.core.errors import ModelError
from blockdraft.kernels.torch.rules import row_rule
from blockdraft.models.attention.exact import STOCK_ATTENTION
from blockdraft.models.target.exact import CHECK_SPLITS, Split
from blockdraft.models.target.sequential import SequentialTarget
from tests.exact.pair import load_target, new_target
from tests.parity.targets import WAYS, Way
from tests.stock_products import must_differ
from tests.torch_threads import threads

pytestmark = pytest.mark.model

ROUNDING = {torch.bfloat16: 1.0, torch.float32: 1e-2}
"""More than rounding moves a logit of the default target, less than a wrong key does."""
MORE_ROWS = (2, 4, 6, 8, 16, 30, 64, 128, 300, 512)


def cut(total: int, lengths: tuple[int, ...]) -> Split:
    """Forwards of these lengths in turn until `total` tokens have run."""
    split: list[int] = []
    while (rest := total - sum(split)) > 0:
        split.append(min(rest, lengths[len(split) % len(lengths)]))
    return tuple(split)


def every_split(dtype: torch.dtype, total: int) -> tuple[Split, ...]:
    """As few forwards as allowed, each number of rows alone, and ragged ones."""
    most = row_rule(dtype).max_rows
    few = [cut(total, (rows,)) for rows in MORE_ROWS if 16 <= rows <= most]
    ragged = cut(total, (7, 1, 60, 16, 5, 33, 2))
    return (cut(total, (most,)), *few, ragged)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_checks_pass(dtype: torch.dtype, way: Way) -> None:
    with new_target(way, dtype).released_after() as target:
        target.check_row_invariance()


@pytest.mark.usefixtures("without_kernels")
def test_the_checks_fail_in_pages_with_exact_off() -> None:
    """A row alone then takes another kernel of oneDNN's; ours are the same for any rows."""
    with (
        new_target("paged", torch.bfloat16, exact=False).released_after() as target,
        pytest.raises(ModelError, match="change with the number of rows"),
    ):
        target.check_row_invariance()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pages_change_no_bit(dtype: torch.dtype) -> None:
    ids = list(range(100, 233))
    found = []
    ways: list[tuple[Way, tuple[int, ...]]] = [
        ("sequential", (60,)),
        ("paged", (60,)),
        ("paged", (40, 1, 9, 16)),
    ]
    for way, lengths in ways:
        with new_target(way, dtype).released_after() as target:
            found.append(target.logits_of_split(ids, cut(133, lengths)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@must_differ
@pytest.mark.parametrize(
    ("dtype", "forced"),
    [(torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)],
    ids=["bfloat16, exact off", "float32, exact off", "bfloat16, attention forced"],
)
def test_the_checks_fail_on_stock_attention(dtype: torch.dtype, forced: bool) -> None:
    """Its rows see the right keys, so they differ by rounding only.

    Forced, it runs on the rows that exactness allows; in float32 it is then invariant here.
    """
    with SequentialTarget(load_target(dtype), exact=forced).released_after() as target:
        target.model.set_attn_implementation(STOCK_ATTENTION)
        with pytest.raises(ModelError, match="change with the number of rows"):
            target.check_row_invariance()
        ids = list(range(100, 133))
        one, many = (target.logits_of_split(ids, s).float() for s in ((1,) * 33, (33,)))
        assert (one - many).abs().max() <= ROUNDING[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_from_two_rows_to_the_most(dtype: torch.dtype, num_threads: int, way: Way) -> None:
    with threads(num_threads), new_target(way, dtype).released_after() as target:
        target.check_row_invariance(every_split(dtype, 600))
        target.check_row_invariance((*CHECK_SPLITS, *(cut(33, (n,)) for n in (2, 4, 6, 8))))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_up_to_two_thousand_keys(dtype: torch.dtype, way: Way) -> None:
    """Past every length at which a product over keys is blocked differently."""
    most = row_rule(dtype).max_rows
    splits = (cut(2048, (most,)), cut(2048, (50, 61, 16, 64)))
    with new_target(way, dtype).released_after() as target:
        target.check_row_invariance(splits)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_thread_gives_the_bits_of_two(way: Way) -> None:
    ids = list(range(100, 300))
    with new_target(way, torch.bfloat16).released_after() as target:
        with threads(1):
            one = target.logits_of_split(ids, (200,))
        with threads(2):
            two = target.logits_of_split(ids, cut(200, (16, 2)))
    assert torch.equal(one, two)
