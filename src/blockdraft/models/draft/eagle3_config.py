"""The shape of an EAGLE-3 drafter (arXiv 2503.01840), and reading it from a published config.

Two layouts are read: that of the method's authors, in which SpecForge and others publish too, and
that of the `speculators` library. They count the target's layers in two ways.
`eagle_aux_hidden_state_layer_ids` at the top level names the state behind a layer by the number of
layers before it, so 1 is the first layer's output (speculators, vLLM); inside `eagle_config` the
layers are counted from 0, so 0 is the first layer's output (SpecForge, SGLang).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blockdraft.core.errors import ModelError
from blockdraft.models.draft.config import DraftConfig, check_heads, check_positive, check_rope
from blockdraft.models.draft.config_reader import UNSUPPORTED, read_shape
from blockdraft.models.draft.config_values import Reader
from blockdraft.models.draft.speculators_layout import MARK, with_defaults, zero_based

ARCHITECTURE_EAGLE3 = "LlamaForCausalLMEagle3"

NUM_FEATURES = 3
"""A low, a middle and a high layer of the target."""

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

_NEUTRAL: Mapping[str, object] = {
    **UNSUPPORTED,
    "attention_bias": False,
    "qkv_bias": False,
    "use_sliding_window": False,
    "parallel_drafting": False,
    "num_hidden_layers": 1,
    "is_causal": True,
    "use_moe": False,
    # Attention of DeepSeek's kind.
    "kv_lora_rank": 0,
    # Of NVIDIA's ModelOpt.
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""Keys that change the computation unless they have this value, and are not supported."""

_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
"""Of EAGLE-3.1. NVIDIA's configs have the first in `eagle_config`, others have all at the top."""

_NESTED_KEYS = frozenset({_LAYER_IDS, "parallel_draft_heads_num_layers", *_NORMS, *_NEUTRAL})
"""Of heads for tokens further on there are none, with a `parallel_draft_step` of 1."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Everything that decides what an EAGLE-3 drafter computes.

    Attributes that need a word:
        vocab_size: of the target. draft_vocab_size: tokens that the drafter's head knows.
        target_hidden_size: width of one target feature; `fc` reads `num_features` of them.
        target_layer_ids: 0-based target layers whose *outputs* are the features, in order; None
            if the config names none, see `layers_of`.
        norm_before_residual: the residual is the normed hidden state instead of the raw one.
        head_norms: queries and keys are normed head by head, as in Qwen3.
        norm_before_fc: the features of a token are normed together, as one vector, before `fc`.
        fc_norm: each feature has a norm of its own before `fc`. At most one of the two.
        norm_output: what enters the next step is the normed output instead of the raw one.

    Raises:
        ModelError: a value is out of range or two contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...] | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 32768
    norm_before_residual: bool = False
    head_norms: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "draft_vocab_size", "target_hidden_size"),
            *("max_position_embeddings", "rms_norm_eps"),
        ):
            check_positive(name, getattr(self, name))
        check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        if self.draft_vocab_size > self.vocab_size:
            raise ModelError(
                f"draft_vocab_size {self.draft_vocab_size} is more than vocab_size "
                f"{self.vocab_size} in the drafter's config; correct one of them"
            )
        if self.target_layer_ids is not None and (
            not self.target_layer_ids or min(self.target_layer_ids) < 0
        ):
            raise ModelError(
                f"{_LAYER_IDS} names the layers {list(self.target_layer_ids)}, counted from 0, in "
                "the drafter's config; name at least one, and none before the first"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ModelError(
                "norm_before_fc and fc_norm are both true in the drafter's config, and each is a "
                "norm of what enters fc; correct one of them"
            )
        check_rope(self.rope)

    @property
    def num_hidden_layers(self) -> int:
        """One decoder layer."""
        return 1

    @property
    def num_features(self) -> int:
        """How many target layers are fused."""
        return NUM_FEATURES if self.target_layer_ids is None else len(self.target_layer_ids)

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The 0-based layers, whose outputs are the features, of a target of so many."""
        if self.target_layer_ids is not None:
            return self.target_layer_ids
        return default_layer_ids(num_target_layers)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Eagle3Config":
        """Read a published `config.json`.

        Raises:
            ModelError: it describes another kind of drafter, lacks a key, has a key that would
                change the computation and is not supported, or a value out of range.
        """
        return cls(**_fields(_one_layout(raw)))

    def to_dict(self) -> dict[str, Any]:
        """The authors' layout of `config.json`; `from_dict` reads it back to an equal config."""
        raw: dict[str, Any] = {
            "architectures": [ARCHITECTURE_EAGLE3],
            "model_type": "qwen3" if self.head_norms else "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "attention_bias": False,
        }
        for name in (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "draft_vocab_size"),
            *("max_position_embeddings", "norm_before_residual", "target_hidden_size"),
        ):
            raw[name] = getattr(self, name)
        nested: dict[str, Any] = {}
        for name in _NORMS:
            if getattr(self, name):
                # Engines look for one of them here, and for the others at the top.
                raw[name] = nested[name] = True
        raw["rope_theta"] = self.rope["rope_theta"]
        if self.rope["rope_type"] != "default":
            raw["rope_scaling"] = dict(self.rope)
        if self.target_layer_ids is not None:
            nested[_LAYER_IDS] = list(self.target_layer_ids)
            nested["use_aux_hidden_state"] = True
            raw[_LAYER_IDS] = [i + 1 for i in self.target_layer_ids]
        if nested:
            raw["eagle_config"] = nested
        return raw


