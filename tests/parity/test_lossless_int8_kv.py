"""Targets whose keys and values lie in int8: drafted equals their own plain decoding."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdraft.cache.paged_kv import Int8KV
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.kernels.cpu import build as build_module
from blockdraft.kernels.cpu.build import EXTRA_FLAGS, SOURCES, build
from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate.drafters.base import Drafter
from tests.batched import run_alone, run_batched
from tests.fakes import NoisyOracleDrafter, OracleDrafter
from tests.parity.checks import check_drafted_equals_plain, check_fault_is_found
from tests.parity.paged_checks import AMPLE, FEW, requests
from tests.parity.targets import make_dflash
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_drafter, tiny_target
from tests.trees import TreeDrafter
from tools import families

DOUBLE = torch.float64
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6) * 9
PARAMS = {
    "greedy": SamplingParams(max_tokens=32, logprobs=4),
    "sampled": SamplingParams(max_tokens=32, logprobs=4, temperature=1.0, seed=11),
}


def int8_target(
    kind: str = "llama", dtype: torch.dtype = torch.float32, num_pages: int = AMPLE
) -> PagedTarget:
    model = families.make(kind) if kind[0].isupper() else tiny_target(kind, dtype)
    return PagedTarget(
        model, Pages(num_pages), layer_ids=LAYER_IDS, kv_in_int8=True, keep_weights=False
    )


@pytest.mark.one_in(8)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    "kind", ["llama", "gemma3", "qwen3_moe", "DeepseekV3", "DiffLlama", "Qwen3_5"]
)
def test_drafted_equals_plain(kind: str, name: str) -> None:
    """Chains and trees, with windows, experts, attentions of other kinds and recurrent layers."""
    with int8_target(kind).released_after() as target:
        target.check_row_invariance()
        drafters: list[Drafter] = [OracleDrafter(7)]
        if target.takes_trees:
            drafters.append(TreeDrafter())
        if kind == "llama":
            drafters.append(make_dflash(target, tiny_drafter(block_size=8)))
        for drafter in drafters:
            result = check_drafted_equals_plain(target, drafter, PROMPT, PARAMS[name])
            assert len(set(result.token_ids)) >= (8 if name == "sampled" else 3)
            assert result.acceptance.num_drafted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_in_other_precisions_too(dtype: torch.dtype) -> None:
    target = int8_target("qwen3", dtype)
    target.check_row_invariance()
    check_drafted_equals_plain(target, TreeDrafter(), PROMPT, PARAMS["sampled"])


@pytest.mark.parametrize("num_pages", [AMPLE, FEW])
@pytest.mark.parametrize("chunk", [7, 512])
def test_together_equals_alone(num_pages: int, chunk: int) -> None:
    """With shared beginnings, and with memory so short that requests make room."""
    with int8_target().released_after() as target:
        alone = run_alone(target, requests())
    with int8_target(num_pages=num_pages).released_after() as target:
        pages = target.memory

        def check_pages(engine: Engine) -> None:
            pages.check_integrity()

        batched = run_batched(
            target,
            NoisyOracleDrafter(5, VOCAB_SIZE, seed=1),
            requests(),
            known=[answer.token_ids for answer in alone],
            after_step=check_pages,
            prefill_chunk=chunk,
        )
        assert batched.answers == alone
        assert pages.num_reused_tokens >= PAGE_SIZE
        assert (batched.engine.scheduler.num_preempted > 0) == (num_pages == FEW)


class PlainPagesOnly(TorchBackend):
    """As on a card: its kernels take no pages in int8."""

    takes_int8_pages = False


def test_where_no_kernel_takes_them_attention_is_the_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "blockdraft.models.target.paged.backend_for", lambda *_: PlainPagesOnly(DOUBLE)
    )
    for kv_in_int8 in (False, True):
        target = PagedTarget(tiny_target("llama", DOUBLE), Pages(9), kv_in_int8=kv_in_int8)
        (backend,) = target._backends.values()
        assert isinstance(backend, PlainPagesOnly) != kv_in_int8
        target.release()


def test_it_is_another_target_and_a_close_one() -> None:
    ids = list(PROMPT)
    logits = []
    for kv_in_int8 in (False, True):
        target = PagedTarget(tiny_target(), Pages(9), kv_in_int8=kv_in_int8)
        with target.released_after():
            logits.append(target.logits_of_split(ids, (len(ids),)))
    error = (logits[1] - logits[0]).square().mean() / logits[0].square().mean()
    assert 0 < error < 0.003


def changing_scales(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[object]:
    """Keys and values are written with other scales [2, kv_heads, n, 1] than their own."""
    write = Int8KV.write

    def wrong(self: Int8KV, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        write(self, layer, slots, k, v)
        scales = self.scales[layer].flatten(2, 3)
        scales.index_copy_(2, slots, change(scales.index_select(2, slots)))

    return patch.object(Int8KV, "write", wrong)


def of_another_row(scales: Tensor) -> Tensor:
    """A key written beside others takes the scale of its neighbor."""
    return scales.roll(1, 2)


def shared_by_a_forward(scales: Tensor) -> Tensor:
    """All tokens of a forward are rounded by the largest of their numbers."""
    return scales.amax(2, keepdim=True).expand_as(scales)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("change", [of_another_row, shared_by_a_forward])
def test_a_planted_fault_is_found(change: Callable[[Tensor], Tensor]) -> None:
    with changing_scales(change):
        check_fault_is_found(int8_target(), PROMPT, PARAMS["greedy"])


@pytest.mark.usefixtures("without_kernels")
def test_a_place_that_is_read_too_early_is_found() -> None:
    """A row is read with the scale of its neighbor, which may not be written yet."""
    gathered = Int8KV._gathered

    def wrong(self: Int8KV, name: str, *arguments: Any) -> Tensor:
        found = gathered(self, name, *arguments)
        return found.unflatten(2, (-1, 2)).flip(3).flatten(2, 3) if name == "scales" else found

    with patch.object(Int8KV, "_gathered", wrong):
        check_fault_is_found(int8_target(), PROMPT, PARAMS["greedy"])


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no C++ compiler here")
def test_a_planted_fault_of_the_kernels_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read a row with the scale of its neighbor."""
    faulty = tmp_path / "source"
    shutil.copytree(SOURCES, faulty)
    pools = (faulty / "pools.h").read_text(encoding="utf-8")
    right = "const float scale = scales[at / size];"
    assert pools.count(right) == 1
    wrong = pools.replace(right, "const float scale = scales[(at / size) ^ 1];")
    (faulty / "pools.h").write_text(wrong, encoding="utf-8")
    monkeypatch.setattr(build_module, "SOURCES", faulty)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv(EXTRA_FLAGS, "-O0")  # it compiles in an eighth of the time
    kernels = Library(str(build()))
    monkeypatch.setattr("blockdraft.kernels.cpu.backend.library", lambda: kernels)
    check_fault_is_found(int8_target(), PROMPT, PARAMS["greedy"])
