"""The drafter that a run starts from."""

import logging
from dataclasses import replace
from pathlib import Path

from blockdraft.data.config import DataConfig
from blockdraft.train.check import check_run
from blockdraft.train.config import TrainConfig
from blockdraft.train.kinds.table import has_target_weights, load_trained
from blockdraft.train.parallel import resolve_own_device
from blockdraft.train.prepare import limit_vocabulary, load_frozen
from blockdraft.train.run_state import provenance

logger = logging.getLogger(__name__)


def write_untrained(config: TrainConfig, answers: DataConfig | None = None) -> Path:
    """Write the drafter that the run would start from, in the layout that it would end with.

    Before its answers are written, it has the whole vocabulary to draft from.

    Raises:
        ConfigError, ModelError: as the run itself would.
    """
    config = replace(config, device=resolve_own_device(config.device))
    checked = check_run(config, answers)
    texts, target = checked.texts, checked.target
    if config.init == "target" or has_target_weights(config):
        target = load_frozen(config, config.device)
    drafter = load_trained(config, target, texts.examples)
    if not texts.num_expected:
        limit_vocabulary(drafter, config, texts.train)
    elif config.mask_token_id is None or config.draft_vocabulary:
        logger.warning(
            "the answers are not written yet: they may change the mask token, and limit which "
            "tokens the drafter proposes (draft_vocabulary)"
        )
    folder = config.out / "untrained"
    drafter.save_pretrained(folder, provenance(config, result="untrained"))
    return folder
