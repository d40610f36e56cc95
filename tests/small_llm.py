"""An LLM of tiny models, and what must be true of it when all requests have ended."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockdraft import LLM, SamplingParams
from blockdraft.core.grammar import Grammar
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged

MAX_TOKENS = 24
PATIENCE = 30.0


def load_llm(folders: tuple[Path, Path], **options: Any) -> LLM:
    """Drafts whole blocks of the drafter alone, unless asked otherwise.

    One as bad as ours would soon rest.
    """
    target, drafter = folders
    usual = {"adaptive": False, "lookup": False}
    return LLM(str(target), str(drafter), dtype="float32", **{**usual, **options})


def without_pages(model: object) -> None:
    """In place of `layer_shapes`: no model runs in pages."""
    raise NotPaged("it is to run without")


def params(**changes: Any) -> SamplingParams:
    return replace(SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True), **changes)


class Gate:
    """Holds an engine at the beginning of each step until it is let through."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits, self.num_steps = threading.Semaphore(0), 0
        real = llm.engine.advance

        def advance(only: int | None = None) -> None:
            assert self._permits.acquire(timeout=PATIENCE)
            self.num_steps += 1
            real(only)

        monkeypatch.setattr(llm.engine, "advance", advance)

    def let(self, num_steps: int = 100_000) -> None:
        if num_steps:
            self._permits.release(num_steps)


def check_grammar(llm: LLM) -> AcceptanceStats:
    """Drafts follow a grammar, and the output is plain decoding's; how they were accepted."""
    grammar = Grammar.regex("(ab|cd|[a-f ]){10,30}")
    asked = SamplingParams(max_tokens=20, temperature=1.0, seed=2, grammar=grammar)
    found = llm.generate("the abc", asked).completions[0]
    assert llm.engine.proposer.failures.num_failures == 0
    llm.use_fixed_drafting(0)
    assert llm.generate("the abc", asked).completions[0].token_ids == found.token_ids
    return found.acceptance


def assert_nothing_left(llm: LLM) -> None:
    assert not llm.engine.has_work
    assert llm.engine.progress == {}
    assert llm.samples.open == []
    assert llm.engine.drafter._known == {}
    target = llm.engine.target
    if isinstance(target, PagedTarget):
        target.memory.check_integrity()
        assert target.memory.num_available == target.memory.num_pages - 1
    else:
        assert target._caches == {}
        assert llm.engine.drafter.contexts._contexts == {}
