"""How many pages of keys and values fit into the memory."""

import math

import torch
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import LayerShape, int8_page_bytes, page_bytes
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError
from blockdraft.core.machine import memory_bytes
from blockdraft.models.supported import context_of
from blockdraft.models.target.paged_support import layer_shapes
from blockdraft.models.target.spread import layer_devices

SHARE_OF_MEMORY = 0.25
"""The share of the memory for keys and values, unless a size is given."""
MIN_PAGES = 9
"""Enough for the self-test, and for a short chat."""


def num_pages(config: LLMConfig, model: PreTrainedModel, draft_page_bytes: float) -> int:
    """As many pages as the memory holds, but no more than all sequences can ever fill.

    draft_page_bytes: what the drafter's own cache takes for each page of the target.

    Raises:
        ConfigError: there is memory for fewer than MIN_PAGES.
        NotPaged: the model does not run in pages.
    """
    shapes = layer_shapes(model)
    sizes: dict[torch.device, float] = {model.device: 0.0}
    for shape, device in zip(shapes, layer_devices(model, len(shapes)), strict=True):
        sizes[device] = sizes.get(device, 0.0) + _page_bytes(config, shape, model.dtype)
    sizes[model.device] += draft_page_bytes
    size = sum(sizes.values())
    most = max(MIN_PAGES, 1 + config.max_concurrency * -(-context_of(model) // PAGE_SIZE))
    # Of several devices, the fullest one decides.
    budget = min(
        _memory_bytes(config, device) * (1 if config.memory else size / own)
        for device, own in sizes.items()
        if own
    )
    num = min(most, int(budget // size))
    if num < MIN_PAGES:
        raise ConfigError(
            f"memory of {budget / 2**30:.3g} GiB holds {num} pages of {PAGE_SIZE} tokens, "
            f"and {MIN_PAGES} are needed; give --memory {_enough(MIN_PAGES * size / 2**30)} or more"
        )
    return num


def _enough(gib: float) -> str:
    """A little more in three digits: rounded down, it would be refused again."""
    step = 10.0 ** (math.floor(math.log10(gib)) - 2)
    return f"{(math.floor(gib / step) + 1) * step:.3g}"


def _page_bytes(config: LLMConfig, shape: LayerShape, dtype: torch.dtype) -> int:
    in_int8 = config.kv_cache_dtype == "int8"
    return int8_page_bytes([shape]) if in_int8 else page_bytes([shape], dtype)


def _memory_bytes(config: LLMConfig, device: torch.device) -> float:
    if config.memory is not None:
        return config.memory * 2**30
    return SHARE_OF_MEMORY * bytes_of(device)


def bytes_of(device: torch.device) -> int:
    """What is free on a card; of a CPU all memory that is this process's to use.

    Free is also what torch keeps there for its next tensors: a model that is loaded once more, with
    other kernels, would else find the memory of the first one taken.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return memory_bytes()
