"""Memory of the keys and values."""

from dataclasses import dataclass
from typing import Any

from blockdraft.hub.model_config import load_config
from blockdraft.kernels.heads import stored_size
from blockdraft.llm import LLM
from blockdraft.models.supported import head_dim_of, kv_heads_of, layer_configs
from blockdraft.models.target.loading import target_without_weights
from blockdraft.models.target.paged import PagedTarget
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
    of_target = _of_target(llm)
    if llm.drafter_folder is None:
        return KVBytes(of_target, 0)
    trusts = llm.config.trust_remote_code
    outline = target_without_weights(llm.folder, trust_remote_code=trusts)
    shape = read_shape(llm.drafter_folder, outline, llm.dtype, trust_remote_code=trusts)
    size = 2 * sum(heads * head_dim for heads, head_dim in shape.kv_shapes)
    return KVBytes(of_target, size * llm.dtype.itemsize)


def _of_target(llm: LLM) -> int:
    """As its pages are, which may hold numbers in int8; by its config where it has none."""
    if isinstance(llm.engine.target, PagedTarget):
        return llm.engine.target.kv.token_bytes
    trusts = llm.config.trust_remote_code
    config: Any = load_config(llm.folder, trust_remote_code=trusts).get_text_config()
    sizes = [kv_heads_of(own) * stored_size(head_dim_of(own)) for own in layer_configs(config)]
    return 2 * sum(sizes) * llm.dtype.itemsize
