"""What `models check` says of a pair, from its configs alone."""

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from blockdraft.cache.pages import Pages
from blockdraft.core.errors import MISTAKE, NO, ModelError
from blockdraft.diagnose.fit import Fit, examine_fit
from blockdraft.models.draft.vocabulary import write_draft_vocabulary
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import layer_shapes
from blockdraft.models.target.sequential import SequentialTarget
from tests.command_line import refusal, run, run_json
from tests.parity.test_architectures import (
    IN_ONE_FORWARD,
    ONE_AFTER_ANOTHER,
    RECURRENT,
    REFUSED,
    build,
)
from tests.parity.test_published_drafters import SIZES
from tests.parity.test_wrappers import write_wrapper
from tests.published import KNOWN_TOKENS, PUBLISHED, shallow, write_published
from tests.tiny import VOCAB_SIZE, edit_json, tiny_draft_config, tiny_drafter, tiny_tokenizer


def config_folder(folder: Path, name: str, options: Any) -> Path:
    model = build(name, options, torch.float32)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def drafter_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    raw = tiny_draft_config(**changes).to_dict()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def fit_of(tmp_path: Path, name: str, options: Any) -> Fit:
    target = config_folder(tmp_path / "target", name, options)
    return examine_fit(target, drafter_folder(tmp_path / "drafter"), torch.float32)


@pytest.mark.parametrize("name", ["Gemma4", "Glm4Moe", "MiniMaxM2", "Phi3", "Qwen2Moe"])
def test_the_paged_path_and_its_memory(tmp_path: Path, name: str) -> None:
    fit = fit_of(tmp_path, name, IN_ONE_FORWARD[name])
    assert fit.fits
    assert (fit.target.path, fit.target.trees, fit.target.path_reason) == ("paged", True, None)
    model = build(name, IN_ONE_FORWARD[name], torch.float32)
    assert fit.target.weight_bytes == sum(p.nbytes for p in model.parameters())
    sizes = [2 * heads * head_dim for heads, head_dim in layer_shapes(model)]
    assert fit.target.kv_bytes_per_token == sum(sizes) * 4


def assert_covers(told: int | None, held: int) -> None:
    """A kernel needs one input of a convolution less than transformers keeps."""
    assert told is not None
    assert 0.9 * told <= held <= told


# Mllama's part for text has no folder of its own.
@pytest.mark.parametrize("name", [name for name in ONE_AFTER_ANOTHER if name != "Mllama"])
def test_the_other_paths_say_why_and_what_they_take(tmp_path: Path, name: str) -> None:
    options, reason = ONE_AFTER_ANOTHER[name]
    facts = fit_of(tmp_path, name, options).target
    one_by_one = "one after another"
    assert facts.path == (f"recurrent, {one_by_one}" if name in RECURRENT else one_by_one)
    assert facts.trees == (name not in RECURRENT)
    assert reason in str(facts.path_reason)
    if name not in RECURRENT:
        assert facts.state_bytes is None
        return
    with SequentialTarget(build(name, options, torch.float32)).released_after() as target:
        assert_covers(facts.state_bytes, target.state_bytes())


@pytest.mark.parametrize("name", ["Qwen3_5", "FalconH1"])
def test_hybrids_are_batched_and_take_states(tmp_path: Path, name: str) -> None:
    facts = fit_of(tmp_path, name, RECURRENT[name]).target
    assert (facts.path, facts.trees, facts.path_reason) == ("recurrent", False, None)
    with PagedTarget(build(name, RECURRENT[name], torch.float32), Pages(9)).released_after() as own:
        held = own.state_bytes()
    assert_covers(facts.state_bytes, held)


@pytest.mark.parametrize("name", ["Bloom", "MiniMax", "RecurrentGemma"])
def test_a_target_that_no_path_runs_is_refused(tmp_path: Path, name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason):
        fit_of(tmp_path, name, options)


def test_a_latent_is_kept_expanded(tmp_path: Path) -> None:
    facts = fit_of(tmp_path, "DeepseekV3", IN_ONE_FORWARD["DeepseekV3"]).target
    assert facts.path == "paged"
    assert facts.kv_bytes_per_token == 4 * 4 * (32 + 32) * 4  # layers, heads, stored sizes, float32


def test_a_drafter_of_another_target_does_not_fit(tmp_path: Path) -> None:
    target = config_folder(tmp_path / "target", "Qwen3", {})
    for changes, reason in (
        ({"vocab_size": 50, "mask_token_id": 3}, "vocabulary size is 50 in the drafter and 97"),
        ({"num_target_layers": None, "target_layer_ids": (1, 7)}, r"reads layers \[7\]"),
        ({"num_target_layers": 5}, "number of target layers is 5"),
    ):
        drafter = drafter_folder(tmp_path / reason[:5].strip(), **changes)
        fit = examine_fit(target, drafter, torch.float32)
        assert not fit.fits
        assert re.search(reason, str(fit.reason))
        found = run("models", "check", target, drafter)
        assert found.exit_code == NO
        # The first command of a process says which device it takes.
        assert not [line for line in found.stderr.splitlines() if "device auto" not in line]


