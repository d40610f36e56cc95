"""A small draft model in training: a causal LM of the target's class with fewer layers.

Embedding and head are the target's and are not trained, as for the other kinds. What is saved is an
ordinary folder of transformers, with the target's tokenizer.

Shapes: b sequences of S tokens, g anchors of each, s slots; D hidden size.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from blockdraft.core.errors import ModelError, reason_of
from blockdraft.core.words import counted
from blockdraft.data.dataset import Batch
from blockdraft.data.store import Example
from blockdraft.models.draft.checkpoint import WEIGHTS_NAME, write_index, write_provenance
from blockdraft.models.layers.recurrent import is_recurrent
from blockdraft.models.supported import CANNOT_RUN, decoder_layers, decoder_of
from blockdraft.models.target.loading import (
    load_target_model,
    resolve_dtype,
    target_without_weights,
)
from blockdraft.speculate.drafters import kinds as served
from blockdraft.text.same_tokenizer import tokenizer_difference
from blockdraft.train.blocks import Anchors, Blocks
from blockdraft.train.config import TrainConfig
from blockdraft.train.features import TextRotation, use_plain_attention
from blockdraft.train.kinds.base import (
    DrafterShape,
    Kind,
    TeacherForced,
    num_trained,
    refuse_settings,
)
from blockdraft.train.prepare import NUM_LAYERS

logger = logging.getLogger(__name__)

_ANOTHER = "train another architecture, such as dflash"


class SmallModel(TeacherForced):
    """A draft model in training, see TrainedDrafter.

    tokenizer: folder of the target, whose tokenizer is saved beside the model.
    """

    model: PreTrainedModel
    feature_layers = ()

    def __init__(self, model: PreTrainedModel, tokenizer: Path, block_size: int) -> None:
        super().__init__(block_size)
        self.model, self._tokenizer = model, tokenizer
        self._rotation = TextRotation(model)
        for ends in (model.get_input_embeddings(), model.get_output_embeddings()):
            ends.requires_grad_(False)

    def describe(self) -> dict[str, Any]:
        """See TrainedDrafter.describe."""
        found: dict[str, Any] = self.model.config.to_dict()
        # Which version of transformers made it is no part of the shape.
        return {name: value for name, value in found.items() if name != "transformers_version"}

    def limit_vocabulary(self, token_ids: Sequence[int] | None) -> None:
        """See TrainedDrafter.limit_vocabulary: an ordinary model has all tokens."""

    def context(self, features: Tensor, batch: Batch, embed_weight: Tensor) -> list[Tensor]:
        """See TrainedDrafter.context: the states [b, S, D] behind each token.

        Each text is computed by itself, so none of a packed row sees another.
        """
        is_token = batch.documents >= 0
        text = (is_token & (batch.positions == 0)).flatten().cumsum(0).view_as(is_token) - 1
        places = text[is_token], batch.positions[is_token]
        shape = int(places[0].max()) + 1, int(places[1].max()) + 1
        token_ids = batch.token_ids.new_zeros(shape)
        token_ids[places] = batch.token_ids[is_token]
        # No mask: rows are causal, so nothing real looks at the padding.
        lengths = torch.bincount(places[0], minlength=shape[0])
        with self._rotation.of(lengths):
            states = decoder_of(self.model)(input_ids=token_ids, use_cache=False).last_hidden_state
        found = states.new_zeros(*is_token.shape, states.shape[-1])
        found[is_token] = states[places]
        return [found]

    def slots(
        self, context: Sequence[Tensor], blocks: Blocks, anchors: Anchors, embed_weight: Tensor
    ) -> Tensor:
        """See TrainedDrafter.slots: slot 1 is what follows the anchor."""
        (states,) = context
        places = anchors.positions[..., None] + torch.arange(self.num_slots, device=states.device)
        rows = torch.arange(len(states), device=states.device)[:, None, None]
        return states[rows, places.clamp(max=states.shape[1] - 1)]

    def save_pretrained(
        self, folder: str | Path, provenance: Mapping[str, Any] | None = None
    ) -> None:
        """See TrainedDrafter.save_pretrained."""
        self.model.save_pretrained(folder)
        if (Path(folder) / WEIGHTS_NAME).exists():  # shards have an index already
            write_index(Path(folder))
        _save_tokenizer(self._tokenizer, folder)
        if provenance is not None:
            write_provenance(Path(folder), provenance)


_OF_OTHERS = (
    *("num_features", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank"),
    *("selector_top_k", "num_denoising_steps", "shard_drafter", "only_adapter"),
)


def _copied_layers(num_layers: int, num_target_layers: int) -> list[int]:
    """Layers of the target that a thin one may begin from: the first, the last, evenly between."""
    if num_layers == 1:
        return [num_target_layers - 1]
    return [round(i * (num_target_layers - 1) / (num_layers - 1)) for i in range(num_layers)]


def _thin_config(config: TrainConfig, target: PreTrainedModel) -> Any:
    """transformers' config of the target with fewer layers.

    Raises:
        ModelError: the target has fewer, or its layers do not go without each other.
    """
    num_layers = config.num_layers or NUM_LAYERS
    found = deepcopy(target.config)
    text = found.get_text_config()
    total = text.num_hidden_layers
    if num_layers > total:
        raise ModelError(
            f"the target has {total} layers and the draft model {num_layers}; take fewer"
        )
    if number := getattr(text, "num_kv_shared_layers", None):  # Gemma 3n, Gemma 4
        raise ModelError(
            f"the last {number} layers of {type(target).__name__} use the keys and values of "
            f"earlier ones (num_kv_shared_layers), so fewer layers do not go together; {_ANOTHER}"
        )
    kept = _copied_layers(num_layers, total)
    for name, value in vars(text).items():
        # What says something of each layer, such as the kind of its attention.
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, [value[index] for index in kept])
    text.num_hidden_layers = num_layers
    return found


def _without_weights(config: TrainConfig, target: PreTrainedModel) -> PreTrainedModel:
    refuse_settings(config, "draft_model", _OF_OTHERS)
    if config.init_from is None:
        _refuse_unserved(target)
        found = _thin_config(config, target)
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(found)
        # The code of a model raises any type for a config that it does not understand.
        except Exception as error:
            raise _does_not_run(target, found, error) from error
        assert isinstance(model, PreTrainedModel)
        _refuse_recurrent(model)
        if config.init == "target":
            _check_copy(model, target)
        return model
    refuse_settings(config, f"draft_model from {config.init_from}", ["num_layers"])
    model = target_without_weights(config.init_from)
    _refuse_recurrent(model)
    own, theirs = (m.get_input_embeddings().weight.shape for m in (model, target))
    if own != theirs:
        raise ModelError(
            f"the draft model of init_from, {config.init_from}, has an embedding of {list(own)}, "
            f"and the target of {list(theirs)}; use one with the target's tokenizer and width"
        )
    return model


def _refuse_unserved(target: PreTrainedModel) -> None:
    """Raise ModelError for a class that serving does not take for a language model's.

    Those for text and images among them, whose part for text has no class of its own.
    """
    name = type(target).__name__
    if served.kind_of({"architectures": [name]}) != "draft_model":
        raise ModelError(
            f"a draft model has the target's class, and {name} cannot draft when it is served; "
            f"{_ANOTHER}"
        )


def _refuse_recurrent(model: PreTrainedModel) -> None:
    """Raise ModelError for layers that no draft model may have when it is served."""
    if is_recurrent(model):
        raise ModelError(
            f"a draft model of this kind has recurrent layers ({type(model).__name__}), whose "
            f"state cannot be rolled back after rejected tokens; {_ANOTHER}"
        )


def _does_not_run(target: PreTrainedModel, thin: Any, error: Exception) -> ModelError:
    number, total = (c.get_text_config().num_hidden_layers for c in (thin, target.config))
    return ModelError(
        f"a draft model of {number} of the {total} layers of {type(target).__name__} does not run "
        f"({reason_of(error)}); {_ANOTHER}"
    )


def _check_tokenizer(folder: Path) -> None:
    """Refuse a target whose tokenizer is another one when it is saved beside the draft model.

    Raises:
        ModelError: it cannot be saved, or some token differs.
    """
    with TemporaryDirectory() as saved:
        try:
            _save_tokenizer(folder, saved)
            difference = tokenizer_difference(folder, Path(saved))
        # Tokenizers of code of their own raise any type.
        except Exception as error:
            difference = reason_of(error)
    if difference is not None:
        raise ModelError(
            f"the tokenizer of {folder} cannot be saved beside a draft model ({difference}); "
            f"{_ANOTHER}"
        )


def _save_tokenizer(source: Path, folder: str | Path) -> None:
    AutoTokenizer.from_pretrained(
        source, local_files_only=True, trust_remote_code=False
    ).save_pretrained(folder)


def _shape(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example], num_processes: int
) -> DrafterShape:
    model = _without_weights(config, target)
    _check_tokenizer(config.target)
    drafter = SmallModel(model, config.target, config.block_size)
    text = model.config.get_text_config()
    if config.init_from is not None and config.architecture is None:
        logger.info(
            "init_from %s is a language model, so it is trained as one (architecture=draft_model): "
            "each draft token runs all of its %s; for another kind of drafter leave init_from "
            "out",
            *(config.init_from, counted(text.num_hidden_layers, "layer")),
        )
    return DrafterShape(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        feature_layers=(),
        num_parameters=num_trained(model),
        reads_whole_rows=True,
        facts=drafter.describe(),
    )


def _load(config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]) -> SmallModel:
    _without_weights(config, target)
    dtype = resolve_dtype(config.dtype, config.device)
    if config.init_from is not None:
        model = load_target_model(config.init_from, dtype, config.device)
    else:
        torch.manual_seed(config.seed)
        # In its precision from the start, as when it is loaded: cast later, it would lose digits
        # of the frequencies of its rotation too.
        model = AutoModelForCausalLM.from_config(_thin_config(config, target), dtype=dtype)
        if config.init == "target":
            _copy_layers(model, target)
    for mine, theirs in (
        (model.get_input_embeddings(), target.get_input_embeddings()),
        (model.get_output_embeddings(), target.get_output_embeddings()),
    ):
        mine.load_state_dict(theirs.state_dict())
    model.generation_config = deepcopy(target.generation_config)
    use_plain_attention(model, "sdpa")
    model = model.to(config.device)
    _check_forward(model, target)
    return SmallModel(model, config.target, config.block_size)


@torch.no_grad()
def _check_forward(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise ModelError if the layers do not go without those that were left out."""
    try:
        decoder_of(model)(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device))
    except CANNOT_RUN as error:
        raise _does_not_run(target, model.config, error) from error


