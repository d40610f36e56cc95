"""Training data: prompts, answered by the target in bulk, one JSONL row an answer.

A row is {"id", "set", "temperature", "sample", "prompt_ids", "response_ids", "finish"}. Rows are
appended as they come, and a run that is started again goes on where it stopped. When all is
answered, what is fit to train on is written as token shards, see `data.shards`.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import check_output_folder, folder_lock, full_disk_refused
from blockdraft.core.threads import ENVIRONMENT
from blockdraft.data.answer_file import (
    Answered,
    DataProgress,
    Key,
    PriorAnswer,
    Report,
    Row,
    append_rows,
    key_of,
    last_rows,
    read_answered,
)
from blockdraft.data.answers import Answer, Job, Writer
from blockdraft.data.config import DataConfig
from blockdraft.data.endpoint_answers import Endpoint, EndpointWriter
from blockdraft.data.engine_answers import EngineWriter
from blockdraft.data.gathering import chosen, gather_prompts
from blockdraft.data.history import earlier_runs, with_run
from blockdraft.data.overlap import without_overlap
from blockdraft.data.prompts import (
    SELF_WRITTEN_TOKENS,
    Prompt,
    check_template,
    distinct,
    prompt_ids,
)
from blockdraft.data.self_written import read_written, write_prompts
from blockdraft.data.shards import ANSWERS, write_manifest, write_shards
from blockdraft.data.turns import (
    asked_turns,
    check_same_prompts,
    jobs_for,
    num_broken_off,
    num_turns,
)
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.supported import context_of
from blockdraft.models.target.loading import (
    load_target_model,
    resolve_device,
    resolve_dtype,
    target_without_weights,
    use_threads,
)
from blockdraft.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

WHILE_ANSWERING = "interrupted; the same command generates the missing answers"
"""What to say of answers that were broken off."""

_NOTHING_LEFT = (
    "no usable prompt is left after dropping those that overlap a benchmark; give others"
)


def generate_data(config: DataConfig, report: Report = lambda progress: None) -> Path:
    """Answer everything that is not answered yet, and write the shards; returns their folder.

    Raises:
        ConfigError: prompts are missing, broken or too long, the folder holds other answers or is
            in use, its disk is full, no answer is fit to train on, or the endpoint refuses.
        ModelError: the target cannot be loaded.
        NetworkError: the endpoint does not answer.
    """
    check_output_folder(config.output)
    use_threads(None, ENVIRONMENT)
    with folder_lock(config.output), full_disk_refused(config.output):
        return _generate(config, report)


def _generate(config: DataConfig, report: Report) -> Path:
    prompts, counts = gather_prompts(config)
    manifest = earlier_runs(config)
    folder = resolve_model(config.target)
    stop_ids, tokenizer = load_tokenizers(config, folder, prompts)
    answered = read_answered(config.output / ANSWERS)
    manifest = with_run(manifest, config, folder, tokenizer)
    _check_lengths(config, folder, prompts, tokenizer, answered)
    check_same_prompts(config, [*prompts, *read_written(config)], tokenizer, answered)
    writer = _writer(config, folder, stop_ids)
    write_manifest(config.output, manifest)
    if config.num_self_written:
        written = _self_written(config, writer, tokenizer, report, counts)
        prompts = distinct([*prompts, *written])
    prompts = chosen(config, prompts)
    if not prompts:
        raise ConfigError(_NOTHING_LEFT)
    wanted: set[Key] = set()
    for turn in range(num_turns(config, prompts)):
        asked = list(asked_turns(prompts, turn, config, tokenizer, answered))
        wanted.update(key for key, _, _ in asked)
        _write_answers(config, writer, list(jobs_for(asked, config, answered)), answered, report)
    if broken_off := num_broken_off(config, prompts, answered):
        logger.warning(
            "chats that end before their last turn, at an answer that was cut off or that loops: "
            "%d; raise max_tokens (it is %d)",
            *(broken_off, config.max_tokens),
        )
    if others := len(answered.keys() - wanted):
        logger.info(
            "%s also holds %d answers of earlier runs that this one did not ask for; they are kept "
            "as training data too; give another --output to exclude them",
            *(config.output, others),
        )
    if not answered:
        raise ConfigError(
            f"none of {len(prompts)} prompts was answered; raise max_prompt_tokens (it is "
            f"{config.max_prompt_tokens}), or give other prompts"
        )
    _finish(config, manifest, counts)
    return config.output


def _writer(config: DataConfig, folder: Path, stop_ids: frozenset[int]) -> Writer:
    """Our own engine, or a server that serves the target."""
    capacity = config.max_prompt_tokens + max(config.max_tokens, SELF_WRITTEN_TOKENS)
    if config.endpoint is not None:
        endpoint = Endpoint.find(config.endpoint, config.endpoint_model)
        logger.info("%s answers at %s", endpoint.model, endpoint.url)
        return EndpointWriter(endpoint, slots=config.slots, capacity=capacity, seed=config.seed)
    device = resolve_device(config.device)
    return EngineWriter(
        load_target_model(folder, resolve_dtype(config.dtype, device), device),
        stop_ids=stop_ids,
        slots=config.slots,
        capacity=capacity,
        seed=config.seed,
    )


def _finish(config: DataConfig, manifest: dict[str, Any], counts: dict[str, int]) -> None:
    written = write_shards(
        config.output,
        (row for _, row in last_rows(config.output / ANSWERS)),
        rows_per_shard=config.rows_per_shard,
        drop_truncated=config.drop_truncated,
    )
    counts = counts | written["counts"]
    shown = ", ".join(f"{name} {number}" for name, number in counts.items())
    if not written["shards"]:
        raise ConfigError(
            f"no answer in {config.output} is usable for training ({shown}); raise max_tokens (it "
            f"is {config.max_tokens}), or give other prompts"
        )
    write_manifest(config.output, manifest | written | {"counts": counts})
    logger.info("answers: %s", shown)


def load_tokenizers(
    config: DataConfig, folder: Path, prompts: Sequence[Prompt]
) -> tuple[frozenset[int], PreTrainedTokenizerBase]:
    """The ids that end an answer, and transformers' own tokenizer.

    Raises:
        ConfigError: its template cannot ask the prompts as it is told.
        ModelError: it has no template, and not all of the prompts are plain text.
    """
    loaded = load_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if config.num_self_written or not all(prompt.is_plain for prompt in prompts):
        check_template(tokenizer, config.thinking)
    return loaded.eos_ids, tokenizer


def _self_written(
    config: DataConfig,
    writer: Writer,
    tokenizer: PreTrainedTokenizerBase,
    report: Report,
    counts: dict[str, int],
) -> list[Prompt]:
    """Prompts of the target's own; they are added to `counts`."""
    written = write_prompts(config, writer, tokenizer, report)
    clean = without_overlap(written, config.exclude)
    counts["self_written_prompts"] = len(written)
    counts["overlapping_self_written"] = len(written) - len(clean)
    logger.info(
        "self-written prompts: %d of %d are usable; %d of these overlap a benchmark and are left "
        "out",
        *(len(written), config.num_self_written, len(written) - len(clean)),
    )
    return clean


