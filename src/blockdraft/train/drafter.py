"""The drafter that a run starts from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.models.draft.config import (
    AttentionKind,
    DFlash2Config,
    DraftConfig,
    default_target_layer_ids,
)
from blockdraft.models.draft.dflash import DraftLayer, DraftModel
from blockdraft.models.supported import decoder_layers, decoder_of, head_dim_of, layer_configs

_NORMS_OF_HEADS = {f"self_attn.{name}_norm.weight" for name in "qk"}
"""What a layer of a drafter always has; many targets have none."""

_CONVOLUTIONS = ("attention_conv.", "mlp_conv.")
"""What no target has: fresh ones change nothing."""


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
"""What the configs of different models call it."""


def train_only_adapter(model: DraftModel) -> None:
    """Let only the fusion of the features and the norms want a gradient.

    Raises:
        ConfigError: the drafter reads no features.
    """
    if model.config.reads_tokens:
        raise ConfigError(
            "only_adapter trains the fusion of features, and the drafter of init_from reads none; "
            "leave it out"
        )
    for name, parameter in model.named_parameters():
        is_norm = name.rpartition(".")[0].endswith("norm")
        parameter.requires_grad_(is_norm or name == "fc.weight")


def draft_config_for(
    target_config: Any,
    *,
    num_layers: int,
    block_size: int,
    num_features: int,
    mask_token_id: int,
    dflash2: DFlash2Config | None = None,
    num_denoising_steps: int = 1,
) -> DraftConfig:
    """A drafter of the target's own shape with fewer layers, all of full attention.

    Args:
        target_config: transformers' config of the target.
        num_layers: of the drafter.
        block_size: slots, anchor included.
        num_features: how many target layers it reads, see `feature_layers`; 0 for a drafter
            without features.
        mask_token_id: stands for a masked slot.
        dflash2: for a drafter of DFlash 2.
        num_denoising_steps: for one without features.

    Raises:
        ConfigError: the target has fewer layers than features.
        ModelError: the target lacks a size, or the values do not fit together.
    """
    values = layer_values(target_config)
    num_target_layers = target_config.get_text_config().num_hidden_layers
    full: AttentionKind = "full_attention"
    ids = feature_layers(num_target_layers, num_features) if num_features else ()
    return DraftConfig(
        **values,
        num_hidden_layers=num_layers,
        target_hidden_size=values["hidden_size"],
        target_layer_ids=ids,
        mask_token_id=mask_token_id,
        block_size=block_size,
        layer_types=(full,) * num_layers,
        num_target_layers=num_target_layers,
        dflash2=dflash2,
        num_denoising_steps=num_denoising_steps,
    )


def layer_values(target_config: Any) -> dict[str, Any]:
    """What the layers of a new drafter have of the target's first, by the names of its config.

    Raises:
        ModelError: the target lacks a size.
    """
    config = layer_configs(target_config.get_text_config())[0]
    missing = [name for name in _SIZES if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise ModelError(
            f"a drafter takes its shape from the target, and {type(config).__name__} has no single "
            f"{missing[0]}; choose another target"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim_of(config),
        "vocab_size": config.vocab_size,
        "rms_norm_eps": next((getattr(config, n) for n in _EPSILONS if hasattr(config, n)), 1e-6),
        # Only the base is taken over: the drafter's own rotation has nothing to stretch yet.
        "rope": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        "max_position_embeddings": config.max_position_embeddings,
    }


def feature_layers(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """The target's layers that a new drafter reads, rising.

    They follow the published formula, which leaves out the first and the last three layers; where
    too few are left, they are spread over all.

    Raises:
        ConfigError: there are fewer layers than features.
    """
    ids = default_target_layer_ids(num_target_layers, num_features)
    if list(ids) == sorted({i for i in ids if i >= 0}):
        return ids
    if num_features > num_target_layers:
        raise ConfigError(
            f"num_features is {num_features}, and the target has {num_target_layers} layers to "
            "read; give at most that many"
        )
    return tuple(i * (num_target_layers - 1) // (num_features - 1) for i in range(num_features))


def copy_target_layers(model: DraftModel, target: PreTrainedModel) -> None:
    """Begin from the target's last layers instead of random weights.

    Layer i of the drafter takes every weight that the target's layer has under the same name. The
    context enters as the last feature alone, through the identity, under the norm of the first
    copied layer. Where the target does not norm its queries and keys, the drafter's norms give
    them the size that they would have.

    Raises:
        ModelError: the target's layers are of another kind or size.
    """
    layers = check_copy(model, target)
    with torch.no_grad():
        for mine, theirs in zip(model.draft_layers(), layers, strict=True):
            _copy_layer(mine, theirs)
        model.fc.weight.zero_()
        model.fc.weight[:, -model.config.target_hidden_size :] = torch.eye(model.config.hidden_size)
        model.hidden_norm.weight.copy_(layers[0].get_parameter("input_layernorm.weight"))
        model.norm.weight.copy_(decoder_of(target).get_parameter("norm.weight"))


def check_copy(model: DraftModel, target: PreTrainedModel) -> nn.ModuleList:
    """The target's last layers, as many as the drafter has; both may be without weights.

    Raises:
        ModelError: they are fewer, or of another kind or size.
    """
    layers = decoder_layers(target)[-model.config.num_hidden_layers :]
    if len(layers) < model.config.num_hidden_layers:
        raise ModelError(
            f"the target has {len(layers)} layers and the drafter {model.config.num_hidden_layers};"
            " take fewer, or init=random"
        )
    for mine, theirs in zip(model.draft_layers(), layers, strict=True):
        _check_layer(mine, theirs)
    return layers


def _check_layer(mine: DraftLayer, theirs: nn.Module) -> None:
    weights, wanted = theirs.state_dict(), mine.state_dict()
    for name, value in wanted.items():
        found = weights.get(name)
        if found is None and (name in _NORMS_OF_HEADS or name.startswith(_CONVOLUTIONS)):
            continue
        if found is None or found.shape != value.shape:
            raise _other_kind(name, None if found is None else tuple(found.shape))
    if extra := sorted(set(weights) - set(wanted)):
        raise _other_kind(extra[0], tuple(weights[extra[0]].shape))


def _copy_layer(mine: DraftLayer, theirs: nn.Module) -> None:
    weights, wanted = theirs.state_dict(), mine.state_dict()
    for name in _NORMS_OF_HEADS - weights.keys():
        weights[name] = _size_of_heads(weights, name, len(wanted[name]))
    weights |= {name: own for name, own in wanted.items() if name.startswith(_CONVOLUTIONS)}
    rows = torch.randn(4, len(weights["input_layernorm.weight"]))
    plain = mine.input_layernorm
    mine.load_state_dict(weights)
    norm = theirs.get_submodule("input_layernorm")
    ours, expected = plain(rows), norm(rows.to(weights["input_layernorm.weight"])).to(rows)
    if not torch.allclose(ours, expected, rtol=2e-2, atol=2e-2):
        raise _other_kind("input_layernorm.weight", "another kind of norm")


def _size_of_heads(weights: Mapping[str, Tensor], name: str, head_dim: int) -> Tensor:
    """[head_dim], the root mean square of queries or keys of normed random inputs."""
    projection = weights[name.replace("_norm", "_proj")].float()
    scaled = projection * weights["input_layernorm.weight"].float()
    return scaled.square().sum(dim=1).view(-1, head_dim).mean(dim=0).sqrt()


def _other_kind(name: str, found: object) -> ModelError:
    what = "lack it" if found is None else f"have it as {found}"
    return ModelError(
        f"the drafter cannot start from the target's layers: they {what}, {name}; use init=random"
    )
