"""The default target and drafter, loaded once a process, in the precision that runs here."""

import os
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.hub.catalog import DEFAULT_TARGET, find_drafter
from blockdraft.hub.resolve import resolve_model
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.target.loading import check_pair, load_target_model, resolve_dtype
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from tests.exact.prompts import read_prompts
from tests.parity.targets import Way, make_dflash

DRAFTER_VARIABLE = "BLOCKDRAFT_TEST_DRAFTER"
"""Names another drafter (folder or catalog name) to run these tests with."""


DTYPE = resolve_dtype("auto", "cpu")
"""As deployed on this CPU: bfloat16, or float32 where that is not multiplied in hardware."""


@lru_cache
def target_folder() -> Path:
    return resolve_model(DEFAULT_TARGET)


def load_target(dtype: torch.dtype) -> PreTrainedModel:
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    return load_target_model(target_folder(), dtype)


@lru_cache
def prompt_ids() -> tuple[tuple[int, ...], ...]:
    """Token ids of the 200 prompts: chat turns, and single tokens without a template."""
    tokenizer = AutoTokenizer.from_pretrained(target_folder(), local_files_only=True)
    found = []
    for row in read_prompts():
        if row["kind"] == "one_token":
            found.append(tuple(tokenizer(row["text"])["input_ids"][:1]))
            continue
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["text"]}], add_generation_prompt=True, return_dict=True
        )
        found.append(tuple(encoded["input_ids"]))
    return tuple(found)


@lru_cache
def default_drafter() -> DraftModel:
    name = os.environ.get(DRAFTER_VARIABLE) or find_drafter(DEFAULT_TARGET)
    assert name is not None
    return DraftModel.from_pretrained(resolve_model(name), DTYPE)


def new_target(
    way: Way, dtype: torch.dtype, layer_ids: tuple[int, ...] = (), *, exact: bool = True
) -> SequentialTarget | PagedTarget:
    """The default target, with room for its longest context twice."""
    model = load_target(dtype)
    if way == "sequential":
        return SequentialTarget(model, layer_ids=layer_ids, exact=exact)
    return PagedTarget(model, Pages(1 + 2 * 8192 // PAGE_SIZE), layer_ids=layer_ids, exact=exact)


@lru_cache
def exact_pair(way: Way = "paged") -> tuple[SequentialTarget | PagedTarget, DFlashDrafter]:
    """The default pair as deployed on this CPU; that is in pages."""
    draft = default_drafter()
    target = new_target(way, DTYPE, draft.config.target_layer_ids)
    check_pair(target.model, draft.config)
    return target, make_dflash(target, draft)
