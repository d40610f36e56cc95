"""Training data: prompts, answered by the target in bulk, one JSONL row an answer.

A row is {"id", "set", "temperature", "sample", "prompt_ids", "response_ids", "finish"}. Rows are
appended as they come, and a run that is started again goes on where it stopped. When all is
answered, what is fit to train on is written as token shards, see `train.shards`.
"""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blockdraft.core.environment import describe_environment
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.core.files import check_output_folder, full_disk_refused, write_whole
from blockdraft.core.jsonl import bad_row, read_jsonl
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.loading import load_target_model, resolve_device, resolve_dtype
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.train.answers import Answer, Job, Writer
from blockdraft.train.data_config import DataConfig
from blockdraft.train.engine_answers import writer_for
from blockdraft.train.identity import target_sha256, template_sha256
from blockdraft.train.overlap import Overlap
from blockdraft.train.prompts import (
    SELF_WRITTEN_TOKENS,
    Prompt,
    check_template,
    distinct,
    prompt_ids,
    prompt_of_row,
    read_prompts,
    with_variants,
    write_prompts,
)
from blockdraft.train.shards import ANSWERS, read_manifest, write_manifest, write_shards

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: to which prompt, and its tokens, None if it has no end."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] | None


Answered = dict[tuple[str, float, int], Said]
"""By prompt's id, temperature and sample."""

SELF_PROMPTS = "self_prompts.jsonl"


@dataclass(slots=True)
class DataProgress:
    """Counts of a run so far; `finishes` counts "stop", "length" and "loop"."""

    num_jobs: int
    num_answers: int
    num_tokens: int
    tokens_per_second: float
    finishes: Counter[str]

    @property
    def seconds_left(self) -> float:
        """Estimate from the mean answer so far."""
        if not self.num_answers or not self.tokens_per_second:
            return float("inf")
        mean = self.num_tokens / self.num_answers
        return (self.num_jobs - self.num_answers) * mean / self.tokens_per_second


def generate_data(
    config: DataConfig, report: Callable[[DataProgress], None] = lambda progress: None
) -> Path:
    """Answer everything that is not answered yet, and write the shards; returns their folder.

    Raises:
        ConfigError: prompts are missing or broken, the folder holds other answers, or its disk is
            full.
        ModelError: the target cannot be loaded.
    """
    check_output_folder(config.output)
    with full_disk_refused(config.output):
        return _generate(config, report)


def _generate(config: DataConfig, report: Callable[[DataProgress], None]) -> Path:
    prompts, counts = gather_prompts(config)
    manifest = _history(config)
    device = resolve_device(config.device)
    folder = resolve_model(config.target)
    stop_ids, tokenizer = load_tokenizers(config, folder, prompts)
    answered = _answered(config.output / ANSWERS)
    manifest = _with_run(manifest, config, folder, tokenizer)
    model = load_target_model(folder, resolve_dtype(config.dtype, device), device)
    writer = writer_for(
        model,
        stop_ids=stop_ids,
        slots=config.slots,
        capacity=config.max_prompt_tokens + max(config.max_tokens, SELF_WRITTEN_TOKENS),
        seed=config.seed,
    )
    config.output.mkdir(parents=True, exist_ok=True)
    write_manifest(config.output, manifest)
    prompts = distinct([*prompts, *_self_written(config, writer, tokenizer)])
    if not prompts:
        raise ConfigError("no usable prompt is left; give other --prompts")
    random.Random(config.seed).shuffle(prompts)
    prompts = prompts[: config.limit]
    for turn in range(min(config.max_turns, max(len(prompt.turns) for prompt in prompts))):
        jobs = list(_jobs(prompts, turn, config, tokenizer, answered))
        _write_answers(config, writer.write(jobs), len(jobs), answered, report)
    _finish(config, manifest, counts)
    return config.output


