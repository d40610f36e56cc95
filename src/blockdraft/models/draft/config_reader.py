"""Reading a published drafter `config.json` into the fields of `DraftConfig`.

Every drafter key is looked up inside `dflash_config` first, then at the top level, because old and
new checkpoints put them in different places. A key that would change the computation and is not
implemented is refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from blockdraft.core.errors import ModelError
from blockdraft.models.draft.angelspec_layout import from_angelspec
from blockdraft.models.draft.config_values import Reader
from blockdraft.models.draft.speculators_layout import published_layout, zero_based

AttentionKind = Literal["full_attention", "sliding_attention"]

BlockKind = Literal["dflash", "dflash2", "diffusion", "dspark", "domino", "dfly", "dflare"]

ARCHITECTURE = "DFlashDraftModel"
ARCHITECTURE_TOKENS = "BlockDiffusionDraftModel"
"""Of this project: a DFlash drafter whose context is the tokens, not features of the target."""
BLOCK_ARCHITECTURES: Mapping[str, BlockKind] = {
    ARCHITECTURE: "dflash",
    "DFlash2DraftModel": "dflash2",
    ARCHITECTURE_TOKENS: "diffusion",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DominoDraftModel": "domino",
    # Of NVIDIA's Automodel, which adapts them for other engines.
    "Qwen3DFlashDraftModel": "dflash",
    "Qwen3DFlash2DraftModel": "dflash2",
    # AngelSpec's; that of DFlare has no name of its own there, see `projector_of`.
    "Qwen3DFlyModel": "dfly",
    "DFlyDraftModel": "dfly",
    "DFlareDraftModel": "dflare",
}
"""Kinds of drafters that fill blocks, by the architecture that a config names."""

PROJECTORS: tuple[BlockKind, ...] = ("dflash2", "dspark", "domino", "dfly", "dflare")
"""Kinds that a config may name by its `projector_type` or `model_arch` too."""

_ARCH_BY_DEFAULT = "dflash"
"""What AngelSpec's configs of any kind may have in `model_arch`."""

_DFLY_AT_FIRST = ("dspark", "dfly")
"""Architecture and `model_arch` of DFly in AngelSpec's first version."""

_LAYERS_OF_OTHERS = "eagle_aux_hidden_state_layer_ids"
"""Where some tools write the layers that are read, for other engines; the first is 1."""

DEFAULT_ROPE_THETA = 10000.0
"""Where a config names none, as in transformers."""

_NESTED_KEYS = frozenset(
    {
        "mask_token_id",
        "target_layer_ids",
        "block_size",
        "causal",
        "is_causal",
        "use_swa",
        "swa_window_size",
        "output_multiplier",
        "final_logit_softcapping",
        "input_embedding_scale",
        "num_target_layers",
        "target_hidden_size",
        # Advice to one engine on how much to draft; what a slot predicts does not depend on it.
        "runtime_block_size",
        "num_denoising_steps",
        "projector_type",
        "sample_from_anchor",
        "shift_label",
        # How it was trained, and whether heads share keys, which their numbers say.
        "num_anchors",
        "attention_mode",
    }
)

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""What a DFlash 2 drafter says beside the keys of DFlash."""

_DSPARK_KEYS = (
    *("markov_rank", "markov_head_type"),
    # Of the head that says how far to check, which nothing here asks.
    *("enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"),
    "confidence_head_alpha",
)

_OWN_KEYS: Mapping[BlockKind, tuple[str, tuple[str, ...]]] = {
    "dflash2": ("DFlash 2", DFLASH2_KEYS),
    "dspark": ("DSpark", _DSPARK_KEYS),
    "domino": ("Domino", ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")),
    "dfly": ("DFly", ("enable_hidden_correction", "hidden_correction_intermediate_size")),
}
"""Keys that only one method has, and what it is called."""

MarkovHeadType = Literal["vanilla", "gated", "rnn"]

UNSUPPORTED: dict[str, object] = {
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "draft_window_size": 0,
    # AngelSpec's, of which the other is a gate over normed features; and DFly's one correction.
    "fusion_type": "concat_fc",
    "hidden_correction_type": "swiglu",
    # Of its first version: corrections whose strength depends on the slot.
    "hidden_correction_pos_adaptive": False,
    "markov_pos_adaptive": False,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "mlp_bias": False,
    "quantization_config": {},
    "use_aux_hidden_state": True,
}
"""Keys that change the computation unless they have this value, and are not supported."""


@dataclass(frozen=True, kw_only=True)
class DFlash2Config:
    """What DFlash 2 adds to a drafter: convolutions inside the block, and a selector of paths.

    Attributes:
        conv_kernel_size: slots that a convolution reads, its own included.
        conv_group_size: channels that share the part of a kernel which depends on the input.
        selector_rank: of the score of a token behind another.
        selector_top_k: candidates of a slot, the most likely by its logits.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """What DSpark adds to a drafter: a Markov head.

    Attributes:
        markov_rank: of what the token before a slot adds to the slot's logits; 0 without the head.
        markov_head_type: what it depends on beside that token, see `models.draft.path_heads`.
    """

    markov_rank: int
    markov_head_type: MarkovHeadType = "vanilla"