def _check_copy(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise ModelError if a layer is not like the one that it would be a copy of.

    Both may be without weights. In some models the number of a layer decides what it is.
    """
    mine, theirs = decoder_layers(model), decoder_layers(target)
    for place, index in enumerate(_copied_layers(len(mine), len(theirs))):
        own, other = (
            {name: tensor.shape for name, tensor in layer.state_dict().items()}
            for layer in (mine[place], theirs[index])
        )
        if differing := sorted(name for name, _ in own.items() ^ other.items()):
            raise ModelError(
                f"layer {place} of the draft model would be a copy of layer {index} of the target, "
                f"which is of another kind ({differing[0]}); use init=random"
            )


def _copy_layers(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy what stands around the layers too, such as the last norm, whatever it is called."""
    own, all_theirs = (decoder_of(one).state_dict() for one in (model, target))
    fitting = {
        name: v for name, v in all_theirs.items() if name in own and v.shape == own[name].shape
    }
    decoder_of(model).load_state_dict(own | fitting)
    mine, theirs = decoder_layers(model), decoder_layers(target)
    for layer, index in zip(mine, _copied_layers(len(mine), len(theirs)), strict=True):
        layer.load_state_dict(theirs[index].state_dict())


DRAFT_MODEL = Kind(_shape, _load, has_target_weights=True)
