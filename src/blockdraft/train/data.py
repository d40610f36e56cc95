"""Training data: prompts, answered by the target in bulk, one JSONL row an answer.

A row is {"id", "set", "temperature", "sample", "prompt_ids", "response_ids", "finish"}. Rows are
appended as they come, and a run that is started again goes on where it stopped.
"""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blockdraft.core.environment import describe_environment
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.core.files import check_output_folder, write_whole
from blockdraft.core.jsonl import bad_row, read_jsonl
from blockdraft.hub.catalog import DEFAULT_TARGET
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.loading import load_target_model, resolve_device, resolve_dtype
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.train.answers import Answer, AnswerWriter, Job
from blockdraft.train.prompts import (
    SELF_WRITTEN_TOKENS,
    Prompt,
    chat_ids,
    read_prompts,
    with_variants,
    write_prompts,
)

logger = logging.getLogger(__name__)

AnswerKey = tuple[str, float, int]

ANSWERS, SELF_PROMPTS, MANIFEST = "answers.jsonl", "self_prompts.jsonl", "manifest.json"
"""Files of the output folder."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to answer, and how.

    Every prompt gets `samples` answers at each temperature; greedy ones would all be equal, so
    there is one. Prompts of more than `max_prompt_tokens` are skipped.

    Raises:
        ConfigError: a value is out of its range.
    """

    output: Path
    target: str = DEFAULT_TARGET
    prompts: tuple[Path, ...] = ()
    num_self_written: int = 0
    limit: int | None = None
    temperatures: tuple[float, ...] = (0.7,)
    samples: int = 1
    max_tokens: int = 256
    slots: int = 96
    max_prompt_tokens: int = 192
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.prompts and not self.num_self_written:
            raise ConfigError("there is nothing to answer; give --prompts or --self-written")
        least = {"samples": 1, "max_tokens": 1, "slots": 1, "max_prompt_tokens": 1, "limit": 1}
        for name, low in (least | {"num_self_written": 0, "seed": 0}).items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} is {value}; give a number of at least {low}")
        for value in self.temperatures:
            if not 0 <= value < float("inf"):
                raise ConfigError(f"temperature is {value}; give a finite number of at least 0")


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
    """Answer everything that is not answered yet; returns the file of answers.

    Raises:
        ConfigError: a prompt file is missing or broken.
        ModelError: the target cannot be loaded.
    """
    check_output_folder(config.output)
    prompts = [p for path in config.prompts for p in with_variants(read_prompts(path))]
    if not prompts and not config.num_self_written:
        names = ", ".join(map(str, config.prompts))
        raise ConfigError(f"{names} holds no prompts; give JSONL rows with turns or prompt")
    answered = _answered(config.output / ANSWERS)
    history = _history(config)
    device = resolve_device(config.device)
    folder = resolve_model(config.target)
    stop_ids, tokenizer = _load_tokenizer(folder)
    model = load_target_model(folder, resolve_dtype(config.dtype, device), device)
    writer = AnswerWriter(
        model,
        stop_ids=stop_ids,
        slots=config.slots,
        capacity=config.max_prompt_tokens + max(config.max_tokens, SELF_WRITTEN_TOKENS),
        seed=config.seed,
    )
    config.output.mkdir(parents=True, exist_ok=True)
    write_whole(
        config.output / MANIFEST,
        json.dumps([*history, _manifest_entry(config, folder)], indent=1) + "\n",
    )
    prompts += _self_written(config, writer, tokenizer)
    if not prompts:
        raise ConfigError("the target wrote no usable prompt; give --prompts")
    random.Random(config.seed).shuffle(prompts)
    jobs = list(_jobs(prompts[: config.limit], config, answered))
    _write_answers(
        config.output / ANSWERS,
        writer.write(
            job
            for job in (_as_job(key, p, tokenizer, config) for key, p in jobs)
            if len(job.prompt_ids) <= config.max_prompt_tokens
        ),
        len(jobs),
        report,
    )
    return config.output / ANSWERS


