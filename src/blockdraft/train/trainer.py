"""Training of a drafter from its settings to the end, and the time that its steps take."""

import dataclasses
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from blockdraft.core.files import check_output_folder, folder_lock, full_disk_refused
from blockdraft.core.out_of_memory import full_memory_refused
from blockdraft.core.threads import TRAINING
from blockdraft.models.target.loading import use_threads
from blockdraft.train.check import check_run
from blockdraft.train.config import TrainConfig
from blockdraft.train.parallel import Processes, resolve_own_device
from blockdraft.train.texts import Texts
from blockdraft.train.training_run import TrainingRun, TrainResult

LESS_MEMORY = (
    "lower anchors_per_forward, batch_sequences or pack_len (with a new out if a state was saved), "
    "and see with --plan how much memory a run needs at least"
)


def train(config: TrainConfig) -> TrainResult:
    """Train a drafter, or continue a run whose state lies in `config.out`.

    Raises:
        ConfigError: settings or data are not usable, `config.out` is in use, or memory runs out.
        DiskError: the disk is full.
        ModelError: target or drafter cannot be loaded, or do not fit each other.
        Stopped: a signal asked for the end; the state is saved.
    """
    check_output_folder(config.out)
    use_threads(config.threads, TRAINING)
    config = dataclasses.replace(config, device=resolve_own_device(config.device))
    processes = Processes(config.device)
    alone = folder_lock(config.out) if processes.is_main else nullcontext()
    try:
        with (
            alone,
            full_disk_refused(config.out),
            full_memory_refused(LESS_MEMORY),
            # A drafter that is shared out silences a warning of torch, for this run only.
            warnings.catch_warnings(),
        ):
            texts = check_run(config).texts
            processes.wait()  # The first process makes the files, once all have checked.
            return TrainingRun(config, processes, texts).run()
    finally:
        processes.close()


def time_steps(config: TrainConfig, texts: Texts, number: int) -> list[float]:
    """Seconds of the first steps of a run, which is done by this process alone and then forgotten.

    The target's features are computed for every step.
    """
    use_threads(config.threads, TRAINING)
    seconds = []
    with TemporaryDirectory() as folder, full_memory_refused(LESS_MEMORY):
        config = dataclasses.replace(
            config,
            out=Path(folder),
            feature_cache=None,
            max_steps=number,
            max_minutes=None,
            tensorboard=False,
        )
        run = TrainingRun(config, Processes(config.device, alone=True), texts)
        for _ in range(number):
            begin = time.monotonic()
            run.next_step()
            seconds.append(time.monotonic() - begin)
    return seconds