AnyDraftConfig = DraftConfig | Eagle3Config
"""What the parts that drafters share are made of."""


def default_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """0-based, what the method's authors fuse: the states that enter layers 2, n // 2 and n - 3."""
    last = num_target_layers - 1
    behind = (2, num_target_layers // 2, num_target_layers - 3)
    return tuple(min(max(i - 1, 0), last) for i in behind)


def _one_layout(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The authors' layout of what may be in that of the speculators library."""
    kind = raw.get(MARK)
    if kind is None:
        return raw
    layers = raw.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layers, Mapping):
        raise ModelError(
            f"the drafter's config.json has {MARK} = {kind!r} and transformer_layer_config = "
            f"{layers!r}; an EAGLE-3 drafter has 'eagle3' and an object there: copy the checkpoint "
            "again"
        )
    own = {name: value for name, value in raw.items() if value is not None}
    del own["transformer_layer_config"], own[MARK]
    of_layers = with_defaults({"model_type": "llama", **layers})
    return {"draft_vocab_size": 32000} | of_layers | own


def _fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `Eagle3Config`; what the config does not say is left out."""
    _refuse_unsupported(raw)
    reader = Reader(raw, "eagle_config")
    shape = read_shape(reader, raw)
    fields = {
        **shape,
        "draft_vocab_size": reader.integer("draft_vocab_size", shape["vocab_size"]),
        "target_layer_ids": _layer_ids(raw),
        "norm_before_residual": reader.optional_boolean("norm_before_residual"),
        "head_norms": raw.get("model_type") == "qwen3",
        **{name: reader.optional_boolean(name) for name in _NORMS},
    }
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelError(f"eagle_config is {nested!r} in the drafter's config.json; give an object")
    for place in (nested, raw):
        for key, neutral in _NEUTRAL.items():
            if place.get(key) not in (None, neutral):
                raise ModelError(
                    f"the drafter's config.json has {key} = {place[key]!r}: it is a variant of "
                    "EAGLE-3 that is not supported yet; use one with a single plain decoder layer"
                )
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ModelError(
            f"the drafter's config.json has layer_types = {kinds!r}: windows are not "
            "supported in EAGLE-3 drafters yet; use one with full attention"
        )
    if unknown := sorted(set(nested) - _NESTED_KEYS):
        raise ModelError(
            f"unknown keys in eagle_config: {', '.join(unknown)}; they may change what the drafter "
            "computes, so it is not run; remove them if they do not"
        )


def _layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose outputs are read, from 0; the two places in which they stand must agree."""
    # ModelOpt writes an empty list for the authors' choice.
    nested, top = (raw.get("eagle_config") or {}).get(_LAYER_IDS) or None, raw.get(_LAYER_IDS)
    found = None if top is None else zero_based(top, _LAYER_IDS)
    if nested is None:
        return None if found is None else tuple(found)
    if not isinstance(nested, list) or not all(type(i) is int for i in nested):
        raise ModelError(
            f"{_LAYER_IDS} is {nested!r} in eagle_config; give a list of the target's layers, the "
            "first being 0"
        )
    if found not in (None, nested):
        raise ModelError(
            f"{_LAYER_IDS} is {top} in the drafter's config.json, where the first layer is 1, and "
            f"{nested} in eagle_config, where it is 0; these are different layers, remove one"
        )
    return tuple(nested)
