"""From a drafter and answers to a Hydra head in the drafter's folder, in parts if need be."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.core.files import (
    check_output_folder,
    check_room,
    folder_lock,
    full_disk_refused,
)
from blockdraft.core.out_of_memory import full_memory_refused
from blockdraft.core.progress import Progress, time_left
from blockdraft.core.threads import ENVIRONMENT
from blockdraft.core.words import counted
from blockdraft.data.identity import target_sha256, texts_sha256
from blockdraft.hub.resolve import resolve_model
from blockdraft.measure.provenance import describe_environment
from blockdraft.models.draft.hydra_head import HEAD_NAME
from blockdraft.models.layers.quantized import dequantize
from blockdraft.models.target.loading import (
    load_target_model,
    resolve_device,
    use_threads,
)
from blockdraft.train.features import FrozenTarget
from blockdraft.train.hydra.config import HeadConfig
from blockdraft.train.hydra.learning import HeadLearner
from blockdraft.train.hydra.places import Places
from blockdraft.train.hydra.start import (
    known_head,
    layers_of_drafter,
    new_head,
    read_texts,
    some_of,
)
from blockdraft.train.hydra.state import BEGIN_ANEW, HEAD_STATE, load_head_state
from blockdraft.train.run_state import Interval, RunClock, damage_refused, save_state
from blockdraft.train.stopping import Stopped, StopSignals
from blockdraft.train.support import check_plain_head

logger = logging.getLogger(__name__)

CPU_TOKENS, GPU_TOKENS = 1024, 32_768
"""Of the texts of a step."""
HEAD_BYTES_PER_PARAMETER = 16
"""On disk: the weights and two moments in a state, and the weights in the head, in float32."""
SAVE_MINUTES = 5.0
"""Between two saved states."""
NUM_SHOWN = 10
"""Steps whose mean loss is shown."""


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """How a training ended.

    head: its file; that of the head that the drafter had, if the training made that one worse.
    before, after: divergences from the target on held-out answers, in nats, one, two and three
    tokens ahead; empty if no answer was held out. num_places: of tokens that were learned from.
    """

    head: Path
    num_steps: int
    num_places: int
    num_held_out: int
    before: Sequence[float]
    after: Sequence[float]


def train_head(config: HeadConfig) -> HeadResult:
    """Train a head, or go on with a training whose state lies in the drafter's folder.

    Raises:
        ConfigError: settings or answers are not usable, another process trains there, or memory
            runs out.
        DiskError: the disk is full.
        ModelError: target or drafter cannot be loaded, or no head can stand beside the drafter.
        Stopped: a signal asked for the end; the state is saved.
    """
    check_output_folder(config.drafter)
    if config.states is not None:
        check_output_folder(config.states)
    use_threads(None, ENVIRONMENT)
    folder = resolve_model(config.target)
    drafter_layers = layers_of_drafter(config, folder)
    memory = full_memory_refused("lower step_tokens")
    with folder_lock(config.drafter), full_disk_refused(config.drafter), memory:
        return _HeadRun(config, folder, drafter_layers).run()


class _HeadRun:
    """One training and everything that it holds."""

    def __init__(self, config: HeadConfig, folder: Path, drafter_layers: Sequence[int]) -> None:
        self.config = config
        device = resolve_device(config.device)
        model = load_target_model(folder, torch.bfloat16, device)
        dequantize(model)
        check_plain_head(model, "training of a Hydra head", "it cannot be trained for this target")
        known = known_head(config.drafter, model, drafter_layers) if config.from_head else None
        layers = known.shape.target_layer_ids if known else config.layers
        target = FrozenTarget(model, layers or some_of(drafter_layers))
        examples, self.held_out = read_texts(config, model)
        on_cpu = target.embed_weight.device.type == "cpu"
        step_tokens = config.step_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS)
        sha256 = target_sha256(folder)
        if on_cpu and config.states is None:
            logger.info(
                "the target reads the answers in each step; with a folder for its states "
                "(--states) it reads them only once"
            )
        head = known or new_head(target, examples, config)
        num_parameters = sum(own.numel() for own in head.parameters())
        check_room(config.drafter / HEAD_STATE, HEAD_BYTES_PER_PARAMETER * num_parameters)
        self.trained = {
            "target": sha256,
            "answers": texts_sha256(examples),
            "shape": asdict(head.shape),
            "tokens": head.token_ids.tolist(),
            "lr": config.lr,
            "step_tokens": step_tokens,
        }
        # Before the folder of states forgets other answers: these may have been given by mistake.
        self.state = load_head_state(config.drafter / HEAD_STATE, self.trained)
        self.places = Places(target, examples, config.states, sha256, step_tokens)
        self.others = Places(target, self.held_out, None, sha256, step_tokens)
        self.learner = HeadLearner(head.to(device), target, config.lr)
        self.stop, self.shown = StopSignals(), Progress(logger)
        logger.info(
            "%s to train on, %d held out; %d parameters; layers %s of the target",
            *(
                counted(len(examples), "answer"),
                len(self.held_out),
                num_parameters,
            ),
            ", ".join(map(str, target.layer_ids)),
        )
        if not self.held_out:
            logger.warning(
                "no answer is held out, so nothing tells whether the head becomes better or worse: "
                "give more answers"
            )

    def run(self) -> HeadResult:
        """Learn until the minutes are over, and write the head."""
        learner, state = self.learner, self.state
        if state is None:
            before, seconds = self._measure("before"), 0.0
        else:
            with damage_refused(self.config.drafter / HEAD_STATE, BEGIN_ANEW):
                before, seconds = list(map(float, state["before"])), float(state["seconds"])
                learner.load_state_dict(state["learner"])
            logger.info("continuing at step %d after %.1f min", learner.num_steps, seconds / 60)
        with self.stop:
            try:
                if self.config.states is not None:
                    self._read()
                self.clock = RunClock(seconds)
                self._learn(before)
                # Whatever happens while the head is measured and written, this is there.
                self._save(before)
            finally:
                self.shown.clear()
        after = self._measure("after")
        learner.check_finite(after)
        is_worse = sum(after) > sum(before)
        if is_worse:
            self._warn_of_worse(before, after)
        if not (is_worse and self.config.from_head):
            learner.head.cpu().save(self.config.drafter, self._facts(before, after))
        (self.config.drafter / HEAD_STATE).unlink(missing_ok=True)
        return HeadResult(
            head=self.config.drafter / HEAD_NAME,
            num_steps=learner.num_steps,
            num_places=learner.num_places,
            num_held_out=len(self.held_out),
            before=before,
            after=after,
        )

    def _read(self) -> None:
        """Have the target read what the folder of states lacks; what it has read stays."""
        for _ in self.places.read(self.shown):
            if self.stop.signal:
                raise Stopped(self.stop.signal)

    def _learn(self, before: Sequence[float]) -> None:
        """Pass after pass; a training that goes on begins a pass of an order of its own."""
        saving = Interval(SAVE_MINUTES, None)
        self.saved = self.clock.seconds, self.learner.num_steps
        generator = torch.Generator().manual_seed(self.learner.num_steps)
        recent: list[Tensor] = []
        while True:
            for batch in self.places.batches(generator):
                if self.learner.num_steps and self._minutes() >= self.config.minutes:
                    return
                recent.append(self.learner.step(batch, self._minutes() / self.config.minutes))
                self._tell(recent)
                now = self.clock.tick(), self.learner.num_steps
                if self.stop.signal or saving.is_due(self.saved, now):
                    self._save(before)
                if self.stop.signal:
                    raise Stopped(self.stop.signal)

    def _minutes(self) -> float:
        return self.clock.tick() / 60

    def _tell(self, recent: list[Tensor]) -> None:
        if self.learner.num_steps % NUM_SHOWN:
            return
        loss = float(torch.stack(recent).mean())
        recent.clear()
        left = 60 * (self.config.minutes - self._minutes())
        self.shown.show(
            f"step {self.learner.num_steps}, {time_left(max(0.0, left))}: divergence {loss:.3f} on "
            "the training answers"
        )

    def _save(self, before: Sequence[float]) -> None:
        self.learner.check_finite()
        state = {
            **self.trained,
            "learner": self.learner.state_dict(),
            "before": list(before),
            "seconds": self.clock.tick(),
        }
        save_state(self.config.drafter / HEAD_STATE, state)
        self.saved = self.clock.seconds, self.learner.num_steps

    def _measure(self, when: str) -> list[float]:
        if not len(self.others):
            return []
        found = self.learner.divergences(self.others)
        shown = ", ".join(f"{one:.3f}" for one in found)
        logger.info("held out, %s: divergence %s", when, shown)
        return found

    def _warn_of_worse(self, before: Sequence[float], after: Sequence[float]) -> None:
        kept = "; the drafter keeps its earlier head" if self.config.from_head else ""
        logger.warning(
            "the head predicts worse than before training: divergence %.3f, and %.3f before%s; "
            "lower lr (it is %g), or give more answers",
            *(after[0], before[0], kept, self.config.lr),
        )

    def _facts(self, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
        """Where the head comes from."""
        return {
            **describe_environment(),
            "threads": torch.get_num_threads(),
            "config": self.config.to_dict(),
            "target_sha256": self.trained["target"],
            "texts_sha256": self.trained["answers"],
            "num_steps": self.learner.num_steps,
            "num_places": self.learner.num_places,
            "minutes": round(self._minutes(), 1),
            "num_held_out": len(self.held_out),
            "divergence": {"before": list(before), "after": list(after)},
        }
