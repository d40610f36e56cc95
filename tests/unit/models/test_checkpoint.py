import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.core.errors import ModelError
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.draft.checkpoint import plain_name, unlisted_files, write_index
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.dflash import DraftModel

CONFIG = DraftConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=97,
    num_target_layers=12,
    target_hidden_size=64,
    target_layer_ids=(1, 5, 9),
    mask_token_id=96,
    block_size=8,
    layer_types=("full_attention", "full_attention"),
)


FILES = {"config.json", "model.safetensors", "model.safetensors.index.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    DraftModel(CONFIG).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value.clone() for name, value in change(tensors).items()}
    save_file(tensors, folder / "model.safetensors")


def test_what_is_saved_loads_bit_for_bit(tmp_path):
    model = DraftModel(CONFIG).bfloat16()
    model.save_pretrained(tmp_path, {"command": "test"})
    loaded = DraftModel.from_pretrained(tmp_path)
    assert loaded.config == CONFIG
    assert not loaded.training
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert json.loads((tmp_path / "provenance.json").read_text()) == {"command": "test"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert (
        DraftModel.from_pretrained(tmp_path, torch.float32, "cpu").fc.weight.dtype == torch.float32
    )


def test_an_index_names_the_tensors_of_the_weights_alone(folder):
    """vLLM reads every file that no index leaves out, and fails on a Hydra head."""
    save_file({"other": torch.zeros(1)}, folder / "hydra_head.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(own.nbytes for own in weights.values())
    assert unlisted_files(folder) == []
    (folder / "model.safetensors.index.json").unlink()
    assert unlisted_files(folder) == ["hydra_head.safetensors"]
    DraftModel.from_pretrained(folder)


def test_the_default_drafter_has_an_index_of_its_weights(tmp_path):
    shipped = resolve_model("smollm2-135m-dflash")
    assert {path.name for path in shipped.glob("*.safetensors")} > {"model.safetensors"}
    copied = shutil.copytree(shipped, tmp_path / "drafter")
    write_index(copied)
    name = "model.safetensors.index.json"
    assert (shipped / name).read_bytes() == (copied / name).read_bytes()


def test_saving_over_a_checkpoint_leaves_whole_files(folder):
    old = DraftModel.from_pretrained(folder)
    before = old.fc.weight.clone()
    DraftModel(CONFIG).save_pretrained(folder, {"step": 2})
    assert {path.name for path in folder.iterdir()} == {*FILES, "provenance.json"}
    assert torch.equal(old.fc.weight, before)


def test_a_failed_save_leaves_the_old_checkpoint(folder, monkeypatch):
    before = DraftModel.from_pretrained(folder).state_dict()

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("blockdraft.models.draft.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        DraftModel(CONFIG).save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == FILES
    for name, value in DraftModel.from_pretrained(folder).state_dict().items():
        assert torch.equal(value, before[name])


def test_a_loaded_model_computes_like_the_saved_one(folder):
    tensors = load_file(folder / "model.safetensors")
    features = torch.randn(1, 5, 192)
    loaded = DraftModel.from_pretrained(folder)
    fresh = DraftModel(CONFIG)
    fresh.load_state_dict(tensors)
    positions = torch.arange(5)[None]
    pairs = zip(
        loaded.project_context(features, positions),
        fresh.project_context(features, positions),
        strict=True,
    )
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("fc.weight", "fc.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("draft_model.norm.weight", "norm.weight"),
        ("draft_model.model.fc.weight", "fc.weight"),
        ("encoder.fc.weight", "fc.weight"),
        (
            "model.candidate_selector.predecessor_codebook.weight",
            "candidate_selector.predecessor_codebook",
        ),
        ("model.encoder.output_norm_enc.weight", "hidden_norm.weight"),
    ],
)
def test_prefixes_of_other_tools_are_dropped(name, plain):
    assert plain_name(name) == plain


@pytest.mark.parametrize("prefix", ["model.", "draft_model."])
def test_prefixed_checkpoints_load(folder, prefix):
    expected = DraftModel.from_pretrained(folder).state_dict()
    change_weights(folder, lambda t: {prefix + name: value for name, value in t.items()})
    loaded = DraftModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_shards_are_joined(folder):
    expected = DraftModel.from_pretrained(folder).state_dict()
    names = sorted(expected)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: expected[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    loaded = DraftModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    for damaged in ("{}", "[]", '{"weight_map": {"fc.weight": 1}}'):
        (folder / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(ModelError, match="damaged"):
            DraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(torch.nan), "fc.weight in .* holds values that are not finite; copy"),
        (torch.tensor(-torch.inf), "fc.weight in .* holds values that are not finite; copy"),
        (torch.tensor(1, dtype=torch.int8), r"of type torch.int8; use a checkpoint in one of fl"),
    ],
)
def test_weights_must_be_finite_numbers(folder, value, message):
    change_weights(folder, lambda t: t | {"fc.weight": value.expand(t["fc.weight"].shape)})
    with pytest.raises(ModelError, match=message):
        DraftModel.from_pretrained(folder)


def test_large_weights_may_have_a_sum_that_overflows(folder):
    change_weights(folder, lambda t: t | {"fc.weight": torch.full_like(t["fc.weight"], 3e38)})
    assert DraftModel.from_pretrained(folder).fc.weight.isfinite().all()


def test_every_kind_of_mismatch_is_counted_and_named(folder):
    def change(tensors):
        tensors = {n: v for n, v in tensors.items() if not n.startswith("layers.1.mlp.")}
        tensors = {n: v for n, v in tensors.items() if "q_norm" not in n}
        return tensors | {"extra.weight": torch.zeros(1), "fc.weight": torch.zeros(64, 128)}

    change_weights(folder, change)
    with pytest.raises(ModelError) as error:
        DraftModel.from_pretrained(folder)
    message = str(error.value)
    assert "5 missing (layers.0.self_attn.q_norm.weight, " in message
    assert ", ...)" in message
    assert "1 unexpected (extra.weight)" in message
    assert "1 of the wrong shape (fc.weight [64, 128] instead of [64, 192])" in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.attention_conv.base_kernel", "DFlash 2 drafter, and its config.json describes"),
        ("candidate_selector.predecessor_codebook", "DFlash 2 drafter, and its config.json"),
        ("markov_head.markov_w1.weight", "DSpark drafter, and its config.json describes another"),
        ("logit_head.confidence_head.proj.bias", "DSpark drafter, and its config.json describes"),
        ("prefix_gru.weight_ih_l0", "Domino drafter, and its config.json describes another"),
    ],
)
def test_tensors_of_other_drafters_are_refused_by_name(folder, name, message):
    change_weights(folder, lambda tensors: tensors | {name: torch.zeros(1)})
    with pytest.raises(ModelError, match=message):
        DraftModel.from_pretrained(folder)


def test_incomplete_and_damaged_folders(folder, tmp_path):
    with pytest.raises(ModelError, match="a drafter is a folder with"):
        DraftModel.from_pretrained(tmp_path / "nowhere")
    for file, content, message in (
        ("model.safetensors", b"garbage", "cannot read"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"[" * 100_000, "not valid JSON .*nested too deep"),
        ("draft_vocabulary.json", b"[" * 100_000, "cannot read .*nested too deep"),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(folder, broken)
        (broken / file).write_bytes(content)
        with pytest.raises(ModelError, match=message):
            DraftModel.from_pretrained(broken)
        shutil.rmtree(broken)
    (folder / "mask_embedding.pt").touch()
    with pytest.raises(ModelError, match=r"cannot read .*mask_embedding"):
        DraftModel.from_pretrained(folder)
    (folder / "mask_embedding.pt").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot read"):
        DraftModel.from_pretrained(folder)
