"""The default target and drafter, loaded once a process."""

import os
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from blockdraft.core.sequence import Batch, DraftBlock
from blockdraft.hub.catalog import DEFAULT_TARGET, find_drafter
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.draft import DraftModel, load_draft_model
from blockdraft.models.exact import supports_bfloat16
from blockdraft.models.loading import check_pair, load_target_model
from blockdraft.models.sequential import SequentialTarget
from blockdraft.models.target import TargetOutput
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from tests.exact.prompts import read_prompts

DRAFTER_VARIABLE = "BLOCKDRAFT_TEST_DRAFTER"
"""Names another drafter (folder or catalog name) to run these tests with."""


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
    return load_draft_model(resolve_model(name), torch.bfloat16)


class RecordingTarget:
    """A target that keeps the logits [V] by which each position of the last sequence was chosen.

    A position that was rejected is computed again, and then overwritten here.
    """

    def __init__(self, target: SequentialTarget) -> None:
        self.target = target
        self.vocab_size, self.max_context = target.vocab_size, target.max_context
        self.by_position: dict[int, Tensor] = {}

    def forward(self, batch: Batch, block: DraftBlock) -> TargetOutput:
        output = self.target.forward(batch, block)
        for row, logits in zip(batch, output.logits, strict=True):
            if row.sequence.num_cached == 0:
                self.by_position = {}
            first = row.sequence.num_cached + len(row.new_ids)
            self.by_position.update(enumerate(logits, first))
        return output

    def truncate(self, key: int, length: int) -> None:
        self.target.truncate(key, length)

    def close(self, key: int) -> None:
        self.target.close(key)


@lru_cache
def exact_pair() -> tuple[SequentialTarget, DFlashDrafter]:
    """The default pair in bfloat16, as deployed on this CPU."""
    draft = default_drafter()
    model = load_target(torch.bfloat16)
    check_pair(model, draft.config)
    target = SequentialTarget(model, layer_ids=draft.config.target_layer_ids)
    embed = model.get_input_embeddings().weight
    return target, DFlashDrafter(draft, embed, model.get_output_embeddings().weight)
