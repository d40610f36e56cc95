"""The shape of a drafter that fills blocks: DFlash and its successors, and rules it keeps."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from blockdraft.core.errors import ModelError
from blockdraft.models.attention.visibility import Visibility
from blockdraft.models.draft.config_reader import (
    AttentionKind,
    BlockKind,
    DFlash2Config,
    DFlyConfig,
    DominoConfig,
    DSparkConfig,
    architecture_of,
    default_target_layer_ids,
    read_fields,
)

__all__ = [
    "AttentionKind",
    "BlockKind",
    "DFlash2Config",
    "DFlyConfig",
    "DSparkConfig",
    "DominoConfig",
    "DraftConfig",
    "default_target_layer_ids",
]

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""The supported kinds of RoPE and the keys each needs. Kinds whose frequencies depend on the
length of the sequence are absent: keys that are already in the context could not follow."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Everything that decides what a DFlash drafter computes.

    Attributes that need a word:
        rope: `rope_type` and `rope_theta`, and whatever that type needs (transformers' names).
        num_target_layers: layers of the target it was made for; None when the checkpoint does
            not say.
        target_hidden_size: width of one target feature.
        target_layer_ids: 0-based target layers whose *outputs* are the features, in order; empty
            for a drafter without features, whose context is the tokens' own embeddings.
        block_size: slots of a block with the anchor, as trained.
        sliding_window: keys a sliding layer sees, its own slot included; None without such layers.
        causal: whether slots see only earlier slots of their block; None means that sliding
            layers do and full layers do not.
        drafts_from_anchor: whether the anchor's slot predicts the token behind it, and each slot
            the one behind its own; else a masked slot predicts the token at its own position.
        dflash2, dspark, domino, dfly: what these methods add; None for others.
        dflare: whether it is a DFlare drafter, see `models.draft.dflash`.
        num_denoising_steps: forwards that fill a block, see `models.draft.denoising`; more than one
            only without features.

    Raises:
        ModelError: a value is out of range or two contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    layer_types: tuple[AttentionKind, ...]
    num_target_layers: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    sliding_window: int | None = None
    causal: bool | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    drafts_from_anchor: bool = False
    dflash2: DFlash2Config | None = None
    dspark: DSparkConfig | None = None
    domino: DominoConfig | None = None
    dfly: DFlyConfig | None = None
    dflare: bool = False
    num_denoising_steps: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_pairing(self)
        _check_attention(self)
        check_rope(self.rope)
        if self.dflash2 is not None:
            _check_dflash2(self, self.dflash2)
        if self.dspark is not None:
            _check_dspark(self, self.dspark)
        if self.domino is not None:
            _check_domino(self, self.domino)
        if self.fuses_by_layer:
            _check_fusion(self)

    @property
    def kind(self) -> BlockKind:
        """What it is called in the table of kinds."""
        if self.reads_tokens:
            return "diffusion"
        added: Mapping[BlockKind, object] = {
            "dflash2": self.dflash2,
            "dspark": self.dspark,
            "domino": self.domino,
            "dfly": self.dfly,
            "dflare": self.dflare or None,
        }
        return next((kind for kind, own in added.items() if own is not None), "dflash")

    @property
    def fuses_by_layer(self) -> bool:
        """Whether each layer has a context of its own, another fusion of the features."""
        return self.dflare or self.dfly is not None

    @property
    def first_slot(self) -> int:
        """The slot of a block that predicts the first token behind the anchor."""
        return 0 if self.drafts_from_anchor else 1

    @property
    def num_drafted(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first_slot

    @property
    def num_features(self) -> int:
        """How many target layers are concatenated into one context feature."""
        return len(self.target_layer_ids)

    @property
    def reads_tokens(self) -> bool:
        """Whether the context is the tokens themselves, and not features of the target."""
        return not self.target_layer_ids

    @property
    def context_width(self) -> int:
        """Numbers of a context token that `fc` reads."""
        return self.num_features * self.target_hidden_size or self.hidden_size

    def is_causal(self, kind: AttentionKind) -> bool:
        """Whether a slot in a layer of this kind sees only itself and earlier slots."""
        return kind == "sliding_attention" if self.causal is None else self.causal

    def visibility(self, kind: AttentionKind) -> Visibility:
        """Whom a slot in a layer of this kind sees, of its context and its block."""
        window = self.sliding_window if kind == "sliding_attention" else None
        return Visibility(self.is_causal(kind), window)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DraftConfig":
        """Read a published `config.json`.

        Raises:
            ModelError: it describes another kind of drafter, lacks a key, has a key that would
                change the computation and is not supported, or a value out of range.
        """
        return cls(**read_fields(raw))

    def to_dict(self) -> dict[str, Any]:
        """The published layout of `config.json`; `from_dict` reads it back to an equal config.

        `block_size` stands in both places in which readers look for it.
        """
        raw: dict[str, Any] = {
            "architectures": [architecture_of(self.kind)],
            "model_type": "qwen3",
        }
        for name in (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size"),
            *("max_position_embeddings", "attention_bias", "block_size"),
        ):
            raw[name] = getattr(self, name)
        raw["rope_theta"] = self.rope["rope_theta"]
        if self.rope["rope_type"] != "default":
            raw["rope_scaling"] = dict(self.rope)
        raw["tie_word_embeddings"] = False
        if self.num_target_layers is not None:
            raw["num_target_layers"] = self.num_target_layers
        if self.target_hidden_size != self.hidden_size:
            raw["target_hidden_size"] = self.target_hidden_size
        raw["layer_types"] = list(self.layer_types)
        raw["use_sliding_window"] = self.sliding_window is not None
        raw["sliding_window"] = self.sliding_window
        if self.causal is not None:
            raw["is_causal"] = self.causal
        raw["dflash_config"] = self._drafter_keys()
        return raw

    def _drafter_keys(self) -> dict[str, Any]:
        """What stands in `dflash_config`."""
        drafter: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
        }
        for name in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
            if getattr(self, name) != getattr(type(self), name):
                drafter[name] = getattr(self, name)
        if self.reads_tokens:
            drafter["num_denoising_steps"] = self.num_denoising_steps
        for added in (self.dflash2, self.dspark, self.domino):
            if added is not None:
                drafter |= asdict(added)
        if self.kind in ("dspark", "domino"):
            drafter["projector_type"] = self.kind
        if self.dfly is not None:
            size = self.dfly.hidden_correction_intermediate_size
            drafter |= {"enable_hidden_correction": size > 0}
            drafter |= {"hidden_correction_intermediate_size": size or None}
        if self.drafts_from_anchor or self.kind == "dspark":
            key = "shift_label" if self.kind == "domino" else "sample_from_anchor"
            drafter[key] = self.drafts_from_anchor
        return drafter


def _check_sizes(config: DraftConfig) -> None:
    """Raise ModelError unless sizes and factors are positive and the heads divide."""
    for name in (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "target_hidden_size"),
        *("max_position_embeddings", "num_target_layers", "rms_norm_eps"),
        *("final_logit_softcapping", "sliding_window", "output_multiplier"),
        "input_embedding_scale",
    ):
        check_positive(name, getattr(config, name))
    check_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    if config.block_size < 2:
        raise ModelError(
            f"block_size is {config.block_size}; a block needs the anchor and at least one slot "
            f"to draft, so at least 2"
        )
    if config.block_size > config.max_position_embeddings:
        raise ModelError(
            f"block_size is {config.block_size} in the drafter's config, which is more than its "
            f"{config.max_position_embeddings} positions (max_position_embeddings); correct one of "
            "them"
        )


def _check_pairing(config: DraftConfig) -> None:
    """Raise ModelError unless the mask token and the layer ids can exist in the target."""
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ModelError(
            f"mask_token_id {config.mask_token_id} is outside the vocabulary (0 to "
            f"{config.vocab_size - 1}); set mask_token_id to a row of the target's embedding"
        )
    if config.reads_tokens and config.dflash2 is not None:
        raise ModelError("target_layer_ids is empty; a DFlash 2 drafter reads at least one layer")
    if config.drafts_from_anchor and config.kind in ("dflash2", "diffusion"):
        raise ModelError(
            "the drafter's config says that the anchor's slot predicts a token, which is not "
            f"supported for the kind {config.kind}; use another drafter"
        )
    most = config.block_size - 1 if config.reads_tokens else 1
    if not 1 <= config.num_denoising_steps <= most:
        raise ModelError(
            f"num_denoising_steps is {config.num_denoising_steps} in the drafter's config; give a "
            f"number from 1 to {most}"
        )
    limit = config.num_target_layers
    if bad := [i for i in config.target_layer_ids if i < 0 or (limit is not None and i >= limit)]:
        last = "the target's last layer" if limit is None else str(limit - 1)
        raise ModelError(
            f"target_layer_ids {bad} are out of range; they count the target's layers from 0 to "
            f"{last}"
        )


def _check_attention(config: DraftConfig) -> None:
    """Raise ModelError unless each layer has a known kind, and sliding ones a window."""
    if len(config.layer_types) != config.num_hidden_layers:
        raise ModelError(
            f"layer_types names {len(config.layer_types)} layers, but num_hidden_layers is "
            f"{config.num_hidden_layers}; make them equal"
        )
    if unknown := sorted(set(config.layer_types) - set(get_args(AttentionKind))):
        raise ModelError(
            f"layer_types has {', '.join(map(str, unknown))}; supported are "
            f"{' and '.join(get_args(AttentionKind))}"
        )
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ModelError(
            "the drafter has sliding_attention layers and no sliding_window; add its size in tokens"
        )


def check_rope(rope: Mapping[str, Any]) -> None:
    """Raise ModelError unless the kind of RoPE is supported and complete."""
    kind = rope.get("rope_type")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ModelError(f"rope_type {kind!r} is not supported; known: {', '.join(_ROPE_KEYS)}")
    needed = ("rope_theta", *_ROPE_KEYS[kind])
    if missing := [key for key in needed if rope.get(key) is None]:
        raise ModelError(f"rope_type {kind!r} needs {', '.join(missing)} in the drafter's config")
    for key in needed:
        if isinstance(rope[key], bool) or not isinstance(rope[key], int | float):
            raise ModelError(f"{key} is {rope[key]!r} in the drafter's config; give a number")
        check_positive(key, rope[key])


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ModelError unless heads can share keys and be rotated."""
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads} in the drafter's config; correct one of them"
        )
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim} in the drafter's config; RoPE needs even")