@dataclass(frozen=True, kw_only=True)
class DominoConfig:
    """What Domino adds to a drafter: a recurrent unit over the drafted tokens.

    Attributes:
        emb_dim: rank of what it adds to the logits.
        gru_hidden_dim: size of its state.
        pure_draft_prefix_len: first drafted slots whose logits stay as they are.
    """

    emb_dim: int
    gru_hidden_dim: int
    pure_draft_prefix_len: int = 0


@dataclass(frozen=True, kw_only=True)
class DFlyConfig:
    """What DFly adds to a drafter: fusions of the features for each layer, and a correction.

    Attributes:
        hidden_correction_intermediate_size: inner width of what corrects hidden states by the token
            before them; 0 without it.
    """

    hidden_correction_intermediate_size: int


def default_target_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Target layers (0-based, their outputs) a drafter reads when its config names none.

    Spread evenly from layer 1 to the fourth from the end, rounded half to even; a single feature
    comes from the middle.
    """
    if num_features == 1:
        return (num_target_layers // 2,)
    stride = (num_target_layers - 4) / (num_features - 1)
    return tuple(round(1 + i * stride) for i in range(num_features))


def read_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `DraftConfig` from a `config.json`; what it does not say is left out.

    The layout is the published one, or that of the speculators library.

    Raises:
        ModelError: it describes another kind of drafter, lacks a key, or has one that would change
            the computation and is not supported.
    """
    raw = from_angelspec(published_layout(raw))
    _refuse_unsupported(raw)
    reader = Reader(raw)
    num_layers = reader.integer("num_hidden_layers")
    num_target_layers = reader.optional_integer("num_target_layers")
    layer_types, sliding_window, causal = _read_attention(reader, num_layers)
    kind = _kind_of(raw)
    fields = {
        **read_shape(reader, raw),
        "num_hidden_layers": num_layers,
        "target_layer_ids": ()
        if kind == "diffusion"
        else _read_layer_ids(reader, num_target_layers, num_layers),
        "mask_token_id": reader.integer("mask_token_id"),
        "block_size": reader.integer("block_size"),
        "layer_types": layer_types,
        "num_target_layers": num_target_layers,
        "attention_bias": reader.optional_boolean("attention_bias"),
        "sliding_window": sliding_window,
        "causal": causal,
        "output_multiplier": reader.optional_number("output_multiplier"),
        "final_logit_softcapping": reader.optional_number("final_logit_softcapping"),
        "input_embedding_scale": reader.optional_number("input_embedding_scale"),
        "drafts_from_anchor": _read_anchor(reader, default=kind == "dspark"),
        "dflash2": _read_dflash2(reader) if kind == "dflash2" else None,
        "dspark": _read_dspark(reader) if kind == "dspark" else None,
        "domino": _read_domino(reader) if kind == "domino" else None,
        "dfly": _read_dfly(reader) if kind == "dfly" else None,
        "dflare": kind == "dflare",
        "num_denoising_steps": reader.optional_integer("num_denoising_steps"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def read_shape(reader: Reader, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the layers of any drafter; None for what the config may leave out, and does."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.integer("num_key_value_heads", num_heads),
        "head_dim": reader.integer("head_dim", hidden_size // max(num_heads, 1)),
        "vocab_size": reader.integer("vocab_size"),
        "target_hidden_size": reader.integer("target_hidden_size", hidden_size),
        "hidden_act": reader.optional_string("hidden_act"),
        "rms_norm_eps": reader.optional_number("rms_norm_eps"),
        "rope": read_rope(raw),
        "max_position_embeddings": reader.optional_integer("max_position_embeddings"),
    }


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Say what a checkpoint is when it is not a drafter that this project computes in full."""
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelError(f"dflash_config is {nested!r} in the drafter's config; give an object")
    kind = _kind_of(raw)
    for place in (nested, raw):
        for owner, (method, keys) in _OWN_KEYS.items():
            for key in keys:
                if place.get(key) and owner != kind:
                    raise ModelError(
                        f"the drafter's config.json has {key} = {place[key]!r}, which belongs to "
                        f"{method}, and architectures = {_architectures(raw)}; name "
                        f"{architecture_of(owner)} there if it is one, or remove the key"
                    )
        for key, neutral in UNSUPPORTED.items():
            if place.get(key) not in (None, neutral):
                raise _unsupported(f"{key} = {place[key]!r}", "a variant with other mathematics")
    if (mode := nested.get("attention_mode")) not in (None, "gqa", "mha"):
        raise _unsupported(f"attention_mode = {mode!r}", "a variant with other mathematics")
    known = _NESTED_KEYS.union(UNSUPPORTED, *(keys for _, keys in _OWN_KEYS.values()))
    if unknown := sorted(set(nested) - known):
        raise ModelError(
            f"unknown keys in dflash_config: {', '.join(unknown)}; they may change what the "
            f"drafter computes, so it is not run; remove them if they do not"
        )


def _kind_of(raw: Mapping[str, Any]) -> BlockKind:
    """The kind that architecture and projector say; some name DFlash, and their projector."""
    architectures = _architectures(raw)
    known = [name for name in architectures if name in BLOCK_ARCHITECTURES]
    if not known:
        raise _unsupported(f"architectures = {architectures}", "another model")
    named, projector = BLOCK_ARCHITECTURES[known[0]], projector_of(raw)
    if projector not in (None, "dflash", *PROJECTORS):
        raise _unsupported(f"{_projector_key(raw)} = {projector!r}", "a drafter of another method")
    if projector in (None, named) or (projector == "dflash" and named in ("dflash2", "diffusion")):
        return named
    if not may_be_named_by_projector(named, projector):
        raise ModelError(
            f"the drafter's config.json has architectures = {architectures} and "
            f"{_projector_key(raw)} = {projector!r}; make it say one or the other"
        )
    return next(kind for kind in PROJECTORS if kind == projector)


def may_be_named_by_projector(named: str, projector: object) -> bool:
    """Whether a config whose architecture names this kind may be of the kind that projector says.

    Most successors of DFlash have published under its name, and DFly first under DSpark's.
    """
    return projector in PROJECTORS and (named == "dflash" or (named, projector) == _DFLY_AT_FIRST)


def projector_of(raw: Mapping[str, Any]) -> object:
    """The method that a config in the published layout names beside its architecture, if any.

    AngelSpec's configs do so in `model_arch`; those of all its kinds may have its default.
    """
    for place in (raw.get("dflash_config"), raw):
        if isinstance(place, Mapping) and place.get("projector_type") is not None:
            return place["projector_type"]
    arch = raw.get("model_arch")
    return None if arch == _ARCH_BY_DEFAULT else arch


def _projector_key(raw: Mapping[str, Any]) -> str:
    """Where `projector_of` found it."""
    places = (raw.get("dflash_config"), raw)
    named = any(
        isinstance(own, Mapping) and own.get("projector_type") is not None for own in places
    )
    return "projector_type" if named else "model_arch"


def architecture_of(kind: BlockKind) -> str:
    """The name that the published layout has for it."""
    return next(name for name, own in BLOCK_ARCHITECTURES.items() if own == kind)


def _read_anchor(reader: Reader, *, default: bool) -> bool:
    """Whether the anchor's slot predicts the token behind it; methods spell it in two ways."""
    told = {
        name: value
        for name in ("sample_from_anchor", "shift_label")
        if (value := reader.optional_boolean(name)) is not None
    }
    if len(set(told.values())) > 1:
        raise ModelError(
            f"the drafter's config.json has {' and '.join(f'{n} = {v}' for n, v in told.items())}; "
            "both say whether the anchor's slot predicts a token, so make them equal"
        )
    return next(iter(told.values()), default)


def _read_dflash2(reader: Reader) -> DFlash2Config:
    return DFlash2Config(**{name: reader.integer(name) for name in DFLASH2_KEYS})


def _read_dspark(reader: Reader) -> DSparkConfig:
    rank = reader.integer("markov_rank")
    name = (reader.optional_string("markov_head_type") or "vanilla").lower()
    for known in get_args(MarkovHeadType):
        if name == known:
            return DSparkConfig(markov_rank=rank, markov_head_type=known)
    raise ModelError(
        f"markov_head_type is {name!r} in the drafter's config.json; known are "
        f"{', '.join(get_args(MarkovHeadType))}"
    )


def _read_domino(reader: Reader) -> DominoConfig:
    return DominoConfig(
        emb_dim=reader.integer("emb_dim"),
        gru_hidden_dim=reader.integer("gru_hidden_dim"),
        pure_draft_prefix_len=reader.integer("pure_draft_prefix_len", 0),
    )


def _read_dfly(reader: Reader) -> DFlyConfig:
    size = reader.optional_integer("hidden_correction_intermediate_size")
    if reader.optional_boolean("enable_hidden_correction") is False:
        size = 0
    elif not size:
        size = reader.integer("hidden_size")
    return DFlyConfig(hidden_correction_intermediate_size=size)


def _unsupported(setting: str, what: str) -> ModelError:
    return ModelError(
        f"the drafter's config.json has {setting}: it is {what}, which is not supported yet; use "
        f"a checkpoint of one of {', '.join(BLOCK_ARCHITECTURES)}"
    )


def architectures_of(raw: Mapping[str, Any]) -> list[str]:
    """Those that a `config.json` names, which may be none.

    Raises:
        ModelError: it names them in another form than a list.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"architectures is {names!r} in the drafter's config.json; give a list of names"
        )
    return names


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    return architectures_of(raw) or [ARCHITECTURE]


def _read_layer_ids(
    reader: Reader, num_target_layers: int | None, num_layers: int
) -> tuple[int, ...]:
    """The named layer ids, or the default ones: as many as the drafter has layers."""
    ids = reader.get("target_layer_ids")
    if ids is None and (others := reader.get(_LAYERS_OF_OTHERS)) is not None:
        ids = zero_based(others, _LAYERS_OF_OTHERS)
    if ids is None:
        if num_target_layers is None:
            raise ModelError(
                "the drafter's config.json has neither target_layer_ids nor num_target_layers; "
                "add one of them"
            )
        return default_target_layer_ids(num_target_layers, num_layers)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(f"target_layer_ids is {ids!r}; give a list of 0-based layer numbers")
    if not ids:
        raise ModelError(
            f"target_layer_ids is empty; a drafter reads at least one target layer, unless its "
            f"architecture is {ARCHITECTURE_TOKENS}"
        )
    return tuple(ids)


def _read_attention(
    reader: Reader, num_layers: int
) -> tuple[tuple[AttentionKind, ...], int | None, bool | None]:
    """Kind of each layer, the window of the sliding ones, and the explicit causality if any."""
    causal = reader.optional_boolean("causal")
    causal = reader.optional_boolean("is_causal") if causal is None else causal
    sliding: AttentionKind = "sliding_attention"
    if reader.optional_boolean("use_swa"):
        # Drafters with this key slide in every layer and, unless they say so, are not causal.
        return (sliding,) * num_layers, reader.integer("swa_window_size"), bool(causal)
    window = reader.optional_integer("sliding_window")
    use_sliding = reader.optional_boolean("use_sliding_window")
    kinds = reader.get("layer_types")
    if kinds is None:
        first = reader.integer("max_window_layers", 28) if use_sliding and window else num_layers
        kinds = ["full_attention" if i < first else sliding for i in range(num_layers)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"layer_types is {kinds!r}; give a list with one kind a layer")
    if sliding not in kinds:
        return tuple(kinds), None, causal
    if use_sliding is False:
        raise ModelError(
            "layer_types has sliding_attention, but use_sliding_window is false; make the "
            "drafter's config.json say one or the other"
        )
    return tuple(kinds), window, causal


def read_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dict from the three places in which checkpoints keep RoPE's parameters.

    Theta: the scaling dict wins over the top level, as in transformers.
    """
    scaling = raw.get("rope_scaling") or {}
    parameters = raw.get("rope_parameters") or {}
    for place in (scaling, parameters):
        if not isinstance(place, Mapping) or any(isinstance(v, Mapping) for v in place.values()):
            raise ModelError(
                f"RoPE parameters {place!r} are not one flat object; one set for all layers of a "
                f"drafter is supported"
            )
    rope = dict(scaling or parameters)
    rope["rope_type"] = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"  # of text: the three positions of a token are equal
    theta = (scaling.get("rope_theta"), parameters.get("rope_theta"), raw.get("rope_theta"))
    rope["rope_theta"] = next((value for value in theta if value is not None), DEFAULT_ROPE_THETA)
    rope.pop("partial_rotary_factor", None)
    for place in (scaling, parameters, raw):
        if (partial := place.get("partial_rotary_factor")) not in (None, 1.0):
            raise ModelError(
                f"partial_rotary_factor is {partial!r}; only drafters that rotate whole heads "
                f"(1.0) are supported"
            )
    return rope
