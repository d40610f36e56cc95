"""The config of a target, and why some models cannot be one, before anything else is loaded."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from blockdraft.core.errors import ModelError, reason_of
from blockdraft.core.files import read_json

ASSISTANT = "AssistantForCausalLM"
"""How the names of Gemma 4's drafters end, which read the keys and values of their target."""
_DRAFTER_KEYS = (
    *("dflash_config", "eagle_config", "speculators_model_type", "draft_vocab_size"),
    *("markov_rank", "target_num_hidden_layers"),
)
"""That no target's config has."""


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a target.

    Raises:
        ModelError: it is missing or damaged, of a kind that transformers does not know, or needs
            code of its own, which is run with `trust_remote_code` only; or it is a drafter or
            an encoder-decoder.
    """
    path = folder / "config.json"
    raw = _read(path)
    kind = raw.get("model_type")
    if (mark := _mark_of_drafter(raw)) is not None:
        raise ModelError(
            f"{folder} holds a drafter ({mark}), which cannot be a target; give the model that it "
            "drafts for as the target, and this one as the drafter"
        )
    if kind is not None and kind not in CONFIG_MAPPING and not trust_remote_code:
        _refuse_unknown(folder, kind, has_code="auto_map" in raw)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    # transformers raises any type for a broken file; all mean the same to a user.
    except Exception as error:
        reason = reason_of(error)
        raise ModelError(f"cannot read {path}: {reason}; copy the file again") from error
    if config.is_encoder_decoder:
        raise ModelError(
            f"{folder} holds an encoder-decoder ({kind}), and only models that continue their "
            "prompt can be targets; use a decoder-only model"
        )
    return config


def _read(path: Path) -> dict[str, Any]:
    """Empty if it cannot be read: transformers says why."""
    try:
        raw = read_json(path)
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _mark_of_drafter(raw: Mapping[str, Any]) -> str | None:
    """By what a config is told to be a drafter's, though its `model_type` is that of its layers."""
    named = raw.get("architectures")
    for name in map(str, named if isinstance(named, list) else ()):
        if name.endswith(("DraftModel", ASSISTANT)) or "eagle3" in name.lower():
            return name
    return next((key for key in _DRAFTER_KEYS if raw.get(key) is not None), None)


def code_is_needed(what: str) -> ModelError:
    """What to raise where a folder's own code would have to run."""
    return ModelError(
        f"{what} needs custom code, which does not run by default; read its .py files, and give "
        "--trust-remote-code if you trust them (commands that train, or write answers to train on, "
        "do not run it)"
    )


def _refuse_unknown(folder: Path, kind: str, *, has_code: bool) -> None:
    if has_code:
        raise code_is_needed(f"the model in {folder} (model_type {kind!r})")
    raise ModelError(
        f"transformers {version('transformers')} does not know the model_type {kind!r} of "
        f"{folder}; install a version that does"
    )
