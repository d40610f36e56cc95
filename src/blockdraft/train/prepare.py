"""What a run needs to know and to check before the long work starts."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.core.files import check_room
from blockdraft.core.words import counted
from blockdraft.data.dataset import (
    count_answer_tokens,
    read_examples,
    split_held_out,
    unused_special_token,
)
from blockdraft.data.identity import target_sha256
from blockdraft.data.shards import read_manifest, target_named
from blockdraft.data.store import Example, TextStore
from blockdraft.models.draft.config import DFlash2Config, DraftConfig
from blockdraft.models.draft.config_reader import DFLASH2_KEYS
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.layers.quantized import dequantize
from blockdraft.models.supported import check_supported
from blockdraft.models.target.loading import check_pair, load_target_model, resolve_dtype
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.train.config import TrainConfig
from blockdraft.train.drafter import copy_target_layers, draft_config_for
from blockdraft.train.features import KEY
from blockdraft.train.kinds.base import TrainedDrafter
from blockdraft.train.run_folder import BESIDE, BEST, LAST
from blockdraft.train.run_state import STATE
from blockdraft.train.support import check_plain_head

logger = logging.getLogger(__name__)

NUM_LAYERS, NUM_FEATURES = 5, 5
"""Of a new drafter, unless the settings say otherwise: those of the paper (arXiv 2602.06036)."""
DFLASH2 = DFlash2Config(
    conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16
)
"""Of a new DFlash 2 drafter: those of the published ones."""

BYTES_PER_PARAMETER = 16
"""On disk in a state: masters, averages and at most two moments, in float32."""


def read_data(config: TrainConfig) -> tuple[TextStore, TextStore]:
    """(examples to train on, held out).

    Raises:
        ConfigError: they are too few or too short, or another target's.
    """
    check_same_target(config.data, config.target)
    examples = read_examples(
        config.data, min_response_len=config.min_response_len, max_len=config.max_len
    )
    train, held_out = split_held_out(examples, config.held_out_share)
    if not train or not held_out:
        num_prompts = len(set(examples.draws.tolist()))
        raise ConfigError(
            f"{len(examples)} answers to {counted(num_prompts, 'prompt')} give "
            f"{len(train)} to train on and {len(held_out)} held out; add answers to other prompts, "
            "or change held_out_share"
        )
    longest = int((train.lengths - train.prompt_lens).max())
    if longest < config.block_size:
        raise ConfigError(
            f"the longest answer has {longest} tokens, fewer than a block of {config.block_size}; "
            "write longer answers, or lower block_size"
        )
    return train, held_out


def check_same_target(answers: Sequence[Path], target: Path) -> None:
    """Raise ConfigError if a folder of answers says that another target wrote them."""
    for path in answers:
        manifest = read_manifest(path) if path.is_dir() else None
        if manifest and manifest["target"]["sha256"] != target_sha256(target):
            raise ConfigError(
                f"the answers in {path} are of another target, {target_named(manifest)}, whose "
                f"weights or config are not those of {target}; give that target, let this one "
                "write its own, or give the files in the folder instead of it"
            )


def check_target(config: TrainConfig, target: PreTrainedModel) -> None:
    """Refuse a target that no drafter could be trained for, or not as it is asked for.

    The target may be without weights.

    Raises:
        ModelError: its hidden states cannot be read, or it could not decode with a drafter; its
            tokenizer cannot be loaded; or its logits are not those that distillation would follow.
    """
    load_tokenizer(config.target)
    check_supported(target, (), exact=False)
    if config.distill_share > 0:
        check_plain_head(target, "distillation", "set distill_share=0")


def load_frozen(config: TrainConfig, device: str) -> PreTrainedModel:
    """The target of a run, with plain layers of the weights that it is trained for.

    Raises:
        ModelError: it cannot be loaded.
    """
    model = load_target_model(
        config.target,
        resolve_dtype(config.dtype, config.device),
        device,
        config.device_map,
        quantize=config.quantize,
    )
    # Of the rounded weights, also of a file that holds such.
    dequantize(model)
    return model


def check_ids(target: PreTrainedModel, examples: Sequence[Example]) -> None:
    """Raise ConfigError for a token id that the target's embedding has no row for."""
    size = target.get_input_embeddings().weight.shape[0]
    if example := TextStore.of(examples).first_above(size - 1):
        raise ConfigError(
            f"the answer of id {example.id!r} in set {example.set!r} holds token "
            f"{max(example.token_ids)}, and the target's vocabulary has {size}; it is another "
            "target's: let this one write its own"
        )


