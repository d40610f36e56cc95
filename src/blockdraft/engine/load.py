"""From folders of models to an engine that is ready."""

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from blockdraft.cache.pages import Pages
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.core.machine import give_back_memory
from blockdraft.core.out_of_memory import full_memory_refused
from blockdraft.core.remembered import once, remembering
from blockdraft.engine.engine import Engine
from blockdraft.engine.memory_plan import bytes_of, num_pages
from blockdraft.engine.start_key import remembered_path, start_key
from blockdraft.kernels.backends import failed_load, passed_load
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.models.draft.hydra_head import HEAD_NAME, HydraHead
from blockdraft.models.layers.fused import drop_quantized
from blockdraft.models.layers.packed import multiplies_int8
from blockdraft.models.layers.quantized import weight_of
from blockdraft.models.layers.recurrent import copies_states, is_recurrent
from blockdraft.models.target.exact import RowsDepend
from blockdraft.models.target.loading import load_target_model, settle_device
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.models.target.spread import spread
from blockdraft.speculate.drafters.base import Drafter, FreeDrafter
from blockdraft.speculate.drafters.kinds import Checkpoint, load_checkpoint
from blockdraft.speculate.drafters.lookup import LookupDrafter
from blockdraft.speculate.drafters.ngram import NGramDrafter
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.drafters.prediction import PredictionDrafter

_LESS_MEMORY = "take a smaller model, --quantize, less --memory or another --device"

SHARE_OF_STATES = 0.05
"""The share of the memory for states of recurrent layers that are kept for other requests."""

Load = Callable[..., Engine]
"""`_load` with its arguments, but for `in_pages`."""

logger = logging.getLogger(__name__)


def load_engine(
    config: LLMConfig,
    target_folder: Path,
    drafter_folder: Path | None,
    dtype: torch.dtype,
    device: str,
) -> Engine:
    """Load both models, plan the memory, test exactness, measure what a step costs.

    Raises:
        ConfigError: the memory that was asked for is too small, or cannot be kept to, or memory
            runs out.
        ModelError: a model cannot be loaded, the pair does not fit, or exactness was asked for and
            this machine's kernels do not give it.
    """
    settle_device(device)
    if _uses_cards():
        free_dropped_models()  # a card may have room for one only
    # Where a map puts the layers depends on what is free on each device now.
    recheck = config.recheck or config.device_map is not None
    with full_memory_refused(_LESS_MEMORY):
        key = start_key(config, target_folder, drafter_folder, dtype, device)
        with remembering(remembered_path(key), key, recheck=recheck) as remembered:
            if not remembered.found:
                logger.info("testing the kernels and timing steps for these models, once")
            load = partial(_load, config, target_folder, drafter_folder, dtype, device)
            cards = _cards(config, device)
            engine = _in_pages_if_exact(partial(_with_kernels_if_exact, load, dtype, cards))
    give_back_memory()  # of loading, packing and testing
    return engine


class StatesDepend(RowsDepend):
    """A model with recurrent states failed the check in pages; one by one it may pass."""


def _in_pages_if_exact(load: Load) -> Engine:
    """An engine in pages; if a model with recurrent states fails its check so, one by one."""
    try:
        return load(in_pages=True)
    except StatesDepend as error:
        logger.warning("loading again, to run sequences one after another: %s", error)
    free_dropped_models()
    return load(in_pages=False)


def _cards(config: LLMConfig, device: str) -> str | None:
    """The device whose kernels a model computes with; None for all devices."""
    return device if config.device_map is None else None


def _with_kernels_if_exact(
    load: Load, dtype: torch.dtype, device: str | None, *, in_pages: bool
) -> Engine:
    """An engine with the fastest kernels; if the check fails with them, with torch's operations."""
    try:
        return load(in_pages=in_pages)
    except RowsDepend as error:
        if not failed_load(dtype, device, str(error)):
            raise
        logger.warning("loading again, with torch's operations: %s", error)
    free_dropped_models()
    return load(in_pages=in_pages)


def free_dropped_models() -> None:
    """Free what nobody holds any more, such as a model whose check failed: it holds itself.

    A card's memory is in use until Python finds such cycles, and that of graphs until torch, which
    keeps it for the next graph, gives it back.
    """
    gc.collect()
    give_back_memory()
    if _uses_cards():
        torch.cuda.empty_cache()


def _uses_cards() -> bool:
    """Whether this process has anything on a card; asking opens none."""
    found: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return found


def _load(
    config: LLMConfig,
    target_folder: Path,
    drafter_folder: Path | None,
    dtype: torch.dtype,
    device: str,
    *,
    in_pages: bool,
) -> Engine:
    model = load_target_model(
        target_folder,
        dtype,
        device,
        device_map=config.device_map,
        quantize=config.quantize,
        trust_remote_code=config.trust_remote_code,
    )
    if config.device_map is not None:
        device = spread(model)
    checkpoint = None
    if drafter_folder is not None:
        in_int8 = _drafts_in_int8(config, dtype, device)
        checkpoint = load_checkpoint(
            drafter_folder,
            model,
            dtype,
            device,
            in_int8=in_int8,
            trust_remote_code=config.trust_remote_code,
        )
    target = make_target(config, model, checkpoint, in_pages=in_pages)
    use_static_shapes(target)
    drafter = make_drafter(target, checkpoint)
    free = free_drafters(config, drafter_folder, target, drafter.feature_layers)
    drop_quantized(model)
    if config.exact:
        once("rows are independent", lambda: _passes(target))
        passed_load(dtype, _cards(config, device))
    if num_bytes := target.state_bytes():
        again = (
            "as much again for each candidate"
            if copies_states(model)
            else "up to three times as much again while candidates are verified"
        )
        logger.info("recurrent states take %.3g MiB a sequence, and %s", num_bytes / 2**20, again)
    engine = Engine(
        target,
        drafter,
        free_drafters=free,
        max_running=config.max_concurrency,
        prefill_chunk=config.prefill_chunk,
    )
    if config.adaptive and checkpoint is not None:
        engine.use_adaptive_drafting(config.num_draft_tokens, config.draft_depth)
    else:
        engine.use_fixed_drafting(config.num_draft_tokens, config.draft_depth)
    return engine


