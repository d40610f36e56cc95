"""Two starts of the same models: the second tests and measures nothing, and answers the same."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from blockdraft import LLM, ContextTooLong, Grammar, ModelError, RequestError, SamplingParams
from blockdraft.allocation import cost_measurement
from blockdraft.core import remembered
from blockdraft.core.config import LLMConfig
from blockdraft.core.machine import OtherWork, num_cpus
from blockdraft.measure.identity import hash_model
from blockdraft.models.target.paged import PagedTarget
from tests.tiny import tiny_drafter_folder, tiny_target_folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.delenv(remembered.SWITCH, raising=False)
    # Kernels stay where they were compiled.
    monkeypatch.setattr("blockdraft.engine.start_key.cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(OtherWork, "busy_cores", lambda others: 0.0)
    return str(tiny_target_folder(tmp_path)), str(tiny_drafter_folder(tmp_path))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes every test and measurement of a start."""
    ran: list[str] = []
    invariance = PagedTarget.check_row_invariance
    costs = "blockdraft.allocation.cost_measurement.measure_points"
    from blockdraft.allocation.cost_measurement import measure_points

    def check(target: PagedTarget) -> None:
        ran.append("invariance")
        invariance(target)

    def measure(*args: object) -> object:
        ran.append("costs")
        return measure_points(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedTarget, "check_row_invariance", check)
    monkeypatch.setattr(costs, measure)
    return ran


def answer(llm: LLM) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    return llm.generate([1, 2, 3], params).completions[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_start_tests_nothing_and_answers_the_same(folders, counted, dtype, caplog):
    with caplog.at_level(logging.INFO, logger="blockdraft"):
        first = answer(LLM(*folders, dtype=dtype))
        assert counted[0] == "invariance"
        assert "costs" in counted
        assert caplog.text.count("testing the kernels") == 1
        counted.clear()
        assert answer(LLM(*folders, dtype=dtype)) == first
    assert counted == []
    assert caplog.text.count("testing the kernels") == 1
    assert answer(LLM(*folders, dtype=dtype, recheck=True)) == first
    assert "invariance" in counted


def test_other_weights_and_other_settings_are_tested(folders, counted, tmp_path):
    LLM(folders[0], None, dtype="float32")
    LLM(folders[0], None, dtype="float32", max_concurrency=2)
    LLM(folders[0], None, dtype="float64")
    other = tiny_target_folder(tmp_path / "other", num_hidden_layers=3)
    LLM(str(other), None, dtype="float32")
    assert counted == ["invariance"] * 4


def test_a_target_whose_own_code_has_changed_is_tested_again(folders, counted):
    code = Path(folders[0]) / "modeling_own.py"
    code.write_text("layers = 1", encoding="utf-8")
    known = hash_model(code.parent)
    LLM(folders[0], None, dtype="float32")
    code.write_text("layers = 2", encoding="utf-8")
    LLM(folders[0], None, dtype="float32")
    assert counted == ["invariance"] * 2
    assert hash_model(code.parent) != known


def test_times_taken_beside_other_programs_serve_while_they_run(
    folders, counted, monkeypatch, caplog
):
    busy = 0.5 * num_cpus()
    monkeypatch.setattr(OtherWork, "busy_cores", lambda others: busy)
    monkeypatch.setattr(cost_measurement, "others_at_start", lambda: busy)
    with caplog.at_level(logging.INFO, logger="blockdraft"):
        LLM(*folders, dtype="float32")
    assert f"kept {busy:.1f} of" in caplog.text
    counted.clear()
    for busy, measures in ((0.5, False), (0.9, False), (0.3, True), (0.35, False), (0.0, True)):
        busy *= num_cpus()
        LLM(*folders, dtype="float32")
        assert set(counted) == ({"costs"} if measures else set())
        counted.clear()
    busy = 0.9 * num_cpus()
    LLM(*folders, dtype="float32")
    assert counted == []  # those of a calm machine hold for good


def test_what_fails_is_not_remembered(folders, monkeypatch):
    def fail(target: PagedTarget) -> None:
        raise ModelError("rows differ")

    with monkeypatch.context() as patch:
        patch.setattr(PagedTarget, "check_row_invariance", fail)
        for _ in range(2):
            with pytest.raises(ModelError, match="rows differ"):
                LLM(*folders, dtype="float32")
    LLM(*folders, dtype="float32")


def test_weights_that_were_packed_are_freed_and_nothing_reads_them(folders):
    """Whatever read one would compute with "not a number"."""
    llm = LLM(*folders, dtype="float32")
    layers = llm.engine.target.layers
    linears = [part for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)]
    fused = any("forward" in vars(layer) for layer in layers)
    if not fused:
        pytest.skip("this machine packs nothing")
    assert all(linear.weight.isnan().all() for linear in linears)
    assert {linear.weight.untyped_storage().nbytes() for linear in linears} == {4}
    plain = LLM(folders[0], None, dtype="float32")
    assert answer(llm) == answer(plain)
    with llm.measured() as meter:
        answer(llm)
    assert meter.take()
    embedding: torch.Tensor = llm.engine.target.model.get_input_embeddings().weight
    assert not embedding.isnan().any()


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([1] * 400, SamplingParams(max_tokens=200), ContextTooLong),
        ([1], SamplingParams(grammar=Grammar.regex("(")), RequestError),
    ],
)
def test_what_cannot_be_answered_is_refused_before_weights_are_read(
    folders, monkeypatch, prompt, params, error
):
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("blockdraft.engine.load.load_target_model", read)
    config = LLMConfig(target=folders[0], drafter=folders[1], dtype="float32")
    with pytest.raises(error):
        LLM.of(config, lambda outline: outline.check(prompt, params))