def test_a_drafter_of_another_width_must_bring_an_embedding(tmp_path: Path) -> None:
    """Of a hub id the config alone is here, which does not say whether it does."""
    target = config_folder(tmp_path / "target", "Qwen3", {})
    drafter = drafter_folder(tmp_path / "drafter", hidden_size=32)
    fit = examine_fit(target, drafter, torch.float32)
    assert fit.fits
    assert "whether the drafter has an embedding of its own" in fit.later[0]
    tiny_drafter(hidden_size=32).save_pretrained(drafter)
    fit = examine_fit(target, drafter, torch.float32)
    assert "hidden size is 32 in the drafter and 64" in str(fit.reason)


def test_whether_tokens_are_the_same_is_not_known_from_configs(tmp_path: Path) -> None:
    target = config_folder(tmp_path / "target", "Qwen3", {})
    other = config_folder(tmp_path / "other", "Qwen3", {"num_hidden_layers": 1})
    assert "its tokens are the target's" in examine_fit(target, other, torch.float32).later[0]
    for folder in (target, other):
        tiny_tokenizer().save_pretrained(folder)
    assert not any("tokens" in text for text in examine_fit(target, other, torch.float32).later)


@pytest.mark.parametrize("name", ["Qwen3-8B-DFly-B8", "AngelSpec DFlare"])
def test_exports_of_angelspec_are_told_by_their_config(tmp_path: Path, name: str) -> None:
    case = shallow(PUBLISHED[name])
    write_published(tmp_path / "drafter", case)
    target = config_folder(tmp_path / "target", case.target, {**SIZES, **case.target_options})
    fit = examine_fit(target, tmp_path / "drafter", torch.float32)
    assert fit.fits, fit.reason
    assert (fit.drafter.layout, fit.drafter.longest_path) == ("AngelSpec", 7)


@pytest.mark.parametrize("name", ["GLM-5.3", "speculators, vocabulary of its own"])
def test_names_in_the_files_tell_what_a_drafter_brings(tmp_path: Path, name: str) -> None:
    case = shallow(PUBLISHED[name])
    write_published(tmp_path / "drafter", case)
    target = config_folder(tmp_path / "target", case.target, {**SIZES, **case.target_options})
    fit = examine_fit(target, tmp_path / "drafter", torch.float32)
    assert fit.fits, fit.reason
    is_speculators = name.startswith("speculators")
    assert fit.drafter.layout == ("speculators" if is_speculators else "z-lab")
    assert fit.drafter.guessed_tokens == (len(KNOWN_TOKENS) if is_speculators else VOCAB_SIZE)


def test_a_drafter_guesses_from_the_tokens_that_its_file_names(tmp_path: Path) -> None:
    target = config_folder(tmp_path / "target", "Lfm2", RECURRENT["Lfm2"])
    drafter = drafter_folder(tmp_path / "drafter")
    write_draft_vocabulary(drafter, [1, 2, 5])
    assert run_json("models", "check", target, drafter)["drafter"]["guessed_tokens"] == 3
    assert "proposes from 3 tokens" in run("models", "check", target, drafter).stdout


def test_the_verdict_is_the_first_line_and_the_exit_status(tmp_path: Path) -> None:
    target = config_folder(tmp_path / "target", "Lfm2", RECURRENT["Lfm2"])
    drafter = drafter_folder(tmp_path / "drafter")
    found = run("models", "check", target, drafter)
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert lines[0] == f"{drafter} fits {target}: blocks of 6 slots"
    assert "recurrent layers token by token" in found.stdout
    assert "chains only" in found.stdout
    assert lines[-1].strip().startswith("only loading shows")
    assert run_json("models", "check", target, drafter)["target"]["path"] == "recurrent"


def test_a_quantization_whose_package_is_missing_is_named(tmp_path: Path) -> None:
    target = config_folder(tmp_path / "target", "Qwen3", {})
    method = {"quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1}
    edit_json(target / "config.json", quantization_config=method)
    drafter = drafter_folder(tmp_path / "drafter")
    found = run("models", "check", target, drafter)
    assert found.exit_code == MISTAKE
    assert "cannot be loaded here" in found.stdout.splitlines()[0]
    assert "aqlm" in found.stdout.splitlines()[0]
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("method", ["fp8", "modelopt"])
def test_a_part_for_text_that_says_alone_how_it_is_packed(tmp_path: Path, method: str) -> None:
    """As in Kimi-K2.5. fp8 needs no package."""
    target = tmp_path / "target"
    write_wrapper(target, "Kimi_K25")
    text = json.loads((target / "config.json").read_text(encoding="utf-8"))["text_config"]
    edit_json(
        target / "config.json",
        text_config={**text, "quantization_config": {"quant_method": method}},
    )
    facts = examine_fit(target, drafter_folder(tmp_path / "drafter"), torch.float32).target
    assert facts.quantization == method
    assert (facts.missing is None) == (method == "fp8")


def test_of_a_hub_id_only_configs_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        "org/target": config_folder(tmp_path / "target", "Qwen3", {}),
        "org/drafter": drafter_folder(tmp_path / "drafter"),
    }
    fetched = []

    def download(repo_id: str, allow_patterns: list[str], **_: Any) -> str:
        fetched.append(repo_id)
        assert not any("safetensors" in p and "json" not in p for p in allow_patterns)
        return str(folders[repo_id])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert run_json("models", "check", "org/target", "org/drafter")["fits"]
    assert fetched == ["org/target", "org/drafter"]
    (tmp_path / "drafter" / "config.json").unlink()
    assert "lacks config.json" in refusal("models", "check", "org/target", "org/drafter")
