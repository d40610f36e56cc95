"""What a run will be and take: counted from its data, and timed over a few of its steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch

from blockdraft.core.errors import ConfigError
from blockdraft.data.config import DataConfig
from blockdraft.data.store import Example
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.loading import resolve_dtype
from blockdraft.train.advice import few_steps, few_texts
from blockdraft.train.check import check_run, state_width
from blockdraft.train.config import TrainConfig
from blockdraft.train.kinds.base import DrafterShape
from blockdraft.train.parallel import launched, resolve_own_device
from blockdraft.train.prepare import BYTES_PER_PARAMETER
from blockdraft.train.texts import Texts
from blockdraft.train.trainer import time_steps
from blockdraft.train.training_run import NUM_TIMED


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Figures of a run.

    num_processes: that train together, as the launcher says. memory: bytes of each process by what
    they hold. step_seconds: the median of a few steps, with the target's forward; None if they were
    not timed. num_steps: None if nothing tells. minutes: the limit that was set, or the estimate.
    warnings: why the run may learn nothing.
    """

    num_processes: int
    drafter: DrafterShape
    num_parameters: int
    target_parameters: int
    texts: Texts
    steps_per_epoch: int
    memory: Mapping[str, int]
    step_seconds: float | None
    num_steps: int | None
    minutes: float | None
    warnings: tuple[str, ...]

    @property
    def passes(self) -> float | None:
        """Times that each text is seen."""
        return None if self.num_steps is None else self.num_steps / self.steps_per_epoch

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        texts, passes = self.texts, self.passes
        return {
            "processes": self.num_processes,
            "drafter": dict(self.drafter.facts),
            "parameters": self.num_parameters,
            "target_parameters": self.target_parameters,
            "answers": {
                "train": texts.num_train,
                "held_out": texts.num_held_out,
                "expected": texts.num_expected,
            },
            "tokens": {"all": texts.num_tokens, "of_answers": texts.num_answer_tokens},
            "steps": {"expected": self.num_steps, "per_pass": self.steps_per_epoch},
            "passes": passes,
            "tokens_seen": None if passes is None else round(passes * texts.num_tokens),
            "memory_bytes": dict(self.memory) | {"sum": sum(self.memory.values())},
            "step_seconds": self.step_seconds,
            "minutes": self.minutes,
            "warnings": list(self.warnings),
        }


def estimate_run(config: TrainConfig, answers: DataConfig | None = None) -> Estimate:
    """The figures of a run, a few steps of which are done and forgotten.

    `answers` are those that the run will write first, if they are not there yet: then the steps are
    timed on texts that are as long as these may be.

    Raises:
        ConfigError: settings or data are not usable, or a disk is too small.
        ModelError: target and drafter do not fit.
    """
    config = replace(config, device=resolve_own_device(config.device))
    checked = check_run(config, answers)
    texts, shape = checked.texts, checked.drafter
    num_parameters = shape.num_parameters
    _, num_processes = launched()
    target_parameters = sum(p.numel() for p in checked.target.parameters())
    mean_len = texts.num_tokens / texts.num_train
    rows = texts.num_train if config.pack_len is None else texts.num_tokens / config.pack_len
    own = sum(p.numel() for layer in decoder_layers(checked.target) for p in layer.parameters())
    step_seconds = None
    if not config.shard_target:
        step_seconds = median(
            time_steps(_share(config, num_processes), _timed(config, texts), NUM_TIMED)
        )
    num_steps, minutes = _length(config, step_seconds)
    return Estimate(
        num_processes=num_processes,
        drafter=shape,
        num_parameters=num_parameters,
        target_parameters=target_parameters,
        texts=texts,
        steps_per_epoch=max(1, round(rows / (config.batch_sequences * config.accumulate))),
        memory=_memory(
            config,
            shape,
            num_parameters // (num_processes if config.shard_drafter else 1),
            target_parameters - own + own // (num_processes if config.shard_target else 1),
            math.ceil(config.batch_sequences / num_processes),
            mean_len if config.pack_len is None else config.pack_len,
            state_width(shape, checked.target),
        ),
        step_seconds=step_seconds,
        num_steps=num_steps,
        minutes=minutes,
        warnings=few_texts(texts.num_train, texts.num_held_out) + few_steps(num_steps),
    )


def _share(config: TrainConfig, num_processes: int) -> TrainConfig:
    """What one process does of a step; what they send each other is not timed."""
    rows = math.ceil(config.batch_sequences / num_processes)
    return replace(config, batch_sequences=rows, shard_drafter=False)


def _timed(config: TrainConfig, texts: Texts) -> Texts:
    """The texts to time steps on: those that exist, or others of the length of those to come."""
    if not texts.num_expected:
        return texts
    (known,) = texts.expected
    tokens = cycle(known.prompt_ids or known.response_ids or (0,))
    answer_len = max(config.block_size, texts.num_answer_tokens // texts.num_train)
    prompt_len = max(1, texts.num_tokens // texts.num_train - answer_len)
    example = Example(
        id="timed",
        set="timed",
        prompt_ids=tuple(islice(tokens, prompt_len)),
        response_ids=tuple(islice(tokens, answer_len)),
    )
    in_a_row = 1 if config.pack_len is None else max(1, config.pack_len // len(example))
    train = [example] * (config.batch_sequences * config.accumulate * in_a_row)
    return replace(texts, train=train, held_out=[example])


def _memory(
    config: TrainConfig,
    shape: DrafterShape,
    num_parameters: int,
    target_parameters: int,
    num_rows: int,
    row_tokens: float,
    width: int,
) -> dict[str, int]:
    """Bytes of what is largest in a process: a floor, as much again may be needed on the way.

    The parameters are those that the process holds, and the rows those that it takes of a batch.
    """
    size = torch.finfo(resolve_dtype(config.dtype, config.device)).bits // 8
    tokens = num_rows * row_tokens
    slots = num_rows * config.anchors_per_forward * config.block_size
    if shape.reads_whole_rows:
        slots = round(tokens)
    per_slot = shape.num_layers * (8 * shape.hidden_size + 3 * shape.intermediate_size)
    return {
        "target": target_parameters * size,
        "drafter": num_parameters * 2 * size,
        "float32 masters, gradients and optimizer": num_parameters * (BYTES_PER_PARAMETER + 4),
        "features of a batch": round(tokens * width * size),
        "activations of a draft forward pass": round(slots * per_slot * size),
    }


def _length(config: TrainConfig, step_seconds: float | None) -> tuple[int | None, float | None]:
    """(steps, minutes) at which the run will end."""
    if step_seconds is None:
        return config.max_steps, config.max_minutes
    by_steps = config.max_steps * step_seconds / 60 if config.max_steps else None
    minutes = min(m for m in (by_steps, config.max_minutes) if m is not None)
    num_steps = round(60 * minutes / step_seconds)
    if num_steps < 1:
        raise ConfigError(
            f"a step takes {step_seconds:.0f} seconds, longer than the run; raise max_minutes, or "
            "lower batch_sequences or num_anchors"
        )
    return num_steps, minutes