def check_positive(name: str, value: float | None) -> None:
    """Raise ModelError unless a value of a drafter's config, if it has one, is positive."""
    if value is not None and not 0 < value < math.inf:
        raise ModelError(f"{name} is {value} in the drafter's config; it must be positive")


def _check_dflash2(config: DraftConfig, added: DFlash2Config) -> None:
    """Raise ModelError unless the convolutions and the selector fit the drafter."""
    for name, value in asdict(added).items():
        check_positive(name, value)
    if config.hidden_size % added.conv_group_size:
        raise ModelError(
            f"conv_group_size {added.conv_group_size} does not divide hidden_size "
            f"{config.hidden_size} in the drafter's config; give a divisor"
        )
    if added.selector_top_k > config.vocab_size:
        raise ModelError(
            f"selector_top_k is {added.selector_top_k} in the drafter's config, and the vocabulary "
            f"has {config.vocab_size} tokens; give at most that many"
        )


def _check_dspark(config: DraftConfig, added: DSparkConfig) -> None:
    """Raise ModelError unless the Markov head, if there is one, is of a known kind."""
    if added.markov_rank:
        check_positive("markov_rank", added.markov_rank)
    if added.markov_head_type == "rnn" and not config.drafts_from_anchor:
        raise ModelError(
            "the drafter's config has markov_head_type = 'rnn' and says that the anchor's slot "
            "drafts nothing; whether its state starts at that slot is unknown, so it is not run; "
            "use another drafter"
        )


