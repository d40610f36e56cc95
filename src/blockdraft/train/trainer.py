"""The training run: prepare, step, evaluate, save."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import check_output_folder
from blockdraft.models.draft import DraftModel
from blockdraft.models.loading import (
    check_pair,
    load_target_model,
    resolve_device,
    resolve_dtype,
)
from blockdraft.train.blocks import sample_anchors
from blockdraft.train.config import TrainConfig
from blockdraft.train.dataset import (
    Example,
    collate,
    count_answer_tokens,
    epoch_batches,
    read_examples,
    split_held_out,
    unused_special_token,
)
from blockdraft.train.drafter import draft_config_for, with_block_size
from blockdraft.train.evaluate import HeldOut, HeldOutMetrics
from blockdraft.train.features import FrozenTarget, StateCache
from blockdraft.train.loss import PartialVocabulary
from blockdraft.train.optimizer import DraftOptimizer
from blockdraft.train.run_state import RunClock, append_log, load_state, provenance, save_state
from blockdraft.train.step import StepStats, accumulate_gradients
from blockdraft.train.support import check_plain_head
from blockdraft.train.true_tau import TrueTau

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """drafter: folder of the trained drafter; metrics: of its last evaluation."""

    drafter: Path
    num_steps: int
    metrics: HeldOutMetrics
    true_tau: Mapping[str, float]


def train(config: TrainConfig, true_tau: TrueTau | None = None) -> TrainResult:
    """Train a drafter, or continue a run whose state lies in `config.out`.

    Args:
        config: of the run.
        true_tau: measures real decoding with the drafter at each evaluation.

    Raises:
        ConfigError: settings or data are not usable.
        ModelError: target or drafter cannot be loaded, or do not fit each other.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config = dataclasses.replace(config, device=resolve_device(config.device))
    return _Run(config, true_tau).run()


def load_drafter(
    config: TrainConfig, target: PreTrainedModel, examples: list[Example]
) -> DraftModel:
    """The drafter to train, in the precision of the run: `init_from`, or random weights."""
    dtype = resolve_dtype(config.dtype, config.device)
    if config.init_from is not None:
        model = DraftModel.from_pretrained(config.init_from, dtype, config.device)
        model.config = with_block_size(model.config, config.block_size)
        check_pair(target, model.config)
        return model
    mask_token_id = config.mask_token_id
    if mask_token_id is None:
        tokenizer = AutoTokenizer.from_pretrained(config.target, local_files_only=True)
        mask_token_id = unused_special_token(tokenizer.all_special_ids, examples)
    torch.manual_seed(config.seed)
    draft_config = draft_config_for(
        target.config,
        num_layers=config.num_layers,
        block_size=config.block_size,
        num_features=config.num_features,
        mask_token_id=mask_token_id,
    )
    return DraftModel(draft_config).to(device=config.device, dtype=dtype)