def _check_lengths(
    config: DataConfig,
    folder: Path,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    answered: Answered,
) -> None:
    """Refuse what the target has no room for, and prompts that are all too long."""
    context = context_of(target_without_weights(folder))
    if config.max_prompt_tokens + config.max_tokens > context:
        raise ConfigError(
            f"max_prompt_tokens {config.max_prompt_tokens} and max_tokens {config.max_tokens} are "
            f"more than the {context} tokens of the target's context; lower one of them"
        )
    if config.num_self_written:
        return
    if not prompts:
        raise ConfigError(_NOTHING_LEFT)
    if answered:
        return
    lengths = []
    for prompt in chosen(config, prompts):
        lengths.append(len(prompt_ids(tokenizer, prompt, (), config.thinking)))
        if lengths[-1] <= config.max_prompt_tokens:
            return
    raise ConfigError(
        f"all of {len(lengths)} prompts have more than max_prompt_tokens "
        f"{config.max_prompt_tokens}, the shortest {min(lengths)} tokens; raise it, or give "
        "shorter prompts"
    )


def _write_answers(
    config: DataConfig, writer: Writer, jobs: Sequence[Job], answered: Answered, report: Report
) -> None:
    progress = DataProgress("answers", len(jobs), 0, 0, 0.0, Counter())
    path = config.output / ANSWERS
    for row in append_rows(path, writer.write(jobs), _to_row, progress, report):
        answered[key_of(row)] = PriorAnswer.of(row)


def _to_row(answer: Answer) -> Row:
    return asdict(answer.job) | {"response_ids": answer.response_ids, "finish": answer.finish}
