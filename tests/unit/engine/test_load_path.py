"""Which path a model takes after its check at load: in pages, one after another, or none."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft import LLM, ModelError, SamplingParams
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from tests.parity import faults
from tests.parity.test_architectures import RECURRENT, build
from tests.tiny import (
    TEXT_VOCAB_SIZE,
    tiny_drafter_folder,
    tiny_target_folder,
    tiny_tokenizer,
)

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5)
PROMPT = list(range(5, 45))


@pytest.fixture(params=["Lfm2", "Qwen3_5"])
def hybrid(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Folders of a model with recurrent layers and of its drafter."""
    options = {**RECURRENT[request.param], "vocab_size": TEXT_VOCAB_SIZE}
    target = tmp_path / "hybrid"
    build(request.param, options, torch.float32).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return str(target), str(tiny_drafter_folder(tmp_path))


def answer(llm: LLM, *, drafts: bool = True) -> tuple[int, ...]:
    params = PARAMS if drafts else replace(PARAMS, num_draft_tokens=0)
    return tuple(llm.generate(PROMPT, params).completions[0].token_ids)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Our own, except of a busy machine; transformers tells which packages would be faster."""
    return [
        record
        for record in caplog.records
        if record.levelno >= logging.WARNING
        and record.name.startswith("blockdraft.")
        and record.name != "blockdraft.core.threads"
    ]


def test_a_hybrid_that_fails_in_pages_runs_one_after_another(
    hybrid: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Planted fault: in a forward of several sequences each goes on with a neighbor's states."""
    healthy = LLM(*hybrid, dtype="float32")
    assert isinstance(healthy.engine.target, PagedTarget)
    expected = answer(healthy, drafts=False)
    assert len(set(expected)) >= 8
    assert not warnings_of(caplog)
    with faults.states_of_the_neighbor():
        llm = LLM(*hybrid, dtype="float32", adaptive=False)
        assert isinstance(llm.engine.target, SequentialTarget)
        assert answer(llm, drafts=False) == expected
        assert answer(llm) == expected
    (record,) = warnings_of(caplog)
    assert "to run sequences one after another" in record.message
    assert "logits change with the number of rows" in record.message


def test_one_that_fails_there_too_is_refused(
    hybrid: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: tokens that are taken back leave their mark in the states, on both paths."""
    tried = []
    for path in (PagedTarget, SequentialTarget):
        init = path.__init__

        def note(target: PagedTarget, *args: object, _init=init, **options: object) -> None:
            tried.append(type(target))
            _init(target, *args, **options)

        monkeypatch.setattr(path, "__init__", note)
    with (
        faults.state_stays_behind(),
        pytest.raises(ModelError, match=r"change with the number of rows .*; use --exact off"),
    ):
        LLM(*hybrid, dtype="float32")
    assert tried == [PagedTarget, SequentialTarget]


def test_a_model_without_states_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only states are kept otherwise on the other path, so a second load would help nobody."""
    monkeypatch.setattr(
        "blockdraft.models.target.transformers.first_variant_split", lambda *_: (1, 32)
    )
    monkeypatch.setattr(SequentialTarget, "__init__", lambda *_, **__: pytest.fail("loaded again"))
    with pytest.raises(ModelError, match=r"change with the number of rows .*; use --exact off"):
        LLM(str(tiny_target_folder(tmp_path)), None, dtype="float32")
