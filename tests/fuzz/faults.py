"""Faults to plant, which the fuzz must find. More are in tests/parity/faults.py."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE, Pages
from blockdraft.engine.engine import Engine
from blockdraft.kernels.interface import Span
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.target.packed_rows import PackedRows
from blockdraft.models.target.sequential import SequentialTarget
from tests.fuzz.cases import ModelShape
from tests.parity.faults import CropOneTooFew

Fault = Callable[[], AbstractContextManager[Any]]


@contextmanager
def rollback_one_too_short() -> Iterator[None]:
    """After a rejection one rejected token stays in the cache."""
    with (
        patch.object(SequentialTarget, "keep", CropOneTooFew.keep),
        patch.object(SequentialTarget, "_forward_row", CropOneTooFew._forward_row),
    ):
        yield


@contextmanager
def stale_key_in_a_kept_slot() -> Iterator[None]:
    """The first token behind a rejection is not written: the rejected one stays in its slot."""
    real, ends = PackedRows.add, dict[int, int]()

    def add(
        rows: PackedRows, pages: Pages, key: int, ids: list[int], start: int, *args: Any
    ) -> None:
        first = len(rows)
        real(rows, pages, key, ids, start, *args)
        if 0 < start < ends.get(key, 0):  # at 0 a sequence begins, as in the test at load
            rows.slots[first] = SCRATCH_PAGE * PAGE_SIZE
        ends[key] = start + len(ids)

    with patch.object(PackedRows, "add", add):
        yield


@contextmanager
def branches_see_the_first_path() -> Iterator[None]:
    """Every branch of a tree reads the keys of the first path instead of its own."""
    real = AttentionPlan.__init__

    def init(plan: AttentionPlan, backend: Any, kv: Any, spans: list[Span], *args: Any) -> None:
        real(plan, backend, kv, [replace(span, path_slots=()) for span in spans], *args)

    with patch.object(AttentionPlan, "__init__", init):
        yield


def kept_path_stays() -> AbstractContextManager[Any]:
    """The keys of a kept branch do not move to their places."""
    return patch.object(PagedKV, "move", lambda *_: None)


@contextmanager
def row_depends_on_company() -> Iterator[None]:
    """One value of each row is one bit larger, in forwards as the test at load does not make."""
    real = ModelShape.build

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if 36 < output.shape[1] < 64:
            one = output[..., :1]
            output[..., :1] = torch.nextafter(one, torch.full_like(one, torch.inf))
        return output

    def build(shape: ModelShape) -> Any:
        model = real(shape)
        model.get_input_embeddings().register_forward_hook(hook)
        return model

    with patch.object(ModelShape, "build", build):
        yield


@contextmanager
def abort_frees_a_page_of_another() -> Iterator[None]:
    """And nobody counts the pages: only what is computed can show it."""
    real = Engine.take

    def take(engine: Engine, key: int) -> Any:
        memory = engine.target.memory
        has_ended = engine.progress[key].sequence.finish_reason is not None
        if isinstance(memory, Pages) and not has_ended:
            others = [s for s in engine.scheduler.running if s.key != key and not s.finish_reason]
            for other in others[:1]:
                page_id = memory.page_ids(other.key)[-1]
                if page_id not in memory._free and page_id not in memory._digest_of:
                    memory._free.append(page_id)
        return real(engine, key)

    with (
        patch.object(Engine, "take", take),
        patch("tests.fuzz.runner.check_pages"),
        patch("tests.fuzz.runner.check_nothing_left"),
    ):
        yield
