"""The drafter that a run starts from."""

import dataclasses
from typing import Any

from blockdraft.models.draft_config import AttentionKind, DraftConfig, default_target_layer_ids


def draft_config_for(
    target_config: Any, *, num_layers: int, block_size: int, num_features: int, mask_token_id: int
) -> DraftConfig:
    """A drafter of the target's own shape with fewer layers, all of full attention.

    Args:
        target_config: transformers' config of the target.
        num_layers: of the drafter.
        block_size: slots, anchor included.
        num_features: how many target layers it reads; which ones follows the published formula.
        mask_token_id: stands for a masked slot.

    Raises:
        ModelError: the values do not fit together.
    """
    config = target_config.get_text_config()
    full: AttentionKind = "full_attention"
    head_dim = getattr(config, "head_dim", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return DraftConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        target_layer_ids=default_target_layer_ids(config.num_hidden_layers, num_features),
        mask_token_id=mask_token_id,
        block_size=block_size,
        layer_types=(full,) * num_layers,
        num_target_layers=config.num_hidden_layers,
        rms_norm_eps=config.rms_norm_eps,
        # Only the base is taken over: the drafter's own rotation has nothing to stretch yet.
        rope={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        max_position_embeddings=config.max_position_embeddings,
    )


def with_block_size(config: DraftConfig, block_size: int) -> DraftConfig:
    """The same drafter with longer or shorter blocks; its weights fit any."""
    return dataclasses.replace(config, block_size=block_size)
