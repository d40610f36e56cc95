"""What a transformers model must have to be a target. Reads the model, changes nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from blockdraft.core.errors import ModelError
from blockdraft.kernels.heads import stored_size

GENERATE = "decode this one with transformers' generate"
"""The remedy for a causal LM that runs, but not so that it could draft."""
CACHES = ("cache", "past_key_values", "cache_params")
"""How models and layers call the cache; from transformers 5.24 on all say `cache`."""
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""What the forward of a model raises that needs something else than it is given."""
MIN_CONTEXT = 16
"""Tokens that the test of a target at load runs in several ways, see `target.exact`."""


def check_supported(model: PreTrainedModel, layer_ids: tuple[int, ...], *, exact: bool) -> None:
    """Refuse a model that cannot be a target.

    Raises:
        ModelError: no list of decoder layers, no output head, tokens that see later ones, or keys
            that a forward's length decides, a layer id or the context out of range, or, with
            `exact`, rotations that depend on the length of the sequence in a way of their own.
    """
    name = type(model).__name__
    num_layers = len(decoder_layers(model))
    if model.get_output_embeddings() is None:
        raise ModelError(f"{name} is not supported: it has no output head; use a causal LM")
    if (setting := _looks_ahead(model.config.get_text_config())) is not None:
        raise ModelError(
            f"{name} has {setting} in its config, so tokens see later ones, and it cannot continue "
            "a text; use a causal LM"
        )
    if getattr(model.config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ModelError(
            f"{name} has recurrent_kv_cache_mode = 'last_loop' in its config, so the keys that a "
            f"token sees depend on how the text was cut into forward passes; {GENERATE}, or give a "
            "model with 'per_loop'"
        )
    wrong = [index for index in layer_ids if not 0 <= index < num_layers]
    if wrong:
        raise ModelError(
            f"target layer ids {wrong} do not exist in {name} with {num_layers} "
            f"layers (0 to {num_layers - 1}); the drafter was made for another target"
        )
    if (context := context_of(model)) < MIN_CONTEXT:
        raise ModelError(
            f"max_position_embeddings is {context} in the config of {name}; a target needs "
            f"{MIN_CONTEXT} positions at least, so correct it"
        )
    varying = varying_rope_type(model)
    if exact and varying is not None:
        raise ModelError(
            f"{name} rotates positions by rope_type {varying!r}, which depends on the length of "
            "the sequence, so drafted output may differ from plain; use --exact off"
        )


def quantization_of(config: PretrainedConfig) -> dict[str, Any]:
    """What a config says of weights that another package quantized; empty if they are whole.

    Some models for text and images say it of their part for text.
    """
    for place in (config, config.get_text_config()):
        if found := getattr(place, "quantization_config", None):
            return dict(found if isinstance(found, Mapping) else found.to_dict())
    return {}


def quantized_by(config: PretrainedConfig) -> str | None:
    """The method by which another package quantized the weights; None if they are whole."""
    found = quantization_of(config)
    return str(found.get("quant_method", "unknown method")) if found else None


def _looks_ahead(config: PretrainedConfig) -> str | None:
    """The setting by which transformers makes no causal mask."""
    for name, values in {
        "is_causal": (False,),
        "use_bidirectional_attention": (True, "all"),
    }.items():
        if (value := getattr(config, name, None)) in values:
            return f"{name} = {value!r}"
    return None


def context_of(model: PreTrainedModel) -> int:
    """The most tokens that a text may have; no limit if the config names none."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", 2**31)


def layer_configs(config: Any) -> list[Any]:
    """Of a language model: the config of each layer. In some, heads differ (Gemma 4, Step 3.7)."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def head_dim_of(config: Any) -> int:
    """Of the config of a layer: the size of a head, which many leave to their other sizes."""
    head_dim: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return head_dim


def head_dims_of(config: Any) -> list[int]:
    """Stored sizes of the heads that attend; none in a model that does not attend."""
    attending = [own for own in layer_configs(config) if getattr(own, "num_attention_heads", None)]
    return sorted({stored_size(head_dim_of(own)) for own in attending})


def kv_heads_of(config: Any) -> int:
    """Of the config of a layer: heads of keys and values, as many as all where it names none."""
    kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return kv_heads


def is_quantized(model: PreTrainedModel) -> bool:
    """True if another package holds the weights, packed, and multiplies with them."""
    return getattr(model.config, "quantization_config", None) is not None


def varying_rope_type(model: PreTrainedModel) -> str | None:
    """A rotation that changes with the last position of a forward, and so with its company.

    Not transformers' own: its longrope is chosen by request (`request_rotation`), and its dynamic
    one changes beyond the model's context only, which no request may reach.
    """
    config = model.config.get_text_config()
    known = {"longrope"} if longrope_modules(model) else set()
    # The second is Hunyuan's, which a number in its config stretches once and for all.
    modules = _rotary_modules(model, "dynamic") + _rotary_modules(model, "ntk_alpha")
    context = context_of(model)
    if any(module.max_seq_len_cached >= context for module in modules):
        known.add("dynamic")
    return next((kind for kind in rope_types(config) if varies(kind) and kind not in known), None)


def varies(rope_type: str) -> bool:
    """Whether such a rotation turns a position by what else there is."""
    return "dynamic" in rope_type or rope_type == "longrope"


def longrope_modules(model: PreTrainedModel) -> list[Any]:
    """The rotary embeddings of transformers' own form that turn by short or by long factors.

    Not those that also stretch by the length of a forward (Phi-3.5-MoE, but not as published).
    """
    return [m for m in _rotary_modules(model, "longrope") if not _stretches(m)]


def _stretches(module: Any) -> bool:
    rope = module.config.rope_parameters
    return hasattr(module, "rope_init_fn") and rope.get("short_mscale") != rope.get("long_mscale")


def _rotary_modules(model: PreTrainedModel, rope_type: str) -> list[Any]:
    """Of one type in all layers; where layer types differ, it is a dictionary."""
    return [
        module
        for module in model.modules()
        if getattr(module, "rope_type", None) == rope_type
        and hasattr(module, "original_inv_freq")
        and hasattr(module, "max_seq_len_cached")
    ]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """What makes hidden states of tokens, without the output head."""
    decoder: nn.Module = model.get_decoder()
    # Llama 4's own method returns the whole model.
    return model.get_submodule("model") if decoder is model else decoder


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers whose outputs are features.

    Raises:
        ModelError: the model keeps no list of them.
    """
    decoder = decoder_of(model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        # Older models call them otherwise: `h` in GPT-2.
        num_layers = model.config.get_text_config().num_hidden_layers
        lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
        layers = next((child for child in lists if len(child) == num_layers), None)
    if layers is None:
        raise ModelError(
            f"{type(model).__name__} is not supported: it keeps no list of decoder layers, so its "
            "hidden states cannot be read; use a model whose decoder has `layers`"
        )
    return layers


def layer_output(layer: nn.Module, returned: Any) -> Tensor:
    """The features [b, rows, D] of what a decoder layer returned, which may be more than that.

    Raises:
        ModelError: it returned several streams, of which none is the hidden state.
    """
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    if output.ndim != 3:
        raise ModelError(
            f"{type(layer).__name__} returns several streams {list(output.shape)}, so no drafter "
            "can read its hidden state; use a drafter without features of the target, or none"
        )
    return output


def rope_types(config: PretrainedConfig) -> Iterator[str]:
    """Of the model, and of each layer type where these differ."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        for part in (rope, *rope.values()):
            if isinstance(part, Mapping):
                yield str(part.get("rope_type") or part.get("type") or "default")