def shape_of(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> DraftConfig:
    """The shape of a new drafter. The target may be without weights.

    Raises:
        ConfigError: no token is free to stand for a masked slot.
        ModelError: the values do not fit together.
    """
    mask_token_id = config.mask_token_id
    if mask_token_id is None:
        tokenizer = AutoTokenizer.from_pretrained(
            config.target, local_files_only=True, trust_remote_code=False
        )
        mask_token_id = unused_special_token(
            _special_ids(tokenizer),
            TextStore.of(examples).used_tokens(),
            target.get_input_embeddings().weight.shape[0],
        )
    if used := count_answer_tokens(examples)[mask_token_id]:
        raise ConfigError(
            f"mask_token_id {mask_token_id} occurs {used} times in the answers, so a masked slot "
            "would look like text; choose a token that no text uses, or leave it unset"
        )
    return draft_config_for(
        target.config,
        num_layers=config.num_layers or NUM_LAYERS,
        block_size=config.block_size,
        num_features=_num_features(config),
        mask_token_id=mask_token_id,
        dflash2=_dflash2_of(config),
        num_denoising_steps=config.num_denoising_steps or 1,
    )


def check_mask_before_answers(config: TrainConfig) -> None:
    """Refuse a mask token that answers may hold which are yet to be written.

    `shape_of` refuses one that the texts do hold, but after hours of writing.

    Raises:
        ConfigError: it is a piece of text.
    """
    if config.mask_token_id is None or config.init_from is not None:
        return
    tokenizer = AutoTokenizer.from_pretrained(
        config.target, local_files_only=True, trust_remote_code=False
    )
    text = tokenizer.decode([config.mask_token_id])
    if text and config.mask_token_id not in _special_ids(tokenizer):
        raise ConfigError(
            f"mask_token_id {config.mask_token_id} is {text!r}, which may occur in answers that "
            "are not written yet; leave it unset, give a special token, or write the answers first "
            "(blockdraft data)"
        )


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that have a part, such as the end; then those of the vocabulary alone.

    Llama 3 has hundreds of the second sort, and of the first only two, which every answer holds.
    """
    with_part = sorted(set(tokenizer.all_special_ids))
    added = tokenizer.added_tokens_decoder.items()
    return [*with_part, *sorted(id_ for id_, token in added if token.special)]


def _num_features(config: TrainConfig) -> int:
    """Of a new drafter; 0 for one without."""
    if config.architecture != "diffusion":
        _refuse_steps(config)
        return config.num_features or NUM_FEATURES
    if config.num_features is not None:
        raise ConfigError(
            f"num_features is {config.num_features}, and a drafter of architecture=diffusion reads "
            "none; leave it out"
        )
    return 0


def _refuse_steps(config: TrainConfig) -> None:
    if config.num_denoising_steps not in (None, 1):
        raise ConfigError(
            f"num_denoising_steps is {config.num_denoising_steps}, and a drafter that reads "
            "features fills a block in one; leave it out, or give architecture=diffusion"
        )


def _dflash2_of(config: TrainConfig) -> DFlash2Config | None:
    """What the settings ask for; None for DFlash."""
    given = {name: getattr(config, name) for name in DFLASH2_KEYS}
    given = {name: value for name, value in given.items() if value is not None}
    if config.architecture == "dflash2":
        return replace(DFLASH2, **given)
    if given:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"{name} is {value}, and a dflash drafter has none; leave it out, or give "
            "architecture=dflash2"
        )
    return None


def start_shape(
    config: TrainConfig, found: DraftConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> DraftConfig:
    """The shape of a drafter to continue from; warns of a mask token that the texts use.

    Args:
        config: of the run.
        found: the shape of `init_from`.
        target: may be without weights.
        examples: all of the run.

    Raises:
        ConfigError: the settings ask for another shape.
        ModelError: drafter and target do not fit each other.
    """
    if found.drafts_from_anchor or found.kind in ("dspark", "domino", "dfly", "dflare"):
        kind = found.kind
        what = "drafts from its anchor's slot too" if kind == "dflash" else f"is of the kind {kind}"
        raise ModelError(
            f"the drafter of init_from, {config.init_from}, {what}: drafting with it works, but "
            "training is not supported; start from one of the kind dflash or dflash2"
        )
    owned: dict[str, object] = {
        "num_layers": found.num_hidden_layers,
        "num_features": found.num_features,
        "mask_token_id": found.mask_token_id,
    }
    if found.reads_tokens:
        owned |= {"architecture": "diffusion"}
        steps = config.num_denoising_steps or found.num_denoising_steps
        found = replace(found, num_denoising_steps=steps, dflash2=_dflash2_of(config))
    elif found.dflash2 is None:
        _refuse_steps(config)
        if config.architecture == "diffusion":
            owned |= {"architecture": "dflash"}
        found = replace(found, dflash2=_dflash2_of(config))
    else:
        owned |= {"architecture": "dflash2", **asdict(found.dflash2)}
    for name, own in owned.items():
        if getattr(config, name) not in (None, own):
            raise ConfigError(
                f"{name} is {getattr(config, name)}, and the drafter of init_from, "
                f"{config.init_from}, has {own}; leave one of the two out"
            )
    # Weights fit blocks of any size.
    shape = replace(found, block_size=config.block_size)
    check_pair(target, shape)
    if used := count_answer_tokens(examples)[shape.mask_token_id]:
        logger.warning(
            "the drafter's mask token %d occurs %d times in the answers, so a masked slot looks "
            "like text; a new drafter would use another token",
            *(shape.mask_token_id, used),
        )
    return shape


def load_drafter(
    config: TrainConfig, target: PreTrainedModel, examples: Sequence[Example]
) -> DraftModel:
    """The drafter to train, in the precision of the run.

    It is `init_from`, or has random weights, or those of the target's last layers.

    Raises:
        ConfigError: see `shape_of`.
        ModelError: drafter and target do not fit each other.
    """
    dtype = resolve_dtype(config.dtype, config.device)
    if config.init_from is not None:
        model = DraftModel.from_pretrained(config.init_from, dtype, config.device)
        _check_shared_ends(model, config)
        start = start_shape(config, model.config, target, examples)
        if start.dflash2 == model.config.dflash2:
            model.config = start
            return model
        torch.manual_seed(config.seed)
        grown = DraftModel(start).to(device=config.device, dtype=dtype)
        grown.load_state_dict(grown.state_dict() | model.state_dict())
        return grown
    shape = shape_of(config, target, examples)
    torch.manual_seed(config.seed)
    model = DraftModel(shape)
    if config.init == "target":
        copy_target_layers(model, target)
    return model.to(device=config.device, dtype=dtype)


def _check_shared_ends(model: DraftModel, config: TrainConfig) -> None:
    ends = {
        "an embedding": model.own_embedding,
        "a head": model.own_head,
        "a mask embedding": model.mask_embedding,
    }
    if own := [what for what, tensor in ends.items() if tensor is not None]:
        raise ModelError(
            f"init_from {config.init_from} has {' and '.join(own)} of its own, and training "
            "uses the target's; start from a drafter that shares them"
        )


def limit_vocabulary(
    drafter: TrainedDrafter, config: TrainConfig, examples: Sequence[Example]
) -> None:
    """Let the drafter guess the most frequent answer tokens only, or all if 0 are asked for."""
    token_ids = None
    if config.draft_vocabulary:
        most_common = count_answer_tokens(examples).most_common(config.draft_vocabulary)
        token_ids = [token for token, _ in most_common]
    drafter.limit_vocabulary(token_ids)


def check_disk(config: TrainConfig, num_parameters: int, num_tokens: int, state_width: int) -> None:
    """Raise DiskError unless the run's files fit their disks.

    Args:
        config: of the run.
        num_parameters: of the drafter.
        num_tokens: of the examples to train on.
        state_width: numbers that the feature cache keeps of a token.
    """
    # A state is written beside its predecessor, and so are two checkpoints; a run that goes on has
    # the first of them already.
    num_bytes = (2 * BYTES_PER_PARAMETER + 4 * 2) * num_parameters - _num_written(config.out)
    needed = [(config.out, num_bytes)]
    if config.feature_cache is not None and not (config.feature_cache / KEY).exists():
        size = torch.finfo(resolve_dtype(config.dtype, config.device)).bits // 8
        needed.append((config.feature_cache, num_tokens * state_width * size))
    for folder, num_bytes in needed:
        check_room(folder, num_bytes)


def _num_written(out: Path) -> int:
    """Bytes of the state and the drafters that an earlier part of the run left."""
    paths = [out / STATE, *(path for name in (BEST, LAST) for path in (out / name).glob("*"))]
    return sum(path.stat().st_size for path in paths if path.is_file() and path.name not in BESIDE)
