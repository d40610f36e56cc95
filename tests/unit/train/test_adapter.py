"""Retuning a drafter for a target whose weights changed a little: `only_adapter` and `quantize`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.core.errors import ConfigError
from blockdraft.models.layers.quantized import dequantize
from blockdraft.models.target.loading import load_target_model
from blockdraft.train import training_run
from blockdraft.train.config import TrainConfig
from blockdraft.train.trainer import train
from tests.tiny import tiny_drafter_folder
from tests.train_runs import small_config


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return small_config(tmp_path, max_steps=2, init_from=tiny_drafter_folder(tmp_path))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_only_the_fusion_and_the_norms_change(config: TrainConfig, tmp_path: Path) -> None:
    result = train(small_config(tmp_path, max_steps=2, init_from=config.init_from,
                                only_adapter=True, num_layers=None))  # fmt: skip
    assert config.init_from is not None
    before, after = weights_of(config.init_from), weights_of(result.drafter)
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    norms = {name for name in before if name.removesuffix(".weight").endswith("norm")}
    assert len(norms) == 2 * 4 + 2
    assert changed == {"fc.weight", *norms}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "give init_from"),
        ({"architecture": "eagle3"}, "give init_from"),
    ],
)
def test_it_needs_a_drafter_to_begin_from(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        small_config(tmp_path, only_adapter=True, **changes)


@pytest.mark.parametrize("architecture", ["eagle3", "draft_model", "diffusion"])
def test_other_kinds_of_drafters_have_no_such_part(architecture: str, tmp_path: Path) -> None:
    num_features = None if architecture in ("draft_model", "diffusion") else 3
    own = {"architecture": architecture, "num_layers": 1, "num_features": num_features}
    first = train(small_config(tmp_path, max_steps=1, **own))
    with pytest.raises(ConfigError, match="only_adapter"):
        train(
            small_config(
                *(tmp_path,),
                out=tmp_path / "again",
                max_steps=1,
                init_from=first.drafter,
                only_adapter=True,
                num_layers=None,
                num_features=None,
            )
        )


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The targets that runs read."""
    found: list[Any] = []
    own = training_run.FrozenTarget

    def noted(model: Any, *args: Any, **options: Any) -> Any:
        found.append(model)
        return own(model, *args, **options)

    monkeypatch.setattr(training_run, "FrozenTarget", noted)
    return iter([found])


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_the_target_is_rounded_as_serving_rounds_it(
    bits: Any, tmp_path: Path, frozen: Iterator[list[Any]]
) -> None:
    result = train(small_config(tmp_path, max_steps=2, quantize=bits))
    (model,) = next(frozen)
    served = load_target_model(tmp_path / "llama-target", torch.float32, quantize=bits)
    dequantize(served)
    for name, weight in served.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    whole = load_target_model(tmp_path / "llama-target", torch.float32).state_dict()
    assert not torch.equal(whole["lm_head.weight"], model.state_dict()["lm_head.weight"])
    facts = json.loads((result.drafter / "provenance.json").read_text(encoding="utf-8"))
    assert facts["target"]["quantize"] == bits
    assert result.best["held_out"]["loss"] > 0


def test_features_of_the_rounded_target_are_not_those_of_the_whole_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "features"
    train(small_config(tmp_path, max_steps=1, feature_cache=cache))
    changed = {"out": tmp_path / "int4", "quantize": "int4"}
    train(small_config(tmp_path, max_steps=1, feature_cache=cache, **changed))
    assert "features of something else; they are computed again" in caplog.text
