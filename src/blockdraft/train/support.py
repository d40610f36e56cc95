"""Which targets the shortcuts of training can stand in for, told from their configs."""

from transformers import PreTrainedModel

from blockdraft.core.errors import ModelError

# Neutral values are None and 1. Names: Gemma; Cohere; Granite; Falcon-H1.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def check_plain_head(model: PreTrainedModel, purpose: str, remedy: str) -> None:
    """Refuse a target whose logits are not simply its head's product with the final states.

    Raises:
        ModelError: names the setting of the config that changes them, or the head's bias.
    """
    config = model.config.get_text_config()
    for name in _LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1):
            raise ModelError(
                f"{type(model).__name__} has {name} {getattr(config, name)}, which {purpose} "
                f"ignores; {remedy}"
            )
    # Phi has one.
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(
            f"the head of {type(model).__name__} has a bias, which {purpose} ignores; {remedy}"
        )
