"""Which rules make rows of whole forwards independent, by the test that a load runs."""

import gc

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from blockdraft.cache.pages import Pages
from blockdraft.core.errors import ModelError
from blockdraft.kernels.backends import card_kernels
from blockdraft.models.target.loading import settle_device
from blockdraft.models.target.paged import PagedTarget
from gpucheck.notes import Notes, first_line
from gpucheck.rows import ALL_DTYPES
from gpucheck.rules import TRITON, candidate, candidates_on
from gpucheck.settings import ModelSize, Settings

NUM_PAGES = 96
HOLDS = "holds"


def run(settings: Settings, notes: Notes) -> None:
    """Random weights will do: each layer is as in the model whose shapes it has."""
    settle_device(settings.device)  # as a load does
    for name in [name for name in settings.dtypes if name != "float16"]:
        dtype = ALL_DTYPES[name]
        for model_name, size in settings.models.items():
            try:
                model = _model(size, dtype, settings.device)
            except RuntimeError as error:  # out of memory, too
                notes.note("failed", f"{name}, {model_name}", value=first_line(error))
                continue
            for rule_name in candidates_on(settings.device):
                with candidate(dtype, rule_name):
                    are_used, reason = card_kernels(dtype, settings.device, [size.head_dim])
                    is_missing = rule_name == TRITON and not are_used
                    found = reason if is_missing else _checked(model)
                notes.note("rules", name, rule_name, model_name, value=found)
            del model
            gc.collect()


def _checked(model: PreTrainedModel) -> str:
    """HOLDS, or what the check of a load says."""
    try:
        target = PagedTarget(model, Pages(NUM_PAGES))
        with target.released_after():
            target.check_row_invariance()
    except (ModelError, RuntimeError, AssertionError) as error:
        return first_line(error)
    return HOLDS


def _model(size: ModelSize, dtype: torch.dtype, device: str) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.to(dtype).eval()
