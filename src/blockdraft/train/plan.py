"""What a run will be and take, told before it starts."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import check_output_folder
from blockdraft.data.config import DataConfig
from blockdraft.data.dataset import Example
from blockdraft.models.checkpoint import read_config
from blockdraft.models.draft import DraftModel
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.loading import (
    load_target_model,
    resolve_device,
    resolve_dtype,
    target_without_weights,
)
from blockdraft.models.supported import decoder_layers
from blockdraft.train.config import TrainConfig
from blockdraft.train.drafter import check_copy
from blockdraft.train.parallel import check_sharing, launched
from blockdraft.train.prepare import (
    BYTES_PER_PARAMETER,
    check_disk,
    check_ids,
    check_target,
    limit_vocabulary,
    load_drafter,
    shape_of,
    start_shape,
)
from blockdraft.train.run_folder import event_log_class
from blockdraft.train.run_state import provenance
from blockdraft.train.sharing import check_rows
from blockdraft.train.texts import Texts, count_texts
from blockdraft.train.true_tau import prompts_to_decode

logger = logging.getLogger(__name__)

SHARE_REACHED = 0.4
"""Of the rate of a large matrix product; what a training step reaches of it is less, and how much
depends on the machine: the expected time is a guess within a factor of two."""
RATE_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Figures of a run.

    num_processes: that train together, as the launcher says. memory: bytes of each process by what
    they hold. step_flops: floating-point operations of a step of all processes, the target's
    forward included unless it is cached. flops_per_second: of one process. minutes: the limit that
    was set, or the estimate.
    """

    num_processes: int
    drafter: DraftConfig
    num_parameters: int
    target_parameters: int
    texts: Texts
    steps_per_epoch: int
    memory: Mapping[str, int]
    step_flops: int
    flops_per_second: float
    num_steps: int
    minutes: float

    @property
    def step_seconds(self) -> float:
        """Estimated; what processes send each other is not counted."""
        return _step_seconds(self.step_flops, self.flops_per_second, self.num_processes)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        rows, texts = self.num_steps / max(1, self.steps_per_epoch), self.texts
        return {
            "processes": self.num_processes,
            "drafter": self.drafter.to_dict(),
            "parameters": self.num_parameters,
            "target_parameters": self.target_parameters,
            "answers": {
                "train": texts.num_train,
                "held_out": texts.num_held_out,
                "expected": texts.num_expected,
            },
            "tokens": {"all": texts.num_tokens, "of_answers": texts.num_answer_tokens},
            "steps": {"expected": self.num_steps, "per_pass": self.steps_per_epoch},
            "passes": rows,
            "tokens_seen": round(rows * texts.num_tokens),
            "memory_bytes": dict(self.memory) | {"sum": sum(self.memory.values())},
            "step_flops": self.step_flops,
            "flops_per_second": self.flops_per_second,
            "step_seconds": self.step_seconds,
            "minutes": self.minutes,
        }


def plan_run(config: TrainConfig, answers: DataConfig | None = None) -> Plan:
    """The figures of a run. Loads no weights; checks what can be checked without.

    `answers` are those that the run will write first, if they are not there yet.

    Raises:
        ConfigError: settings or data are not usable, or a disk is too small.
        ModelError: target and drafter do not fit.
    """
    config = replace(config, device=resolve_device(config.device))
    checked = check_run(config, answers)
    texts, shape, num_parameters = checked.texts, checked.drafter, checked.num_parameters
    _, num_processes = launched()
    target_parameters = sum(p.numel() for p in checked.target.parameters())
    mean_len = texts.num_tokens / texts.num_train
    rows = texts.num_train if config.pack_len is None else texts.num_tokens / config.pack_len
    step_rows = config.batch_sequences * config.accumulate
    row_tokens = mean_len if config.pack_len is None else config.pack_len
    own = sum(p.numel() for layer in decoder_layers(checked.target) for p in layer.parameters())
    flops = _step_flops(config, shape, num_parameters, own, step_rows, row_tokens, mean_len)
    rate = measure_rate(config, shape)
    num_steps, minutes = _length(config, _step_seconds(flops, rate, num_processes))
    return Plan(
        num_processes=num_processes,
        drafter=shape,
        num_parameters=num_parameters,
        target_parameters=target_parameters,
        texts=texts,
        steps_per_epoch=max(1, round(rows / step_rows)),
        memory=_memory(
            config,
            shape,
            num_parameters // (num_processes if config.shard_drafter else 1),
            target_parameters - own + own // (num_processes if config.shard_target else 1),
            math.ceil(config.batch_sequences / num_processes),
            row_tokens,
        ),
        step_flops=flops,
        flops_per_second=rate,
        num_steps=num_steps,
        minutes=minutes,
    )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What is known of a run that may begin: texts, target without weights, the drafter's shape."""

    texts: Texts
    target: PreTrainedModel
    drafter: DraftConfig
    num_parameters: int


def check_run(config: TrainConfig, answers: DataConfig | None = None) -> Checked:
    """Find what would stop a run, before anything is loaded or written.

    Plan, dry run and run all begin with it, and so do the `answers` that a run writes first.

    Raises:
        ConfigError: settings or data are not usable, or a disk is too small.
        ModelError: target and drafter do not fit.
    """
    _, num_processes = launched()
    check_sharing(config, num_processes)
    for folder in (config.out, config.feature_cache):
        if folder is not None:
            check_output_folder(folder)
    event_log_class(config)
    texts = count_texts(config, answers)
    target = target_without_weights(config.target)
    check_target(config, target)
    check_ids(target, texts.examples)
    prompts_to_decode(config, target, texts.held_out)
    shape = planned_shape(config, target, texts.examples)
    with torch.device("meta"):
        drafter = DraftModel(shape)
    if config.init == "target":
        check_copy(drafter, target)
    if config.shard_drafter:
        check_rows(drafter, config, num_processes)
    num_parameters = sum(p.numel() for p in drafter.parameters())
    width = (shape.num_features + 1) * shape.target_hidden_size
    # Expected answers are counted too long: they refuse no disk.
    check_disk(config, num_parameters, 0 if texts.num_expected else texts.num_tokens, width)
    return Checked(texts=texts, target=target, drafter=shape, num_parameters=num_parameters)