def _write_answers(
    path: Path,
    answers: Iterator[Answer],
    num_jobs: int,
    report: Callable[[DataProgress], None],
) -> None:
    progress = DataProgress(num_jobs, 0, 0, 0.0, Counter())
    start = monotonic()
    if path.exists():
        _drop_cut_off_row(path)
    with path.open("a", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps(_row(answer)) + "\n")
            progress.num_answers += 1
            progress.num_tokens += len(answer.response_ids)
            progress.tokens_per_second = progress.num_tokens / (monotonic() - start)
            progress.finishes[answer.finish] += 1
            report(progress)
    if skipped := num_jobs - progress.num_answers:
        logger.warning("prompts left out as too long: %d; raise max_prompt_tokens", skipped)


def _load_tokenizer(folder: Path) -> tuple[frozenset[int], PreTrainedTokenizerBase]:
    """The ids that end an answer, and transformers' own tokenizer."""
    loaded = load_tokenizer(folder)
    if not loaded.has_chat_template:
        raise ModelError(f"{folder} has no chat template to ask in; use a chat model")
    return loaded.eos_ids, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _self_written(
    config: DataConfig, writer: AnswerWriter, tokenizer: PreTrainedTokenizerBase
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
    prompts: list[Prompt], config: DataConfig, answered: set[AnswerKey]
) -> Iterator[tuple[AnswerKey, Prompt]]:
    for temperature in config.temperatures:
        for sample in range(config.samples if temperature > 0 else 1):
            for prompt in prompts:
                key = (prompt.id, temperature, sample)
                if key not in answered:
                    yield key, prompt


def _as_job(
    key: AnswerKey, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> Job:
    return Job(
        id=prompt.id,
        set=prompt.set,
        prompt_ids=chat_ids(tokenizer, prompt.text),
        max_tokens=config.max_tokens,
        temperature=key[1],
        sample=key[2],
    )


def _row(answer: Answer) -> dict[str, Any]:
    return asdict(answer.job) | {"response_ids": answer.response_ids, "finish": answer.finish}


def _answered(path: Path) -> set[AnswerKey]:
    """What the file holds, but for a last line cut off by a killed run."""
    if not path.exists():
        return set()
    answered = set()
    for number, row in read_jsonl(path, is_growing=True):
        try:
            answered.add((row["id"], row["temperature"], row["sample"]))
        except (KeyError, TypeError) as error:
            reason, remedy = f"{error!r}", "delete that line, or give another --output"
            raise bad_row(path, number, reason, remedy) from error
    return answered


def _drop_cut_off_row(path: Path) -> None:
    """Cut the file behind its last whole line; the rest is not touched."""
    with path.open("rb+") as file:
        end = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(end)


def _history(config: DataConfig) -> list[dict[str, Any]]:
    """The manifest's entries of earlier runs in the same folder.

    Raises:
        ConfigError: it is damaged, or the prompts that the target wrote then are not those that
            are asked for now.
    """
    path = config.output / MANIFEST
    if not path.exists():
        return []
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        written = [
            (run["config"]["num_self_written"], run["config"]["seed"])
            for run in runs
            if run["config"]["num_self_written"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}); give another --output") from error
    exist = bool(written) and (config.output / SELF_PROMPTS).exists()
    if exist and config.num_self_written and written[-1] != (config.num_self_written, config.seed):
        number, seed = written[-1]
        raise ConfigError(
            f"{config.output} holds the prompts of --self-written {number} --seed {seed}, not of "
            f"{config.num_self_written} and {config.seed}; give these, or another --output"
        )
    return runs


def _manifest_entry(config: DataConfig, folder: Path) -> dict[str, Any]:
    """How the answers of one run are made."""
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
    settings["prompts"] = [str(p) for p in config.prompts]
    return {**describe_environment(), "config": settings, "target_folder": folder.name}