class _Run:
    """One run and everything that it holds."""

    def __init__(self, config: TrainConfig, true_tau: TrueTau | None) -> None:
        self.config = config
        self.true_tau = true_tau
        for folder in (config.out, config.feature_cache):
            if folder is not None:
                check_output_folder(folder)
        examples = read_examples(
            config.data, min_response_len=config.min_response_len, max_len=config.max_len
        )
        self.examples, held_out = split_held_out(examples, config.held_out_share)
        if not self.examples or not held_out:
            raise ConfigError(
                f"{len(examples)} answers give {len(self.examples)} to train on and "
                f"{len(held_out)} held out; add answers, or change held_out_share"
            )
        loaded = load_target_model(
            config.target, resolve_dtype(config.dtype, config.device), config.device
        )
        if config.distill_share > 0:
            check_plain_head(loaded, "distillation", "set distill_share=0")
        self.model = load_drafter(config, loaded, examples).train()
        self.target = FrozenTarget(loaded, self.model.config.target_layer_ids)
        self.states = StateCache(
            self.target, self.examples, config.feature_cache, str(config.target)
        )
        counts = count_answer_tokens(self.examples)
        self.vocabulary = PartialVocabulary(
            self.target.lm_head_weight, counts, config.num_frequent, config.num_random
        )
        if config.draft_vocabulary:
            most_common = counts.most_common(config.draft_vocabulary)
            self.model.draft_vocabulary = [token for token, _ in most_common]
        self.optimizer = DraftOptimizer(self.model, config)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.step = self.epoch = self.next_batch = self.num_sequences = 0
        self._resume()
        self.held_out = HeldOut(self.target, held_out, config.eval_sequences)
        self.num_held_out = len(held_out)
        self.clock = RunClock(self._seconds_before)

    def _resume(self) -> None:
        state = load_state(self.config.out / "state.pt", self.config)
        self._seconds_before = 0.0
        if state is None:
            return
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step, self.epoch = state["step"], state["epoch"]
        self.next_batch, self.num_sequences = state["next_batch"], state["num_sequences"]
        if state["num_examples"] != len(self.examples):
            # Files that grew give another order: begin a new pass rather than mix two.
            self.epoch, self.next_batch = self.epoch + 1, 0
        self._seconds_before = state["seconds"]
        logger.info("continuing at step %d after %.1f min", self.step, self._seconds_before / 60)

    def _save(self) -> None:
        state = {
            "config": self.config.to_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "epoch": self.epoch,
            "next_batch": self.next_batch,
            "num_sequences": self.num_sequences,
            "num_examples": len(self.examples),
            "seconds": self.clock.tick(),
        }
        save_state(self.config.out / "state.pt", state)

    @property
    def progress(self) -> float:
        """How much of the run is done, 0 to 1 or more."""
        minutes, steps = self.config.max_minutes, self.config.max_steps
        by_time = self.clock.seconds / (60 * minutes) if minutes else 0.0
        return max(by_time, self.step / steps if steps else 0.0)

    def run(self) -> TrainResult:
        """Train until time or steps are used up."""
        self.config.out.mkdir(parents=True, exist_ok=True)
        logger.info(
            "%d answers to train on, %d held out; %d parameters",
            len(self.examples),
            self.num_held_out,
            sum(p.numel() for p in self.model.parameters()),
        )
        if self.step == 0:
            self._evaluate()
        last_eval = last_save = self.clock.tick()
        while self.progress < 1:
            self._next_step()
            now = self.clock.tick()
            if now - last_eval > 60 * self.config.eval_minutes and self.progress < 0.95:
                self._evaluate()
                last_eval = self.clock.tick()
            if now - last_save > 60 * self.config.save_minutes:
                self._save()
                last_save = self.clock.tick()
        self._save()
        return self._evaluate()

    def _next_step(self) -> None:
        batches = epoch_batches(
            self.examples, self.config.batch_sequences, self.config.seed, self.epoch
        )
        indices = batches[self.next_batch]
        begin = time.monotonic()
        stats = self._gradients(indices)
        lr, norm = self.optimizer.step(self.progress)
        seconds = time.monotonic() - begin
        self.step += 1
        self.num_sequences += len(indices)
        self.next_batch += 1
        if self.next_batch == len(batches):
            self.epoch, self.next_batch = self.epoch + 1, 0
        self._log_step(stats, lr, norm, seconds, len(indices))

    def _gradients(self, indices: list[int]) -> StepStats:
        batch = collate([self.examples[i] for i in indices], self.config.device)
        states = self.states.get(indices, batch)
        anchors = sample_anchors(batch, self.config.num_anchors, self.generator)
        vocabulary = self.vocabulary.draw(batch.token_ids, self.generator)
        return accumulate_gradients(
            self.model, self.target, batch, states, anchors, vocabulary, self.config
        )

    def _log_step(
        self, stats: StepStats, lr: float, norm: float, seconds: float, num_sequences: int
    ) -> None:
        row = {
            "step": self.step,
            "epoch": self.epoch,
            "minutes": round(self.clock.tick() / 60, 3),
            "nll": round(stats.nll, 4),
            "distill": round(stats.distill, 4),
            "lr": lr,
            "grad_norm": round(norm, 4),
            "seconds": round(seconds, 3),
            "slots_per_second": round(stats.num_slots / seconds),
            "sequences_per_second": round(num_sequences / seconds, 2),
        }
        append_log(self.config.out / "log.jsonl", row)
        logger.info(
            "step %d (epoch %d, %.1f min): nll %.3f distill %.3f lr %.2g %.2f s %.1f seq/s",
            *(self.step, self.epoch, row["minutes"], stats.nll, stats.distill, lr, seconds),
            row["sequences_per_second"],
        )

    def _evaluate(self) -> TrainResult:
        """Measure and save the averaged weights."""
        self.optimizer.use_averages()
        self.model.eval()
        metrics = self.held_out.evaluate(self.model, self.clock.tick)
        true_tau = dict(self.true_tau(self.model, self.clock.tick)) if self.true_tau else {}
        row: dict[str, Any] = {
            "step": self.step,
            "minutes": round(self.clock.tick() / 60, 3),
            "held_out": dataclasses.asdict(metrics),
            "true_tau": true_tau,
        }
        append_log(self.config.out / "log.jsonl", row)
        by_set = " ".join(f"{name} {tau:.2f}" for name, tau in metrics.tau_by_set.items())
        logger.info("held out: tau %.3f, loss %.3f (%s)", metrics.tau, metrics.loss, by_set)
        folder = self.config.out / "drafter"
        data = {
            "train": len(self.examples),
            "held_out": self.num_held_out,
            "passes": self.num_sequences,
        }
        facts = provenance(self.config, data=data, result=row)
        self.model.save_pretrained(folder, facts)
        self.optimizer.use_masters()
        self.model.train()
        return TrainResult(drafter=folder, num_steps=self.step, metrics=metrics, true_tau=true_tau)
