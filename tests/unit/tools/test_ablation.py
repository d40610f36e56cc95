"""The experiment that compares the trainer's choices: its own kind of drafter, its settings."""

import argparse
import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_drafter
from tests.train_runs import write_answers
from tools.experiments import ablation


@pytest.fixture
def fusion():
    plain = tiny_drafter(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    model = ablation.InputFusion(plain.config)
    model.load_state_dict(plain.state_dict())
    return model.eval()


def project(model, features):
    return model.project_context(features, torch.arange(features.shape[1])[None])


def features_of(model, num_tokens=7):
    width = model.config.num_features * model.config.target_hidden_size
    return torch.randn(1, num_tokens, width, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_input_fusion_reads_the_context_causally_and_mixes_it(fusion):
    features = features_of(fusion)
    changed = features.clone()
    changed[:, 4] += 1
    for layer, (one, other) in enumerate(
        zip(project(fusion, features), project(fusion, changed), strict=True)
    ):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a[:, :, :4], b[:, :, :4])
            assert not torch.allclose(a[:, :, 4], b[:, :, 4])
            # Beyond the first layer a token's keys hold what came before it.
            assert torch.allclose(a[:, :, 5:], b[:, :, 5:]) == (layer == 0)


@torch.no_grad()
def test_input_fusion_leaves_out_only_what_nobody_reads(fusion):
    features = features_of(fusion)
    x, rotation = fusion.context_inputs(features, torch.arange(7)[None])
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    seen = ablation._Seen()
    for index, layer in enumerate(fusion.draft_layers()):
        x = layer(x, rotation, seen, index, mask, 7)
    for one, other in zip(seen.context_kv, project(fusion, features), strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_input_fusion_is_another_drafter_than_injection(fusion):
    plain = tiny_drafter(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    features = features_of(fusion)
    for layer, ((k, _), (other, _)) in enumerate(
        zip(project(fusion, features), project(plain, features), strict=True)
    ):
        assert k.shape == other.shape
        # The first layer reads the same features in both, but for rounding.
        assert layer == 0 or not torch.allclose(k, other)


def settings(tmp_path: Path, **changes):
    values = {"minutes": 1.0, "answers": 10, "device": "cpu", "out": tmp_path / "arms"}
    return argparse.Namespace(**values | changes)


def test_every_arm_differs_from_the_base_in_what_it_is_named_after(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "resolve_model", lambda name: tmp_path)
    base = ablation.base_config(settings(tmp_path))
    same = {"out", "feature_cache"}
    for name, changes in ablation.ARMS.items():
        arm, plain = (ablation.arm_config(base, one).to_dict() for one in (name, "base"))
        assert {key for key in arm if arm[key] != plain[key]} - same == changes.keys()
    assert ablation.draft_class("input-fusion") is ablation.InputFusion


def test_arms_of_other_settings_are_not_mixed(tmp_path):
    ablation.keep_settings(settings(tmp_path))
    ablation.keep_settings(settings(tmp_path))
    with pytest.raises(SystemExit, match="arms made otherwise"):
        ablation.keep_settings(settings(tmp_path, minutes=2.0))


def test_answers_are_taken_evenly_and_the_short_ones_first(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    for seed in range(2):
        answers = write_answers(tmp_path / "some.jsonl", 150, seed=seed).read_bytes()
        (recipe / f"answers-{seed}.jsonl.gz").write_bytes(gzip.compress(answers))
    monkeypatch.setattr(ablation, "RECIPE", recipe)
    path = tmp_path / "answers.jsonl"
    ablation.write_answers(path, 40)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert 40 <= len(rows) <= 80
    lengths = [len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows]
    assert lengths == sorted(lengths)
    ablation.write_answers(path, 1)
    assert len(path.read_text().splitlines()) == len(rows)


def test_the_table_holds_what_was_measured(tmp_path):
    row = {
        "parameters": 2_000_000,
        "steps": 3,
        "sequences": 40,
        "offline": {"tau": 1.5},
        "true_tau": {"all": 1.4},
        "speedup": {"all": 1.1},
    }
    folder = tmp_path / "layers-1"
    folder.mkdir()
    (folder / ablation.RESULT).write_text(json.dumps(row))
    last = ablation.table(tmp_path).splitlines()[-1]
    assert last == "| layers-1 | 2.0 | 3 | 40 | 1.500 | 1.400 |  | 1.10 |"
