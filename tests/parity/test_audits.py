"""Audits on every kind of target: windows, experts, and states that go on token by token."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from blockdraft import LLM
from blockdraft.cache.pages import PAGE_SIZE
from tests.audits import asked, assert_genuine, check_alterations
from tests.parity.test_architectures import RECURRENT, build
from tests.tiny import TEXT_VOCAB_SIZE, tiny_drafter_folder, tiny_target_folder, tiny_tokenizer

KINDS = ("qwen3", "gemma3", "mistral", "qwen3_moe", "gpt_oss")
STATES = ("Bamba", "Jamba", "Qwen3Next")


def recurrent_folder(root: Path, name: str) -> Path:
    folder = root / name
    options = {**RECURRENT[name], "vocab_size": TEXT_VOCAB_SIZE}
    build(name, options, torch.float32).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder


def check(llm: LLM) -> None:
    """Behind a prompt of more than a page, and behind a short one."""
    prompts = [[5, 6, 7] * PAGE_SIZE, [9, 10]]
    receipts = []
    for name in ("sampled", "penalties"):
        for seed, prompt in enumerate(prompts):
            receipts += llm.receipts(llm.generate(prompt, asked(name, seed, max_tokens=12)))
    assert_genuine(llm, receipts)
    check_alterations(llm, receipts, num_trials=10, seed=5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(6)
def test_paged_targets(kind: str, tmp_path: Path) -> None:
    target, drafter = tiny_target_folder(tmp_path, kind), tiny_drafter_folder(tmp_path)
    llm = LLM(target, drafter, dtype="float32", adaptive=False)
    llm.use_fixed_drafting(12)
    check(llm)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.one_in(4)
def test_targets_with_states(name: str, tmp_path: Path) -> None:
    check(LLM(recurrent_folder(tmp_path, name), None, dtype="float32", lookup=True))
