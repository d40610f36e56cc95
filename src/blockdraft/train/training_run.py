"""A training run: prepare, step, evaluate, save."""

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from blockdraft.core.errors import DiskError
from blockdraft.core.progress import Progress, time_left
from blockdraft.data.dataset import count_answer_tokens
from blockdraft.data.identity import target_sha256, texts_sha256
from blockdraft.data.ngrams import count_ngrams
from blockdraft.data.store import TextStore
from blockdraft.models.target.loading import settle_device
from blockdraft.train.advice import few_steps, few_texts
from blockdraft.train.batches import Batches
from blockdraft.train.config import TrainConfig
from blockdraft.train.evaluate import HeldOut
from blockdraft.train.features import FeatureCache, FrozenTarget
from blockdraft.train.kinds.base import TrainedDrafter, num_trained
from blockdraft.train.kinds.table import load_trained
from blockdraft.train.loss import PartialVocabulary
from blockdraft.train.optimizer import DraftOptimizer
from blockdraft.train.origin import describe_target, write_expected
from blockdraft.train.parallel import Processes
from blockdraft.train.prepare import limit_vocabulary, load_frozen
from blockdraft.train.run_folder import BEST, RunFolder
from blockdraft.train.run_log import best_of, evaluations
from blockdraft.train.run_state import (
    STATE,
    Interval,
    RunClock,
    damage_refused,
    load_state,
    provenance,
    save_state,
)
from blockdraft.train.sharing import whole_tensors
from blockdraft.train.step import Part, StepStats, accumulate_gradients, num_possible_slots
from blockdraft.train.stopping import Stopped, StopSignals
from blockdraft.train.texts import Texts
from blockdraft.train.true_tau import real_decoding

logger = logging.getLogger(__name__)

NUM_TIMED = 3
"""Steps that tell how long one takes."""
LATE = 0.95
"""Of a run: behind it the evaluation at the end is near enough."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended.

    drafter: folder of the best drafter. evaluations: rows of the log, from before the first step to
    the end; best: one of these, see `best_of`.
    """

    drafter: Path
    num_steps: int
    evaluations: Sequence[Mapping[str, Any]]
    best: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Moment:
    """A place in a run; `progress` is the share of it that is done."""

    seconds: float
    step: int
    progress: float


