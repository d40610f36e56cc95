"""The kind of drafter that a run asks for."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from blockdraft.core.errors import ConfigError
from blockdraft.data.store import Example
from blockdraft.models.draft.checkpoint import CONFIG_NAME, read_config
from blockdraft.speculate.drafters import kinds as served
from blockdraft.train.config import TrainConfig
from blockdraft.train.kinds.base import DrafterShape, Kind, TrainedDrafter
from blockdraft.train.kinds.block import BLOCK
from blockdraft.train.kinds.draft_model import DRAFT_MODEL
from blockdraft.train.kinds.eagle3 import EAGLE3

KINDS: Mapping[str, Kind] = {
    "dflash": BLOCK,
    "dflash2": BLOCK,
    "diffusion": BLOCK,
    "eagle3": EAGLE3,
    "draft_model": DRAFT_MODEL,
}
"""By the names that `architecture` has."""


def _kind(config: TrainConfig) -> Kind:
    asked = KINDS.get(config.architecture or "")
    if config.init_from is None or not (config.init_from / CONFIG_NAME).exists():
        return asked or BLOCK
    found = served.kind_of(read_config(config.init_from))
    # Other kinds have the layers of DFlash, and are refused where their shape is read.
    kind = KINDS.get(found, BLOCK)
    if asked not in (None, kind):
        raise ConfigError(
            f"architecture is {config.architecture}, and the drafter of init_from, "
            f"{config.init_from}, has {found}; leave one of the two out"
        )
    return kind


def has_target_weights(config: TrainConfig) -> bool:
    """Whether the drafter is saved with weights of the target, and so needs them to begin with."""
    return _kind(config).has_target_weights


def drafter_shape(
    config: TrainConfig,
    target: PreTrainedModel,
    examples: Sequence[Example],
    num_processes: int = 1,
) -> DrafterShape:
    """What a run will train; the target may be without weights.

    Raises:
        ConfigError: the settings ask for what cannot be.
        ModelError: drafter and target do not fit each other.
    """
    return _kind(config).shape(config, target, examples, num_processes)


def load_trained(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> TrainedDrafter:
    """The drafter to train, in the precision and on the device of the run.

    Raises:
        ConfigError, ModelError: see `drafter_shape`.
    """
    return _kind(config).load(config, target, examples)
