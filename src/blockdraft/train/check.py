"""What would stop a run, found before anything is loaded or written."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from blockdraft.core.files import check_output_folder
from blockdraft.data.config import DataConfig
from blockdraft.data.store import Example
from blockdraft.models.checkpoint import read_config
from blockdraft.models.draft import DraftModel
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.loading import target_without_weights
from blockdraft.train.config import TrainConfig
from blockdraft.train.drafter import check_copy
from blockdraft.train.parallel import check_sharing, launched
from blockdraft.train.prepare import check_disk, check_ids, check_target, shape_of, start_shape
from blockdraft.train.run_folder import event_log_class
from blockdraft.train.sharing import check_rows
from blockdraft.train.texts import Texts, count_texts
from blockdraft.train.true_tau import prompts_to_decode


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What is known of a run that may begin: texts, target without weights, the drafter's shape."""

    texts: Texts
    target: PreTrainedModel
    drafter: DraftConfig
    num_parameters: int


def check_run(config: TrainConfig, answers: DataConfig | None = None) -> Checked:
    """Find what would stop a run, before anything is loaded or written.

    An estimate, an untrained drafter and a run all begin with it, and so do the `answers` that a
    run writes first.

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
    shape = drafter_shape(config, target, texts.examples)
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


def drafter_shape(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> DraftConfig:
    """The drafter's shape; the target may be without weights."""
    if config.init_from is None:
        return shape_of(config, target, examples)
    found = DraftConfig.from_dict(read_config(config.init_from))
    return start_shape(config, found, target, examples)