def _finish(config: DataConfig, manifest: dict[str, Any], counts: dict[str, int]) -> None:
    rows = (row for _, row in read_jsonl(config.output / ANSWERS, is_growing=True))
    written = write_shards(
        config.output,
        rows,
        rows_per_shard=config.rows_per_shard,
        drop_truncated=config.drop_truncated,
    )
    written["counts"] = counts | written["counts"]
    write_manifest(config.output, manifest | written)
    logger.info("answers: %s", ", ".join(f"{k} {v}" for k, v in written["counts"].items()))


def gather_prompts(config: DataConfig) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts of files and data sets without repeats and overlaps, and how many there were.

    Raises:
        ConfigError: one is missing, broken or empty.
    """
    found = [p for path in config.prompts for p in with_variants(read_prompts(path))]
    for name in config.datasets:
        found += with_variants(_read_dataset(name))
    if not found and not config.num_self_written:
        names = ", ".join([*map(str, config.prompts), *config.datasets])
        raise ConfigError(f"{names} holds no prompts; give rows with messages, turns or prompt")
    prompts = distinct(found)
    excluded = [p for path in config.exclude for p in read_prompts(path)]
    benchmarks = Overlap(turn for p in excluded for turn in p.turns)
    clean = [p for p in prompts if not any(turn in benchmarks for turn in p.turns)]
    return clean, {
        "prompts": len(found),
        "repeated_prompts": len(found) - len(prompts),
        "overlapping_prompts": len(prompts) - len(clean),
    }


def _read_dataset(name: str) -> list[Prompt]:
    try:
        from blockdraft.train.hub_datasets import read_dataset
    except ImportError as error:
        raise ConfigError(
            f"the data set {name!r} needs the package datasets; pip install datasets"
        ) from error
    short = Path(name.partition(":")[0]).name
    return [
        prompt_of_row(row, short, place, Path(name), place + 1)
        for place, row in enumerate(read_dataset(name))
    ]


def load_tokenizers(
    config: DataConfig, folder: Path, prompts: Sequence[Prompt]
) -> tuple[frozenset[int], PreTrainedTokenizerBase]:
    """The ids that end an answer, and transformers' own tokenizer.

    Raises:
        ConfigError: its template cannot ask the prompts as it is told.
        ModelError: it has no template, and not all of the prompts are plain text.
    """
    loaded = load_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if config.num_self_written or not all(prompt.is_plain for prompt in prompts):
        if not loaded.has_chat_template:
            raise ModelError(
                f"{folder} has no chat template to ask in; use a chat model, or give plain text"
            )
        check_template(tokenizer, config.thinking)
    return loaded.eos_ids, tokenizer


def _self_written(
    config: DataConfig, writer: Writer, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Prompts of the target's own, kept in a file so that a resumed run sees the same ones."""
    if not config.num_self_written:
        return []
    path = config.output / SELF_PROMPTS
    if not path.exists():
        written = write_prompts(writer, tokenizer, config.num_self_written, config.seed)
        rows = [{"id": p.id, "set": p.set, "turns": [p.text]} for p in written]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    try:
        return [
            Prompt(id=row["id"], set=row["set"], text=row["turns"][0])
            for _, row in read_jsonl(path)
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is not as it was written ({error!r}); give another --output"
        ) from error


def _jobs(
    prompts: list[Prompt],
    turn: int,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    answered: Answered,
) -> Iterator[Job]:
    """What is to be answered in turn `turn` (from 0) of each conversation that got that far."""
    num_skipped = 0
    for temperature in config.temperatures:
        for sample in range(config.samples if temperature > 0 else 1):
            for prompt in prompts:
                keys = [(_turn_id(prompt, t), temperature, sample) for t in range(turn + 1)]
                before = [answered[key].response_ids for key in keys[:-1] if key in answered]
                if len(prompt.turns) <= turn or len(before) < turn or not all(before):
                    continue
                said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in before if ids]
                ids = prompt_ids(tokenizer, prompt, said, config.thinking)
                if keys[-1] in answered:
                    _check_same_prompt(config, keys[-1][0], ids, answered[keys[-1]])
                    continue
                if len(ids) > config.max_prompt_tokens:
                    num_skipped += 1
                    continue
                yield Job(
                    id=keys[-1][0],
                    set=prompt.set,
                    prompt_ids=ids,
                    max_tokens=config.max_tokens,
                    temperature=temperature,
                    sample=sample,
                )
    if num_skipped:
        logger.warning("prompts left out as too long: %d; raise max_prompt_tokens", num_skipped)


