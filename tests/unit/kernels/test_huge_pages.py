"""Weights in large pages are copies of what they were, and nobody else's."""

import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.kernels.cpu import huge_pages
from blockdraft.kernels.cpu.huge_pages import ALIGNED, BLOCK, HUGE_PAGE, in_huge_pages

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(0, 8), (1,), (3, 5), (7, 48, 2, 96)])
def test_a_copy_has_the_same_values(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(100).to(dtype).repeat(1000)[: torch.Size(shape).numel()].view(shape)
    copy = in_huge_pages(tensor)
    assert copy.dtype == dtype
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()
    assert copy.data_ptr() % ALIGNED == 0


def test_copies_share_no_bytes() -> None:
    ones = [in_huge_pages(torch.full((1000 + i,), i, dtype=torch.int16)) for i in range(50)]
    for i, own in enumerate(ones):
        assert own.tolist() == [i] * (1000 + i)


def test_a_tensor_larger_than_a_block_gets_one_of_its_own() -> None:
    tensor = torch.arange(BLOCK // 4 + 1, dtype=torch.int32)
    assert torch.equal(in_huge_pages(tensor), tensor)


def test_a_view_that_is_not_contiguous_is_copied_in_its_order() -> None:
    tensor = torch.arange(12).view(3, 4).T
    assert in_huge_pages(tensor).tolist() == tensor.tolist()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has none"
)
def test_a_block_begins_with_a_large_page_and_asks_for_them() -> None:
    _begin_a_block()
    copy = in_huge_pages(torch.zeros(1))
    assert copy.data_ptr() % HUGE_PAGE == 0
    assert "hg" in _flags_at(copy.data_ptr())


def test_a_block_is_given_back_with_its_last_tensor() -> None:
    _begin_a_block()
    copy = in_huge_pages(torch.zeros(1))
    address = copy.data_ptr()
    _begin_a_block()
    assert _is_mapped(address)
    del copy
    assert not _is_mapped(address)


def test_what_was_taken_last_is_taken_again() -> None:
    _begin_a_block()
    kept = in_huge_pages(torch.zeros(10))
    tried = [in_huge_pages(torch.zeros(10_000)) for _ in range(3)]
    first = tried[0].data_ptr()
    tried.clear()
    again = in_huge_pages(torch.ones(5))
    assert again.data_ptr() == first
    assert kept.tolist() == [0.0] * 10


def test_what_is_free_before_others_stays_free() -> None:
    _begin_a_block()
    first = in_huge_pages(torch.zeros(10))
    second = in_huge_pages(torch.full((10,), 2.0))
    del first
    third = in_huge_pages(torch.full((10,), 3.0))
    assert second.tolist() == [2.0] * 10
    assert third.tolist() == [3.0] * 10


def test_views_keep_what_they_show() -> None:
    _begin_a_block()
    view = in_huge_pages(torch.full((4, 4), 7.0))[1:, 1]
    other = in_huge_pages(torch.zeros(4, 4))
    assert view.tolist() == [7.0] * 3
    assert not other.any()


@pytest.mark.parametrize("has_registered", [False, True])
def test_an_interrupted_copy_gives_nothing_away(
    monkeypatch: pytest.MonkeyPatch, has_registered: bool
) -> None:
    def interrupt(*arguments: Any) -> None:
        if has_registered:
            weakref.finalize(*arguments)
        raise KeyboardInterrupt

    _begin_a_block()
    kept = in_huge_pages(torch.zeros(10))
    with monkeypatch.context() as patch:
        patch.setattr(huge_pages, "finalize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            in_huge_pages(torch.zeros(10))
    others = [in_huge_pages(torch.full((10,), float(i))) for i in range(3)]
    assert kept.tolist() == [0.0] * 10
    assert [own.tolist() for own in others] == [[float(i)] * 10 for i in range(3)]


def test_without_memory_the_tensor_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    _begin_a_block()
    monkeypatch.setattr(mmap, "mmap", refuse)
    tensor = torch.zeros(3)
    assert in_huge_pages(tensor) is tensor


def test_a_system_without_large_pages_keeps_tensors_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    tensor = torch.zeros(3)
    assert in_huge_pages(tensor) is tensor


def _begin_a_block() -> None:
    huge_pages._newest = None


def _is_mapped(address: int) -> bool:
    return any(
        begin <= address < end
        for begin, end in map(_range_of, Path("/proc/self/maps").read_text().splitlines())
    )


def _range_of(line: str) -> tuple[int, int]:
    begin, end = line.split()[0].split("-")
    return int(begin, 16), int(end, 16)


def _flags_at(address: int) -> str:
    """What the system notes of the memory there."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = _range_of(line)
            is_there = begin <= address < end
        elif first == "VmFlags:" and is_there:
            return " ".join(others)
    return ""