def _check_domino(config: DraftConfig, added: DominoConfig) -> None:
    """Raise ModelError unless sizes are positive and some slot is corrected."""
    check_positive("emb_dim", added.emb_dim)
    check_positive("gru_hidden_dim", added.gru_hidden_dim)
    if not 0 <= added.pure_draft_prefix_len < config.num_drafted:
        raise ModelError(
            f"pure_draft_prefix_len is {added.pure_draft_prefix_len} in the drafter's config, and "
            f"its block drafts {config.num_drafted} tokens; give a number from 0 to "
            f"{config.num_drafted - 1}"
        )


def _check_fusion(config: DraftConfig) -> None:
    """Raise ModelError unless features may be added up to contexts of the layers, as they are."""
    if config.target_hidden_size != config.hidden_size:
        raise ModelError(
            f"target_hidden_size is {config.target_hidden_size} in the drafter's config, and "
            f"hidden_size {config.hidden_size}; they are equal in a drafter of the kind "
            f"{config.kind}, which adds up the target's features: correct one of them"
        )
    if config.dfly is None:
        return
    size = config.dfly.hidden_correction_intermediate_size
    if size:
        check_positive("hidden_correction_intermediate_size", size)
    if size and (config.output_multiplier != 1.0 or config.final_logit_softcapping is not None):
        raise ModelError(
            "the drafter's config has output_multiplier or final_logit_softcapping, which are not "
            "supported for the kind dfly; use another drafter"
        )