def _check_same_prompt(config: DataConfig, name: str, ids: Sequence[int], said: Said) -> None:
    if tuple(ids) != said.prompt_ids:
        raise ConfigError(
            f"{config.output} holds an answer to another prompt of the id {name!r}, or with other "
            "thinking; give another --output, and --join the two"
        )


def _turn_id(prompt: Prompt, turn: int) -> str:
    """A later turn is a variant of its prompt: they are held out together."""
    return prompt.id if turn == 0 else f"{prompt.id}+turn{turn + 1}"


def _write_answers(
    config: DataConfig,
    answers: Iterator[Answer],
    num_jobs: int,
    answered: Answered,
    report: Callable[[DataProgress], None],
) -> None:
    path = config.output / ANSWERS
    progress = DataProgress(num_jobs, 0, 0, 0.0, Counter())
    start = monotonic()
    if path.exists():
        _drop_cut_off_row(path)
    with path.open("a", encoding="utf-8") as file:
        for answer in answers:
            row = asdict(answer.job) | {
                "response_ids": answer.response_ids,
                "finish": answer.finish,
            }
            file.write(json.dumps(row) + "\n")
            answered[(answer.job.id, answer.job.temperature, answer.job.sample)] = _said(row)
            progress.num_answers += 1
            progress.num_tokens += len(answer.response_ids)
            progress.tokens_per_second = progress.num_tokens / (monotonic() - start)
            progress.finishes[answer.finish] += 1
            report(progress)


def _said(row: dict[str, Any]) -> Said:
    """An answer that the conversation can go on from, if it has an end."""
    response_ids = tuple(row["response_ids"]) if row["finish"] == "stop" else None
    return Said(tuple(row["prompt_ids"]), response_ids)


def _answered(path: Path) -> Answered:
    """What the file holds, but for a last line cut off by a killed run."""
    answered: Answered = {}
    if not path.exists():
        return answered
    for number, row in read_jsonl(path, is_growing=True):
        try:
            answered[(row["id"], row["temperature"], row["sample"])] = _said(row)
        except (KeyError, TypeError) as error:
            reason, remedy = f"{error!r}", "delete that line, or give another --output"
            raise bad_row(path, number, reason, remedy) from error
    return answered


def _drop_cut_off_row(path: Path) -> None:
    """Cut the file behind its last whole line; the rest is not touched."""
    with path.open("rb+") as file:
        end = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(end)


def _history(config: DataConfig) -> dict[str, Any]:
    """The manifest of earlier runs in the same folder, empty if there were none.

    Raises:
        ConfigError: it is damaged or of joined answers, or the prompts that the target wrote then
            are not those that are asked for now.
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
        if run["config"]["num_self_written"]
    ]
    exist = bool(written) and (config.output / SELF_PROMPTS).exists()
    if exist and config.num_self_written and written[-1] != (config.num_self_written, config.seed):
        number, seed = written[-1]
        raise ConfigError(
            f"{config.output} holds the prompts of --self-written {number} --seed {seed}, not of "
            f"{config.num_self_written} and {config.seed}; give these, or another --output"
        )
    return manifest


def _with_run(
    manifest: dict[str, Any],
    config: DataConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """The manifest with an entry for this run.

    Raises:
        ConfigError: the answers in the folder are of another target or template.
    """
    hashes = {
        "target": {"folder": folder.name, "sha256": target_sha256(folder)},
        "template": {"sha256": template_sha256(tokenizer)},
    }
    for name, value in hashes.items():
        if name in manifest and manifest[name]["sha256"] != value["sha256"]:
            raise ConfigError(
                f"{config.output} holds answers made with another {name}; give another --output"
            )
    run = {**describe_environment(), "config": config.to_dict()}
    return manifest | hashes | {"runs": [*manifest.get("runs", []), run]}
