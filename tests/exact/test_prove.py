"""`blockdraft prove` on the default pair, as a user runs it, and with a drafter of noise."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from blockdraft.cli.main import app
from blockdraft.hub.catalog import DEFAULT_TARGET, find_drafter
from blockdraft.hub.resolve import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.slow]


def noise_drafter(folder: Path) -> Path:
    """The default drafter's config with shuffled weights."""
    name = find_drafter(DEFAULT_TARGET)
    assert name is not None
    own = resolve_model(name)
    (folder / "config.json").write_bytes((own / "config.json").read_bytes())
    weights = load_file(own / "model.safetensors")
    shuffled = {name: weight.flatten().roll(7).view_as(weight) for name, weight in weights.items()}
    save_file(shuffled, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["default", "noise"])
def test_the_default_target_is_proven(kind: str, tmp_path: Path) -> None:
    drafter = "auto" if kind == "default" else str(noise_drafter(tmp_path))
    result = CliRunner().invoke(app, ["prove", "--quick", "--json", "--drafter", drafter])
    assert result.exit_code == 0, result.output
    certificate = json.loads(result.stdout)
    assert certificate["verdict"] == "proven"
    assert certificate["num_differences"] == 0
    assert all(control["caught"] for control in certificate["controls"])
    # Beside noise, lookup and the text's own n-grams draft well enough.
    assert certificate["checks"][0]["acceptance_length"] > 1.1
