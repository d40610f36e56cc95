"""The manifest of a folder of answers, which every run of `blockdraft data` adds itself to."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blockdraft.core.errors import ConfigError
from blockdraft.data.config import DataConfig
from blockdraft.data.identity import file_sha256, target_sha256, template_sha256
from blockdraft.data.self_written import SELF_PROMPTS
from blockdraft.data.shards import ANSWERS, read_manifest
from blockdraft.hub.resolve import resolve_model
from blockdraft.measure.provenance import describe_environment
from blockdraft.models.fingerprint import weights_sha256


def earlier_runs(config: DataConfig) -> dict[str, Any]:
    """The manifest of earlier runs in the same folder, empty if there were none.

    Raises:
        ConfigError: it is damaged or of joined answers, or the prompts that the target wrote then
            are not among those that are asked for now.
    """
    manifest = read_manifest(config.output)
    if manifest is None:
        return {}
    if manifest.get("shards") and not (config.output / ANSWERS).exists():
        raise ConfigError(
            f"{config.output} holds joined answers; give another --output, and --join the two"
        )
    written = [
        (run["config"]["num_self_written"], run["config"]["seed"])
        for run in manifest["runs"]
        if run["config"].get("num_self_written")
    ]
    if written and config.num_self_written and (config.output / SELF_PROMPTS).exists():
        number, seed = written[-1]
        if config.num_self_written < number or config.seed != seed:
            raise ConfigError(
                f"{config.output} holds {number} self-written prompts of seed {seed}, not "
                f"{config.num_self_written} of seed {config.seed}; give that seed and at least as "
                "many, or another --output"
            )
    return manifest


def with_run(
    manifest: dict[str, Any],
    config: DataConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """The manifest with an entry for this run, and without the shards of those before.

    They lack the answers to come; until these are written the folder is unfinished.

    Raises:
        ConfigError: the answers in the folder are of another target or template.
    """
    hashes = _hashes(folder, tokenizer)
    for name, value in hashes.items():
        if name in manifest and manifest[name]["sha256"] != value["sha256"]:
            raise ConfigError(
                f"{config.output} holds answers made with another {name}; give another --output"
            )
    # By this a drafter's folder knows its target, see train/origin.py.
    known = manifest.get("target", {}).get("weights_sha256")
    hashes["target"]["weights_sha256"] = known or weights_sha256(folder)
    run = {**describe_environment(), "config": config.to_dict(), "inputs": _inputs(config)}
    return hashes | {"runs": [*manifest.get("runs", []), run]}


def is_answered(config: DataConfig) -> bool:
    """True if the last run in the folder was this one, to its end: there is nothing to do.

    Told by hashes, without asking anything. What a data set holds by now is not looked up.
    """
    manifest = read_manifest(config.output)
    if not manifest or "shards" not in manifest:
        return False
    last, own = manifest["runs"][-1], config.to_dict()
    moves = ("output", "target", "device", "slots", "endpoint", "endpoint_model")
    same = all(last["config"].get(name) == own[name] for name in own.keys() - set(moves))
    try:
        same = same and last.get("inputs") == _inputs(config)
    except OSError:
        return False  # who reads the prompts says what is missing
    if not same:
        return False
    folder = resolve_model(config.target)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    hashes = _hashes(folder, tokenizer)
    return all(manifest[name]["sha256"] == value["sha256"] for name, value in hashes.items())


def _hashes(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, dict[str, str]]:
    """What answers are told by from those of another target or template."""
    return {
        "target": {"folder": folder.name, "sha256": target_sha256(folder)},
        "template": {"sha256": template_sha256(tokenizer)},
    }


def _inputs(config: DataConfig) -> list[str]:
    """Hashes of the files that a run reads."""
    return [file_sha256(path) for path in (*config.prompts, *config.exclude)]
