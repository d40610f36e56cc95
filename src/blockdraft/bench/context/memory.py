"""Memory of the keys and values, from the models' configs."""

from dataclasses import dataclass
from typing import Any

from blockdraft.hub.model_config import load_config
from blockdraft.kernels.heads import stored_size
from blockdraft.llm import LLM
from blockdraft.models.supported import head_dim_of
from blockdraft.models.target.loading import target_without_weights
from blockdraft.speculate.drafters.shapes import read_shape


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of keys and values. Of the drafter: those of its context, without the block."""

    target: int
    draft: int


def kv_bytes_per_token(llm: LLM) -> KVBytes:
    """What one token takes: a key and a value in every layer and key-value head.

    Sliding layers count like full ones: both models keep what has left the window.
    """
    trusts = llm.config.trust_remote_code
    target: Any = load_config(llm.folder, trust_remote_code=trusts).get_text_config()
    head_dim = stored_size(head_dim_of(target))
    kv_heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    of_target = 2 * target.num_hidden_layers * kv_heads * head_dim * llm.dtype.itemsize
    if llm.drafter_folder is None:
        return KVBytes(of_target, 0)
    outline = target_without_weights(llm.folder, trust_remote_code=trusts)
    shape = read_shape(llm.drafter_folder, outline, llm.dtype, trust_remote_code=trusts)
    size = 2 * sum(heads * head_dim for heads, head_dim in shape.kv_shapes)
    return KVBytes(of_target, size * llm.dtype.itemsize)
