"""What a trained drafter says of its target, and of what may be expected of it."""

import dataclasses
import json

import pytest
import torch

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import RequestError
from blockdraft.data.shards import write_manifest
from blockdraft.diagnose.doctor.examine import examine
from blockdraft.diagnose.doctor.pair import read_pair
from blockdraft.engine.bundled_prompts import read_bundled
from blockdraft.engine.trained_thinking import MIXED
from blockdraft.measure.identity import hash_text
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.train import origin
from blockdraft.train.origin import describe_target
from blockdraft.train.trainer import train
from tests.clear_pair import MASK
from tests.train_runs import small_config


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path, max_steps=1, tau_limit=1, tau_max_tokens=4, mask_token_id=MASK)


def facts_of(result):
    return json.loads((result.drafter / "provenance.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_trained_drafter_passes_its_own_examination(config):
    result = train(config)
    facts = facts_of(result)
    tokenizer = load_tokenizer(config.target)
    assert facts["target"] == {
        "weights_sha256": weights_sha256(config.target),
        "dtype": "float32",
        "quantize": None,
        "template_sha256": hash_text(tokenizer.chat_template),
        "thinking": None,
    }
    assert set(facts["expected"]["tau"]) == {prompt.category for prompt in read_bundled()}
    assert "expected" not in json.loads((config.out / "last" / "provenance.json").read_text())
    # The machine is not what is looked at, however busy it is.
    pair = LLMConfig(target=str(config.target), drafter=str(result.drafter), dtype="float32")
    found = examine(read_pair(pair, "template"), lambda stage, share: None)
    marks = {check.name: check.mark for check in found.checks}
    names = ["target weights", "chat template", "layer ids", "rope", "mask token"]
    assert {marks[name] for name in names} == {"ok"}
    assert marks["tau, math"] == "out"  # as low as it promises: one step teaches nothing
    assert found.acceptance["math"].acceptance_length == pytest.approx(
        facts["expected"]["tau"]["math"], abs=1e-4
    )


def test_what_is_expected_is_measured_once(config, monkeypatch):
    facts = facts_of(train(config))
    monkeypatch.setattr(origin, "answer_bundled", None)
    assert facts_of(train(config)) == facts


def test_without_real_decoding_nothing_is_promised(config):
    assert "expected" not in facts_of(train(dataclasses.replace(config, tau_limit=0)))


def test_a_target_that_cannot_take_the_prompts_is_trained_for_all_the_same(
    config, monkeypatch, caplog
):
    def refuse(*arguments):
        raise RequestError("it does not fit")

    monkeypatch.setattr(origin, "answer_bundled", refuse)
    assert "expected" not in facts_of(train(config))
    assert "it does not fit" in caplog.text


@pytest.mark.parametrize(
    ("told", "expected"),
    [(["on"], "on"), (["off", "off"], "off"), (["on", "off"], MIXED), ([None], "template")],
)
def test_thinking_is_what_the_answers_were_asked_with(config, tmp_path, told, expected):
    folders = []
    for number, thinking in enumerate(told):
        folder = tmp_path / f"answers-{number}"
        folder.mkdir()
        hashes = {name: {"sha256": "0"} for name in ("target", "template")}
        run = {"config": {} if thinking is None else {"thinking": thinking}}
        write_manifest(folder, hashes | {"runs": [run]})
        folders.append(folder)
    changed = dataclasses.replace(config, data=(*config.data, *folders))
    assert describe_target(changed, torch.float32)["thinking"] == expected