def planned_shape(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> DraftConfig:
    """The drafter's shape; the target may be without weights."""
    if config.init_from is None:
        return shape_of(config, target, examples)
    found = DraftConfig.from_dict(read_config(config.init_from))
    return start_shape(config, found, target, examples)


def _step_flops(
    config: TrainConfig,
    shape: DraftConfig,
    num_parameters: int,
    target_layers: int,
    num_rows: int,
    row_tokens: float,
    mean_len: float,
) -> int:
    """Operations of the matrix products of one step.

    A product costs 2 a weight and row, and its two gradients twice that again; the head is frozen
    and has one gradient. Attention is counted over half of a text.
    """
    d, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    kv = 2 * shape.num_key_value_heads * shape.head_dim
    fc = shape.num_features * shape.target_hidden_size * d
    slots = num_rows * config.num_anchors * shape.block_size
    tokens = num_rows * row_tokens
    vocabulary = shape.vocab_size
    if config.num_frequent:
        vocabulary = min(vocabulary, config.num_frequent + config.num_random)
    per_token = 6 * (fc + shape.num_hidden_layers * d * kv)
    per_slot: float = 6 * (num_parameters - fc)
    per_slot += 12 * shape.num_hidden_layers * heads * (mean_len / 2 + shape.block_size)
    per_slot += (4 + 2 * (config.distill_share > 0)) * d * vocabulary
    target = 0 if config.feature_cache is not None else 2 * target_layers
    return round(slots * per_slot + tokens * (per_token + target))


def _memory(
    config: TrainConfig,
    shape: DraftConfig,
    num_parameters: int,
    target_parameters: int,
    num_rows: int,
    row_tokens: float,
) -> dict[str, int]:
    """Bytes of what is largest in a process: a floor, as much again may be needed on the way.

    The parameters are those that the process holds, and the rows those that it takes of a batch.
    """
    size = torch.finfo(resolve_dtype(config.dtype, config.device)).bits // 8
    tokens = num_rows * row_tokens
    slots = num_rows * config.anchors_per_forward * shape.block_size
    per_slot = shape.num_hidden_layers * (8 * shape.hidden_size + 3 * shape.intermediate_size)
    width = (shape.num_features + 1) * shape.target_hidden_size
    return {
        "target": target_parameters * size,
        "drafter": num_parameters * 2 * size,
        "float32 masters, gradients and optimizer": num_parameters * (BYTES_PER_PARAMETER + 4),
        "features of a batch": round(tokens * width * size),
        "activations of a draft forward": round(slots * per_slot * size),
    }


def _step_seconds(flops: int, flops_per_second: float, num_processes: int) -> float:
    return flops / (SHARE_REACHED * flops_per_second * num_processes)


def measure_rate(config: TrainConfig, shape: DraftConfig) -> float:
    """Floating-point operations a second of a large matrix product, on this device and now."""
    dtype = resolve_dtype(config.dtype, config.device)
    x = torch.ones(1024, shape.hidden_size, dtype=dtype, device=config.device)
    weight = torch.ones(shape.hidden_size, shape.intermediate_size, dtype=dtype, device=x.device)
    for _ in range(2):
        float((x @ weight)[0, 0])
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < RATE_SECONDS:
        float((x @ weight)[0, 0])
        runs += 1
    seconds = time.perf_counter() - start
    return runs * 2 * x.shape[0] * weight.numel() / seconds


def _length(config: TrainConfig, step_seconds: float) -> tuple[int, float]:
    """(steps, minutes) at which the run will end."""
    by_steps = config.max_steps * step_seconds / 60 if config.max_steps else None
    minutes = min(m for m in (by_steps, config.max_minutes) if m is not None)
    num_steps = round(60 * minutes / step_seconds)
    if num_steps < 1:
        raise ConfigError(
            f"a step is expected to take {step_seconds:.0f} seconds, longer than the run; raise "
            "max_minutes, or lower batch_sequences or num_anchors"
        )
    return num_steps, minutes


def write_untrained(config: TrainConfig, answers: DataConfig | None = None) -> Path:
    """Write the drafter that the run would start from, in the layout that it would end with.

    Before its answers are written, it has the whole vocabulary to draft from.

    Raises:
        ConfigError, ModelError: as the run itself would.
    """
    config = replace(config, device=resolve_device(config.device))
    checked = check_run(config, answers)
    texts, target = checked.texts, checked.target
    if config.init == "target":
        target = load_target_model(config.target, resolve_dtype(config.dtype, config.device))
    model = load_drafter(config, target, texts.examples)
    if not texts.num_expected:
        limit_vocabulary(model, config, texts.train)
    elif config.mask_token_id is None or config.draft_vocabulary:
        logger.warning(
            "the answers are not written yet: they may change the mask token, and limit what the "
            "drafter guesses (draft_vocabulary)"
        )
    folder = config.out / "untrained"
    model.save_pretrained(folder, provenance(config, result="untrained"))
    return folder