def _drafts_in_int8(config: LLMConfig, dtype: torch.dtype, device: str) -> bool:
    if config.draft_dtype == "auto":
        return multiplies_int8(dtype, device)
    return config.draft_dtype == "int8"


def _passes(target: PagedTarget | SequentialTarget) -> bool:
    """True, to be remembered by `once`; a failure raises, and is not remembered."""
    try:
        target.check_row_invariance()
    except RowsDepend as error:
        if isinstance(target, PagedTarget) and is_recurrent(target.model):
            raise StatesDepend(str(error)) from error
        raise
    return True


def make_target(
    config: LLMConfig,
    model: PreTrainedModel,
    checkpoint: Checkpoint | None,
    *,
    keep_weights: bool = False,
    in_pages: bool = True,
) -> PagedTarget | SequentialTarget:
    """The target, with memory for itself and a drafter.

    Weights that are packed are freed, unless `keep_weights` says that somebody else needs them.
    Without `in_pages` sequences run one after another.

    Raises:
        ConfigError: see `load_engine`.
        ModelError: the model is not supported.
    """
    layer_ids = () if checkpoint is None else checkpoint.feature_layers
    name = type(model).__name__
    if config.memory is not None and is_recurrent(model):
        raise ConfigError(
            f"memory of {config.memory:g} GiB cannot be enforced: {name} keeps recurrent states "
            "beside its pages, several for each step; leave out --memory"
        )
    if not in_pages:
        return _one_after_another(config, model, layer_ids, "its states fail the check in batches")
    try:
        pages = Pages(
            num_pages(config, model, 0.0 if checkpoint is None else checkpoint.page_bytes)
        )
        return PagedTarget(
            model,
            pages,
            layer_ids=layer_ids,
            exact=config.exact,
            keep_weights=keep_weights,
            state_bytes=int(SHARE_OF_STATES * bytes_of(model.device)),
            kv_in_int8=config.kv_cache_dtype == "int8",
        )
    except NotPaged as reason:
        if config.memory is not None:
            raise ConfigError(
                f"memory of {config.memory:g} GiB cannot be enforced: {name} runs its sequences "
                f"one after another, each with memory of its own ({reason}); leave out --memory"
            ) from reason
        logger.warning("%s runs its sequences one after another: %s", name, reason)
        return _one_after_another(config, model, layer_ids, str(reason))


def _one_after_another(
    config: LLMConfig, model: PreTrainedModel, layer_ids: Sequence[int], reason: str
) -> SequentialTarget:
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} is for models that run in batches, but "
            f"{type(model).__name__} does not ({reason}); leave it out"
        )
    return SequentialTarget(model, layer_ids=layer_ids, exact=config.exact)


def use_static_shapes(target: PagedTarget | SequentialTarget) -> None:
    """Let a card replay forwards of few rows, where the target can."""
    if isinstance(target, PagedTarget) and target.device.type == "cuda":
        target.use_static_shapes()


def make_drafter(target: PagedTarget | SequentialTarget, checkpoint: Checkpoint | None) -> Drafter:
    """The drafter of a checkpoint, with its cache where the target has its own."""
    if checkpoint is None:
        return NoDrafter()
    pages = target.memory if isinstance(target, PagedTarget) else None
    return checkpoint.drafter(target.model, pages)


def free_drafters(
    config: LLMConfig,
    drafter_folder: Path | None,
    target: PagedTarget | SequentialTarget,
    feature_layers: tuple[int, ...],
) -> list[FreeDrafter]:
    """The drafters that run no model, except a Hydra head. The first follows predictions.

    feature_layers: layers of the target whose outputs drafters get.

    Raises:
        ModelError: the drafter's table of n-grams, or its Hydra head, is damaged.
    """
    found: list[FreeDrafter] = [PredictionDrafter()]
    looks_up = config.looks_up(has_drafter=drafter_folder is not None)
    if looks_up:
        found.append(LookupDrafter(shared_tokens=config.shared_lookup))
    if config.ngrams:
        table = layers = None
        if drafter_folder is not None:
            table = NGramTable.load(drafter_folder, target.vocab_size)
            layers = _hydra_layers(drafter_folder, target, feature_layers)
        if table is not None or layers is not None or looks_up:
            found.append(NGramDrafter(table or NGramTable([]), target.vocab_size, layers))
    return found


def _hydra_layers(
    folder: Path, target: PagedTarget | SequentialTarget, feature_layers: tuple[int, ...]
) -> HydraLayers | None:
    """The Hydra head in a drafter's folder; None without one, and on other devices than CPUs.

    Raises:
        ModelError: it is damaged, or reads layers that the drafter beside it does not.
    """
    model = target.model
    if model.device.type != "cpu":
        return None
    text_config = model.config.get_text_config()
    head = HydraHead.load(folder, text_config.hidden_size, target.vocab_size)
    if head is None:
        return None
    missing = sorted(set(head.shape.target_layer_ids) - set(feature_layers))
    if missing:
        known = f"those of {list(feature_layers)}" if feature_layers else "none"
        raise ModelError(
            f"{folder / HEAD_NAME} reads the outputs of layers {missing}, and the drafter beside "
            f"it reads {known}; delete it, or draft with --no-ngrams"
        )
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    return head.layers(weight_of(embedding), weight_of(lm_head), feature_layers)
