"""Training data: prompts, answered by the target in bulk, one JSONL row an answer.

A row is {"id", "set", "temperature", "sample", "prompt_ids", "response_ids", "finish"}. Rows are
appended as they come, and a run that is started again goes on where it stopped.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blockdraft.core.errors import ConfigError
from blockdraft.hub.catalog import DEFAULT_TARGET
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.loading import load_target_model, resolve_dtype
from blockdraft.train.answers import Answer, AnswerWriter, Job
from blockdraft.train.prompts import Prompt, chat_ids, read_prompts, with_variants, write_prompts

AnswerKey = tuple[str, float, int]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to answer, and how.

    Every prompt gets `samples` answers at each temperature; greedy ones would all be equal, so
    there is one. `capacity` bounds prompt and answer together; longer prompts are skipped.
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
    capacity: int = 448
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.prompts and not self.num_self_written:
            raise ConfigError("there is nothing to answer; give --prompts or --self-written")
        for name in ("samples", "max_tokens", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number of at least 1")
        if self.capacity <= self.max_tokens:
            raise ConfigError(
                f"capacity {self.capacity} leaves no room for a prompt beside max_tokens "
                f"{self.max_tokens}; raise it"
            )


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
    config.output.mkdir(parents=True, exist_ok=True)
    prompts = [p for path in config.prompts for p in with_variants(read_prompts(path))]
    folder = resolve_model(config.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_target_model(folder, resolve_dtype(config.dtype, config.device), config.device)
    writer = AnswerWriter(
        model,
        stop_ids=_stop_ids(model, tokenizer),
        slots=config.slots,
        capacity=config.capacity,
        seed=config.seed,
    )
    prompts += _self_written(config, writer, tokenizer)
    random.Random(config.seed).shuffle(prompts)
    path = config.output / "answers.jsonl"
    jobs = list(_jobs(prompts[: config.limit], config, _answered(path)))
    _write_manifest(config, folder, len(jobs))
    progress = DataProgress(len(jobs), 0, 0, 0.0, Counter())
    start = monotonic()
    with path.open("a", encoding="utf-8") as file:
        for answer in writer.write(_as_job(key, p, tokenizer, config) for key, p in jobs):
            file.write(json.dumps(_row(answer)) + "\n")
            progress.num_answers += 1
            progress.num_tokens += len(answer.response_ids)
            progress.tokens_per_second = progress.num_tokens / (monotonic() - start)
            progress.finishes[answer.finish] += 1
            report(progress)
    return path


def _stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ids = model.generation_config.eos_token_id
    listed = ids if isinstance(ids, list) else [ids]
    return {i for i in [*listed, tokenizer.eos_token_id] if i is not None}


def _self_written(
    config: DataConfig, writer: AnswerWriter, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Prompts of the target's own, kept in a file so that a resumed run sees the same ones."""
    if not config.num_self_written:
        return []
    path = config.output / "self_prompts.jsonl"
    if not path.exists():
        written = write_prompts(writer, tokenizer, config.num_self_written, config.seed)
        rows = [{"id": p.id, "set": p.set, "turns": [p.text]} for p in written]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        part.replace(path)
    with path.open(encoding="utf-8") as lines:
        read = [json.loads(line) for line in lines]
    return [Prompt(id=row["id"], set=row["set"], text=row["turns"][0]) for row in read]


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
    """What the file holds; a last line cut off by a killed run is dropped."""
    if not path.exists():
        return set()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        path.write_text("".join(lines), encoding="utf-8")
    rows = map(json.loads, lines)
    return {(row["id"], row["temperature"], row["sample"]) for row in rows}


def _write_manifest(config: DataConfig, folder: Path, num_jobs: int) -> None:
    """How the answers are made, beside them; one entry a run."""
    path = config.output / "manifest.json"
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
    settings["prompts"] = [str(p) for p in config.prompts]
    entry = {"config": settings, "num_jobs": num_jobs, "target_folder": folder.name}
    runs.append(entry | {"torch": torch.__version__})
    path.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
