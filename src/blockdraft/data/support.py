"""Which targets the shortcuts of training can stand in for, told from their configs."""

from typing import Any

from transformers import PreTrainedModel

from blockdraft.core.errors import ModelError

# Neutral values are None and 1. Names: Gemma; Cohere; Granite; Falcon-H1.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def check_plain_head(model: PreTrainedModel, purpose: str, remedy: str) -> None:
    """Refuse a target whose logits are not simply its head's product with the final states.

    Raises:
        ModelError: names the setting of the config that changes them.
    """
    config = model.config.get_text_config()
    for name in _LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1):
            raise _refusal(model, f"{name} {getattr(config, name)}", purpose, remedy)


def check_full_attention(model: PreTrainedModel, num_tokens: int, purpose: str) -> None:
    """Refuse a target whose layers are not all plain attention over `num_tokens` tokens.

    Raises:
        ModelError: names what the target has instead.
    """
    config = model.config.get_text_config()
    remedy = "use a target of plain attention layers"
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise ModelError(f"{type(model).__name__} is not made of `model` and `lm_head`; {remedy}")
    window = _window(config)
    types = set(getattr(config, "layer_types", None) or ())
    is_sliding = "sliding_attention" in types if types else window is not None
    # A window over everything is full attention.
    if is_sliding and (window is None or window < num_tokens):
        raise _refusal(model, f"a sliding window of {window} tokens", purpose, remedy)
    if other := sorted(types - {"full_attention", "sliding_attention"}):
        raise _refusal(model, f"{other[0]} layers", purpose, remedy)
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        raise _refusal(model, f"attn_logit_softcapping {softcap}", purpose, remedy)
    if any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in model.named_parameters()):
        raise _refusal(model, "attention sinks", purpose, remedy)


def _window(config: Any) -> int | None:
    if not getattr(config, "use_sliding_window", True):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _refusal(model: PreTrainedModel, what: str, purpose: str, remedy: str) -> ModelError:
    return ModelError(f"{type(model).__name__} has {what}, which {purpose} ignores; {remedy}")
