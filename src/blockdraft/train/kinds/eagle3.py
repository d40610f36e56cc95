"""EAGLE-3 in training: a chain of steps over its own outputs (training-time test).

Behind an anchor, the first pair is made of the target's features of the token before it; every
later pair of what the drafter gave for the pair before, as in decoding (arXiv 2503.01840, section
3.2). A pair sees those of the text before the anchor, which have features, and those of its own
chain: the diagonal entries of the paper's masks. The chains begin at the anchors that other kinds
train too, instead of at every token.

The head is made of the target's own rows and is not trained, as for the other kinds.

Shapes: b sequences of S tokens, g anchors of each, s steps; D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.data.dataset import Batch
from blockdraft.data.store import Example
from blockdraft.models.draft.checkpoint import read_config
from blockdraft.models.draft.eagle3 import Eagle3Model, GrowingKV
from blockdraft.models.draft.eagle3_config import NUM_FEATURES, Eagle3Config, default_layer_ids
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.loading import resolve_dtype
from blockdraft.train.blocks import Anchors, Blocks
from blockdraft.train.config import TrainConfig
from blockdraft.train.drafter import feature_layers, layer_values
from blockdraft.train.kinds.base import (
    DrafterShape,
    Kind,
    TeacherForced,
    num_trained,
    refuse_settings,
)


class Eagle3Drafter(TeacherForced):
    """An EAGLE-3 drafter in training, see TrainedDrafter.

    model: its `lm_head` is not used until it is saved. head: [V, D] of the target.
    """

    model: Eagle3Model

    def __init__(
        self, model: Eagle3Model, layer_ids: tuple[int, ...], head: Tensor, block_size: int
    ) -> None:
        super().__init__(block_size)
        self.model, self.feature_layers, self._head = model, layer_ids, head
        model.lm_head.requires_grad_(False)

    def limit_vocabulary(self, token_ids: Sequence[int] | None) -> None:
        """See TrainedDrafter.limit_vocabulary: the rows of the head."""
        size = len(self._head)
        ids = list(range(size)) if token_ids is None else sorted(token_ids)
        model, weight = self.model, self.model.fc.weight
        model.draft_vocabulary = None if len(ids) == size else ids
        model.config = replace(model.config, draft_vocab_size=len(ids))
        rows = self._head.detach()[torch.tensor(ids, device=self._head.device)]
        model.lm_head = nn.Linear(rows.shape[1], len(ids), bias=False, device="meta")
        model.lm_head.weight = nn.Parameter(rows.to(weight), requires_grad=False)

    def guessable_ids(self) -> Tensor | None:
        """See TrainedDrafter.guessable_ids."""
        ids = self.model.draft_vocabulary
        return None if ids is None else torch.tensor(ids, device=self._head.device)

    def context(self, features: Tensor, batch: Batch, embed_weight: Tensor) -> list[Tensor]:
        """See TrainedDrafter.context: hidden states of the pairs [b, S, D], keys and values.

        The pair at a text's first token has no features, and is never seen.
        """
        model = self.model
        before = F.pad(model.fuse(features)[:, :-1], (0, 0, 1, 0))
        embeddings = model.embed(batch.token_ids, embed_weight)
        return [before, *model.keys_values(embeddings, before, batch.positions)]

    def slots(
        self, context: Sequence[Tensor], blocks: Blocks, anchors: Anchors, embed_weight: Tensor
    ) -> Tensor:
        """See TrainedDrafter.slots: normed, so that the logits have no weights of their own."""
        before, k, v = context
        places, device = anchors.positions, before.device
        num_context, num_anchors = int(places.max()), places.shape[1]
        chains = GrowingKV()
        chains.extend(0, k[:, :, :num_context], v[:, :, :num_context])
        at = torch.arange(num_context, device=device)
        seen = (at < places[..., None]) & (at > blocks.starts[..., None])
        own = torch.eye(num_anchors, dtype=torch.bool, device=device).expand(len(places), -1, -1)
        inputs, positions = (
            values.view(len(places), num_anchors, -1)
            for values in (blocks.token_ids, blocks.positions)
        )
        hidden = before.gather(1, places[..., None].expand(-1, -1, before.shape[2]))
        steps = []
        for step in range(self.num_slots):
            seen = torch.cat((seen, own), dim=2)
            embeddings = self.model.embed(inputs[:, :, step], embed_weight)
            hidden = self.model(embeddings, hidden, positions[:, :, step], chains, seen[:, None])
            steps.append(self.model.head_input(hidden))
        return torch.stack(steps, dim=2)


_OF_OTHERS = (
    *("mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank"),
    *("selector_top_k", "num_denoising_steps", "shard_drafter", "only_adapter"),
)


def _config(config: TrainConfig, target: PreTrainedModel) -> Eagle3Config:
    """Of the drafter to train, with the whole vocabulary until that is limited."""
    refuse_settings(config, "eagle3", _OF_OTHERS)
    if config.num_layers not in (None, 1):
        raise ConfigError(
            f"num_layers is {config.num_layers}, and an EAGLE-3 drafter has one; leave it out"
        )
    if config.init == "target":
        raise ConfigError(
            "init=target copies layers of the target, but EAGLE-3's layer reads inputs of twice "
            "their width; use init=random"
        )
    num_target_layers = len(decoder_layers(target))
    values = layer_values(target.config)
    if config.init_from is None:
        ids = default_layer_ids(num_target_layers)
        if config.num_features not in (None, NUM_FEATURES) or len(set(ids)) < NUM_FEATURES:
            ids = feature_layers(num_target_layers, config.num_features or NUM_FEATURES)
        return Eagle3Config(
            **values,
            draft_vocab_size=values["vocab_size"],
            target_hidden_size=values["hidden_size"],
            target_layer_ids=ids,
        )
    found = Eagle3Config.from_dict(read_config(config.init_from))
    for name in ("hidden_size", "vocab_size"):
        if getattr(found, name) != values[name]:
            raise ModelError(
                f"the drafter of init_from, {config.init_from}, has {name} {getattr(found, name)}, "
                f"and the target {values[name]}; use a drafter made for this target"
            )
    if config.num_features not in (None, found.num_features):
        raise ConfigError(
            f"num_features is {config.num_features}, and the drafter of init_from, "
            f"{config.init_from}, has {found.num_features}; leave one of the two out"
        )
    return replace(found, target_layer_ids=found.layers_of(num_target_layers))


def _shape(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example], num_processes: int
) -> DrafterShape:
    found = _config(config, target)
    with torch.device("meta"):
        model = Eagle3Model(found)
    model.lm_head.requires_grad_(False)
    assert found.target_layer_ids is not None
    return DrafterShape(
        num_layers=1,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        feature_layers=found.target_layer_ids,
        num_parameters=num_trained(model),
        facts=found.to_dict(),
    )


def _load(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> Eagle3Drafter:
    found = _config(config, target)
    assert found.target_layer_ids is not None
    dtype = resolve_dtype(config.dtype, config.device)
    head = target.get_output_embeddings().weight
    if config.init_from is None:
        torch.manual_seed(config.seed)
        model = Eagle3Model(found).to(device=config.device, dtype=dtype)
    else:
        model = Eagle3Model.from_pretrained(config.init_from, dtype, config.device)
        _check_shared_ends(model, head, config)
        model.config = found
    drafter = Eagle3Drafter(model, found.target_layer_ids, head, config.block_size)
    drafter.limit_vocabulary(None)
    return drafter


def _check_shared_ends(model: Eagle3Model, head: Tensor, config: TrainConfig) -> None:
    ids = model.draft_vocabulary
    rows = head if ids is None else head[torch.tensor(ids, device=head.device)]
    own = model.lm_head.weight
    if model.own_embedding is not None or not torch.equal(own, rows.to(own)):
        raise ModelError(
            f"init_from {config.init_from} has an embedding or a head of its own, and training "
            "uses the target's; start from a drafter that shares them"
        )


EAGLE3 = Kind(_shape, _load, has_target_weights=True)