class TrainingRun:
    """One run and everything that it holds."""

    def __init__(self, config: TrainConfig, processes: Processes, texts: Texts) -> None:
        self.config = config
        self.processes = processes
        self.examples, held_out = TextStore.of(texts.train), texts.held_out
        settle_device(config.device)  # a target that is shared is loaded on the CPU
        self.loaded = loaded = load_frozen(config, "cpu" if config.shard_target else config.device)
        self.drafter = load_trained(config, loaded, texts.examples)
        # Without the dropout that a language model may have: no state tells what it draws next.
        self.drafter.model.eval()
        self.num_parameters = num_trained(self.drafter.model)
        self.trained: dict[str, Any] = {
            "target_sha256": " ".join(
                filter(None, (target_sha256(config.target), config.quantize))
            ),
            "drafter": self.drafter.describe(),
        }
        self.texts = texts_sha256(self.examples)
        if config.shard_drafter:
            held = processes.share_drafter(self.drafter, config)
            logger.info("of the drafter's parameters this process holds %d", held)
        most = None
        if config.shard_target:
            held = processes.share_layers(loaded)
            logger.info("of the target's parameters this process holds %d", held)
            most = processes.most
        # On a CPU a large target takes minutes for the texts of a step.
        self.target = FrozenTarget(
            loaded, self.drafter.feature_layers, most, tick=lambda: self.clock.tick()
        )
        self._open_states()
        counts = count_answer_tokens(self.examples)
        self.vocabulary = PartialVocabulary(
            self.target.lm_head_weight, counts, config.num_frequent, config.num_random
        )
        limit_vocabulary(self.drafter, config, self.examples)
        self.optimizer = DraftOptimizer(self.drafter.model, config)
        self.batches = Batches(self.examples, config)
        self.step = 0
        is_new = self._resume()
        self.held_out_texts = held_out
        if processes.is_main:
            self.folder = RunFolder(config, None if is_new else self.step)
        self.progress = 0.0
        self.begun = _Moment(0.0, 0, 0.0)
        self.stop = StopSignals()
        self.shown = Progress(logger)

    def _open_states(self) -> None:
        if not self.processes.is_main:
            self.processes.wait()  # The first process makes the files.
        self.states = FeatureCache(
            self.target, self.examples, self.config.feature_cache, self.trained["target_sha256"]
        )
        if self.processes.is_main:
            self.processes.wait()

    def _resume(self) -> bool:
        """Take up the state that an earlier run left; True if there is none."""
        path = self.config.out / STATE
        state = load_state(path, self.config, self.trained)
        if state is None:
            self.clock = RunClock()
            self.saved = self.evaluated = self._now()
            return True
        with damage_refused(path):
            self.optimizer.load_state_dict(state["optimizer"])
            self.batches.load_state_dict(state)
            self.clock, self.step = RunClock(float(state["seconds"])), int(state["step"])
            seconds, step = state["evaluated"]
            self.saved, self.evaluated = self._now(), (float(seconds), int(step))
        if state["texts"] != self.texts:
            # Other texts have another order: begin a new pass rather than mix two.
            self.batches.begin_pass()
            logger.info("the texts changed: a new epoch starts")
        logger.info("continuing at step %d after %.1f min", self.step, self.clock.seconds / 60)
        return False

    def _prepare_evaluations(self) -> None:
        """What is held against each evaluation; steps alone are timed without."""
        texts, config = self.held_out_texts, self.config
        if self.processes.is_main or config.shard_target:
            self.held_out = HeldOut(self.target, texts, config.eval_sequences)
        if self.processes.is_main:
            self.target_facts = describe_target(config, self.loaded.dtype)
            self.real_decoding = real_decoding(config, self.loaded, texts)

    def _save(self) -> None:
        optimizer = whole_tensors(self.optimizer.state_dict(), self.processes.is_main)
        self.saved = self._now()
        if not self.processes.is_main:
            return
        state = {
            "config": self.config.to_dict(),
            "optimizer": optimizer,
            **self.batches.state_dict(),
            "step": self.step,
            "texts": self.texts,
            "seconds": self.clock.tick(),
            "evaluated": self.evaluated,
        }
        save_state(self.config.out / STATE, state | self.trained)

    def _now(self) -> tuple[float, int]:
        return self.clock.tick(), self.step

    def _decide_progress(self) -> None:
        """How much of the run is done, 0 to 1 or more."""
        minutes, steps = self.config.max_minutes, self.config.max_steps
        by_time = self.clock.seconds / (60 * minutes) if minutes else 0.0
        own = max(by_time, self.step / steps if steps else 0.0)
        (self.progress,) = self.processes.decided([own])

    def run(self) -> TrainResult:
        """Train until time or steps are used up.

        Raises:
            Stopped: a signal asked for the end; the state is saved.
        """
        self._prepare_evaluations()
        self.config.out.mkdir(parents=True, exist_ok=True)
        logger.info(
            "%d answers to train on, %d held out; %d parameters; processes: %d",
            len(self.examples),
            len(self.held_out_texts),
            self.num_parameters,
            self.processes.count,
        )
        self._warn(few_texts(len(self.examples), len(self.held_out_texts)))
        if self.config.max_minutes is None:
            self._warn(few_steps(self.config.max_steps))
        with self.stop:
            try:
                self._train()
            except Stopped:
                self._save()
                raise
            finally:
                self.shown.clear()
        rows = evaluations(self.config.out)
        return TrainResult(
            drafter=self.config.out / BEST,
            num_steps=self.step,
            evaluations=rows,
            best=best_of(rows),
        )

    def _warn(self, warnings: Iterable[str]) -> None:
        if self.processes.is_main:
            for warning in warnings:
                logger.warning("%s", warning)

    def _train(self) -> None:
        evaluation = Interval(self.config.eval_minutes, self.config.eval_steps)
        saving = Interval(self.config.save_minutes, self.config.save_steps)
        self._decide_progress()
        # One that a signal came before, or broke off, is made up for, or all later ones would be
        # of other steps than without the signal.
        was_due = evaluation.is_due(self.evaluated, self._now()) and self.progress < LATE
        if any(self.processes.decided([self.step == 0 or was_due])):
            self._evaluate()
            self._decide_progress()
        self.begun = _Moment(self.clock.seconds, self.step, self.progress)
        while self.progress < 1:
            self.next_step()
            self._decide_progress()
            if self.config.max_minutes is not None and self.step == self.begun.step + NUM_TIMED:
                self._warn(few_steps(self._expected_steps()))
            # One process decides for all: their clocks differ, and signals come when they come.
            now, is_late = self._now(), self.progress >= LATE
            is_due = evaluation.is_due(self.evaluated, now) and not is_late
            wants = is_due, saving.is_due(self.saved, now), self.stop.signal
            evaluates, saves, signal = self.processes.decided(wants)
            if signal:
                raise Stopped(int(signal))
            if evaluates:
                self._evaluate()
            elif saves:
                self._save()
        self._save()
        self._evaluate()
        self._count_ngrams()
        self._expect()

    def _tick(self) -> float:
        """Called on the way of what takes long: tells the clock, and ends at a signal."""
        # Several processes end together, after a step.
        if self.processes.count == 1 and self.stop.signal:
            raise Stopped(self.stop.signal)
        return self.clock.tick()

    def next_step(self) -> None:
        """Draw the texts of a step, and update the weights by the gradients of all processes."""
        begin = time.monotonic()
        draw, vocabulary = self.batches.draw, self.vocabulary
        parts = [draw(self.drafter, vocabulary) for _ in range(self.config.accumulate)]
        per_anchor = self.drafter.num_slots
        # A mean over all possible slots, of all parts and processes.
        num_slots = sum(num_possible_slots(part.anchors, per_anchor) for part in parts)
        sums = [0.0, 0.0, 0.0, 0.0]
        for part in parts:
            own = self._gradients(part, 1.0 / max(1, num_slots))
            self.optimizer.collect()
            sums = [one + more for one, more in zip(sums, dataclasses.astuple(own), strict=True)]
        nll, distill, selector, count = self.processes.summed(sums)
        stats = StepStats(nll, distill, selector, int(count))
        stats.check_finite(self.step + 1, self.config)
        self.processes.sum_gradients(self.optimizer.gradients)
        lr, norm = self.optimizer.step(self.progress)
        self.step += 1
        if self.processes.is_main:
            num_sequences = sum(len(row) for part in parts for row in part.rows)
            seconds = time.monotonic() - begin
            self._log_step(stats, lr, norm, seconds, num_sequences)

    def _gradients(self, part: Part, scale: float) -> StepStats:
        """Add the gradient of this process's rows to the model's."""
        own = part.of(self.processes.share_of_rows(len(part.rows)))
        is_shared = self.config.shard_drafter
        if is_shared and not own.rows:
            own = part.stand_in()
        states = self.states.get(own.rows, own.batch)
        # A forward of a shared drafter is one of all processes, so they make equally many.
        counted = part if is_shared else own
        num_groups = counted.anchors.num_groups(self.config.anchors_per_forward)
        if num_groups == 0:
            return StepStats(0.0, 0.0, 0.0, 0)
        return accumulate_gradients(
            self.drafter, self.target, own, states, self.config, scale, num_groups
        )

    def _log_step(
        self, stats: StepStats, lr: float, norm: float, seconds: float, num_sequences: int
    ) -> None:
        row = {
            "step": self.step,
            "epoch": self.batches.epoch,
            "minutes": round(self.clock.tick() / 60, 3),
            "sequences": self.batches.num_sequences,
            "tokens": self.batches.num_tokens,
            "nll": round(stats.nll, 4),
            "distill": round(stats.distill, 4),
            "lr": lr,
            "grad_norm": round(norm, 4),
            "seconds": round(seconds, 3),
            "slots_per_second": round(stats.num_slots / seconds),
            "sequences_per_second": round(num_sequences / seconds, 2),
        }
        if self.drafter.candidate_selector is not None:
            row["selector"] = round(stats.selector, 4)
        self.folder.log(row)
        self.shown.show(
            f"step {self.step}, {time_left(self._seconds_left())}: nll {stats.nll:.3f}, "
            f"distill {stats.distill:.3f}, {seconds:.2f} s a step"
        )

    def _seconds_left(self) -> float:
        """Of the run, by what this process has done of it."""
        done = self.progress - self.begun.progress
        since = self.clock.seconds - self.begun.seconds
        return (1 - self.progress) * since / done if done else inf

    def _expected_steps(self) -> int:
        """When the run will have ended."""
        done = self.progress - self.begun.progress
        return self.step + round((1 - self.progress) * (self.step - self.begun.step) / done)

    def _evaluate(self) -> None:
        """Measure the averaged weights, save them and the state, and keep the best; others wait.

        A step that has been measured is not measured again, when a finished run is started.
        """
        # Only the main process reads the log, which it writes.
        is_new = self.processes.is_main and all(
            row["step"] != self.step for row in evaluations(self.config.out)
        )
        self.shown.clear()
        if any(self.processes.decided([is_new])):
            self.optimizer.use_averages()
            whole = self.drafter.whole(self.processes.is_main)
            whole.model.eval()
            if self.processes.is_main:
                row = self._measure_or_save(whole)
                self.folder.add(whole, row, self._facts(whole))
            self.optimizer.use_masters()
            self.evaluated = self._now()
            if self.step:
                self._save()
            if self.processes.is_main:
                self.folder.keep_best()
        self.processes.wait()

    def _expect(self) -> None:
        """Write beside the best drafter what its users may expect of it; the others wait."""
        if self.processes.is_main and self.config.tau_limit:
            write_expected(self.config.out / BEST, self.config, self.loaded, self._tick)
        self.processes.wait()

    def _count_ngrams(self) -> None:
        """Write beside the best drafter what usually follows in its answers; the others wait."""
        if self.processes.is_main:
            table, _ = count_ngrams(self.examples)
            table.save(self.config.out / BEST)
        self.processes.wait()

    def _measure_or_save(self, drafter: TrainedDrafter) -> dict[str, Any]:
        """Measure; if the disk of temporary files is full, the steps so far are not lost."""
        try:
            return self._measure(drafter)
        except DiskError:
            # To save shares would need all processes, and the others wait elsewhere.
            if self.step and self.processes.count == 1:
                self._save()
            raise

    def _measure(self, drafter: TrainedDrafter) -> dict[str, Any]:
        metrics = self.held_out.evaluate(drafter, self._tick)
        real = self.real_decoding.measure(drafter, self._tick)
        row: dict[str, Any] = {
            "step": self.step,
            "minutes": round(self.clock.tick() / 60, 3),
            "sequences": self.batches.num_sequences,
            "tokens": self.batches.num_tokens,
            "held_out": dataclasses.asdict(metrics),
            "true_tau": dict(real.tau),
            "speedup": dict(real.speedup),
            "measured_on": self.real_decoding.prompts_sha256 or self.held_out.texts_sha256,
        }
        by_set = " ".join(f"{name} {tau:.2f}" for name, tau in metrics.tau_by_set.items())
        logger.info("held out: tau %.3f, loss %.3f (%s)", metrics.tau, metrics.loss, by_set)
        if real.tau:
            true = " ".join(f"{name} {tau:.2f}" for name, tau in real.tau.items())
            logger.info("decoding: speed-up %.2f, tau %s", real.speedup.get("all", 0.0), true)
        return row

    def _facts(self, drafter: TrainedDrafter) -> dict[str, Any]:
        """Where a drafter of this moment comes from."""
        data = {
            "train": len(self.examples),
            "held_out": len(self.held_out_texts),
            "passes": self.batches.num_sequences / len(self.examples),
        }
        return provenance(
            self.config, target=self.target_facts, drafter=drafter.describe(), data=data
        )
