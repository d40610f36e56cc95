"""What would stop a run, found before anything is loaded or written."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from blockdraft.core.files import check_output_folder
from blockdraft.core.threads import check_threads
from blockdraft.data.config import DataConfig
from blockdraft.models.target.loading import target_without_weights
from blockdraft.train.config import TrainConfig
from blockdraft.train.kinds.base import DrafterShape
from blockdraft.train.kinds.table import drafter_shape
from blockdraft.train.parallel import check_sharing, launched
from blockdraft.train.prepare import (
    check_disk,
    check_ids,
    check_mask_before_answers,
    check_target,
)
from blockdraft.train.run_folder import BEST, LAST, event_log_class
from blockdraft.train.texts import Texts, count_texts
from blockdraft.train.true_tau import prompts_to_decode


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What is known of a run that may begin: texts, target without weights, the drafter's shape."""

    texts: Texts
    target: PreTrainedModel
    drafter: DrafterShape


def check_run(config: TrainConfig, answers: DataConfig | None = None) -> Checked:
    """Find what would stop a run, before anything is loaded or written.

    An estimate, an untrained drafter and a run all begin with it, and so do the `answers` that a
    run writes first.

    Raises:
        ConfigError: settings or data are not usable, or a disk is too small.
        ModelError: target and drafter do not fit.
    """
    check_threads("threads", config.threads)
    _, num_processes = launched()
    check_sharing(config, num_processes)
    folders = [config.out, config.out / BEST, config.out / LAST]
    if config.feature_cache is not None:
        folders.append(config.feature_cache)
    for folder in folders:
        check_output_folder(folder)
    event_log_class(config)
    texts = count_texts(config, answers)
    target = target_without_weights(config.target)
    check_target(config, target)
    check_ids(target, texts.examples)
    prompts_to_decode(config, target, texts.held_out)
    shape = drafter_shape(config, target, texts.examples, num_processes)
    if texts.num_expected:
        check_mask_before_answers(config)
    width = state_width(shape, target)
    # Expected answers are counted too long: they refuse no disk.
    num_tokens = 0 if texts.num_expected else texts.num_tokens
    check_disk(config, shape.num_parameters, num_tokens, width)
    return Checked(texts=texts, target=target, drafter=shape)


def state_width(shape: DrafterShape, target: PreTrainedModel) -> int:
    """Numbers of a token's features and final state; the target may be without weights."""
    hidden_size: int = target.get_input_embeddings().weight.shape[1]
    return (len(shape.feature_layers) + 1) * hidden_size
