"""`blockdraft prove --quick` with a drafter of every kind that is trained here."""

import json

import pytest

from blockdraft.cli import prove as command
from blockdraft.train.trainer import train
from tests.command_line import run_json
from tests.train_runs import small_config

CORPUS = [
    {"id": "a", "kind": "chat", "prompt": "the abc the abc"},
    {"id": "b", "kind": "raw", "prompt": "!!\tthe   \n" * 9, "raw": True},
]
KINDS = {
    "dflash": {},
    "diffusion": {"architecture": "diffusion", "num_features": None},
    "diffusion of 3 steps": {
        "architecture": "diffusion",
        "num_features": None,
        "num_denoising_steps": 3,
    },
    "eagle3": {"architecture": "eagle3", "num_layers": None},
    "draft_model": {"architecture": "draft_model", "num_features": None},
}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, CORPUS)), encoding="utf-8")
    monkeypatch.setattr(command, "BUNDLED", path)
    changes = {"max_tokens": 10, "num_draws": 800, "num_settings": 2}
    monkeypatch.setattr(command, "QUICK", command.QUICK | changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_each_kind_is_proven(tmp_path, kind):
    config = small_config(tmp_path, max_steps=1, device="cpu", **KINDS[kind])
    drafter = train(config).drafter
    pair = ("--target", config.target, "--drafter", drafter, "--dtype", "float32")
    found = run_json("prove", "--quick", *pair)
    assert (found["verdict"], found["num_differences"]) == ("proven", 0)
    skipped = {control["skipped"] for control in found["controls"] if not control["caught"]}
    reads_features = kind in ("dflash", "eagle3")
    assert skipped == (set() if reads_features else {"the drafter reads no features"})
