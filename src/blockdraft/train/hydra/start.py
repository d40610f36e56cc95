"""What a training of a Hydra head begins with: layers of the drafter, answers, and a head."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.data.dataset import count_answer_tokens, read_examples
from blockdraft.data.holding_out import are_held_out, draw_of
from blockdraft.data.store import Example, TextStore
from blockdraft.models.draft.checkpoint import read_provenance
from blockdraft.models.draft.hydra_head import HEAD_NAME, HeadShape, HydraHead
from blockdraft.models.target.loading import target_without_weights
from blockdraft.speculate.drafters.shapes import read_shape
from blockdraft.train.features import FrozenTarget
from blockdraft.train.hydra.config import HeadConfig
from blockdraft.train.prepare import check_ids, check_same_target

logger = logging.getLogger(__name__)

MAX_TOKENS = 700
"""Of a prompt and its answer; longer ones are left out."""
NUM_HELD_OUT, LEAST_SHARE, MOST_SHARE = 64, 0.005, 0.05
"""Answers that are not trained on: about so many, and the shares between which they stay. Where the
drafter held out a larger share, that is not trained on either, or nothing would be left to measure
the two together."""
NUM_TOKENS = 8192
"""That a new head guesses."""
INNER_PER_HIDDEN = 2
"""Size of a new head's gated layer, in hidden sizes of the target."""


def layers_of_drafter(config: HeadConfig, target: Path) -> tuple[int, ...]:
    """The layers of the target that the drafter reads.

    Raises:
        ConfigError: the head is to read others, or the answers are of another target.
        ModelError: the drafter does not fit the target, or reads no layers.
    """
    check_same_target(config.answers, target)
    shape = read_shape(config.drafter, target_without_weights(target), torch.bfloat16)
    if shape.refusal:
        raise ModelError(f"{config.drafter}: {shape.refusal}")
    known = shape.target_layer_ids
    if not known:
        raise ModelError(
            f"{config.drafter} reads no features of the target, so it cannot have a head; give a "
            "drafter that does, such as a DFlash drafter"
        )
    if missing := sorted(set(config.layers) - set(known)):
        raise ConfigError(
            f"layers is {list(config.layers)}, and the drafter reads {sorted(known)}, without "
            f"{missing}; choose among these"
        )
    return known


def read_texts(
    config: HeadConfig, model: PreTrainedModel
) -> tuple[Sequence[Example], Sequence[Example]]:
    """(answers to learn from, some of those that are held out).

    Raises:
        ConfigError: none is left, or they are of another target.
        ModelError: the drafter's provenance is damaged.
    """
    texts = read_examples(config.answers, min_response_len=1, max_len=None)
    check_ids(model, texts)
    is_long, has_prompt = texts.lengths > MAX_TOKENS, texts.prompt_lens > 1
    if num_long := int(is_long.sum()):
        logger.info(
            "answers left out, with more than %d tokens including the prompt: %d",
            MAX_TOKENS,
            num_long,
        )
    lowest = _lowest_draws(texts)
    usable = np.flatnonzero(~is_long & has_prompt)
    drawn = np.random.default_rng(7).permutation(usable)[: config.limit]
    share = min(MOST_SHARE, max(LEAST_SHARE, NUM_HELD_OUT / max(1, len(drawn))))
    share = max(share, _share_held_out(config.drafter))
    is_held_out = are_held_out(lowest[drawn], share)
    examples, held_out = (
        TextStore(texts.arrays, texts.chosen[drawn[own]]) for own in (~is_held_out, is_held_out)
    )
    if not examples:
        raise ConfigError(
            f"no answer is left to train on ({len(held_out)} held out; of at most {MAX_TOKENS} "
            "tokens, prompts of two or more); give others"
        )
    return examples, held_out[: max(NUM_HELD_OUT, round(LEAST_SHARE * len(drawn)))]


def _lowest_draws(texts: TextStore) -> NDArray[Any]:
    """[n], of each text the lowest draw of all names of its prompt.

    For the drafter the first name decided (`data.holding_out`). Its training may have read these
    answers in another order, or without the short ones, so any of the names may have been that.
    """
    own = np.array([draw_of(example.id) for example in texts], dtype=np.uint64)
    _, prompts = np.unique(texts.draws, return_inverse=True)
    lowest = np.full(len(own), 2**64 - 1, dtype=np.uint64)
    np.minimum.at(lowest, prompts, own)
    return np.asarray(lowest[prompts])


def _share_held_out(drafter: Path) -> float:
    """Of the prompts, by the drafter's training; 0 where nothing is known of it."""
    config = read_provenance(drafter).get("config")
    share = config.get("held_out_share") if isinstance(config, dict) else None
    return share if isinstance(share, float) and 0 < share < 1 else 0.0


def known_head(drafter: Path, model: PreTrainedModel, drafter_layers: Sequence[int]) -> HydraHead:
    """The one that the drafter has.

    Raises:
        ConfigError: it has none.
        ModelError: it is damaged, or of another target or drafter.
    """
    vocab_size, hidden_size = model.get_input_embeddings().weight.shape
    head = HydraHead.load(drafter, hidden_size, vocab_size)
    if head is None:
        raise ConfigError(f"{drafter} has no {HEAD_NAME} to start from; leave from_head out")
    layers = head.shape.target_layer_ids
    if not set(layers) <= set(drafter_layers):
        raise ModelError(
            f"{drafter / HEAD_NAME} reads layers {list(layers)}, and the drafter "
            f"{sorted(drafter_layers)}; leave from_head out to train another one"
        )
    return head


def new_head(target: FrozenTarget, examples: Sequence[Example], config: HeadConfig) -> HydraHead:
    """That guesses the most frequent tokens of the answers, as often as they are at first."""
    counts = count_answer_tokens(examples)
    most_common = counts.most_common(config.num_tokens or NUM_TOKENS)
    token_ids = sorted(token for token, _ in most_common)
    torch.manual_seed(0)
    frequent = torch.tensor([counts[token] for token in token_ids]) / counts.total()
    inner_size = config.inner_size or INNER_PER_HIDDEN * target.hidden_size
    # Of whole numbers: shares of float32 can add up to more than all.
    covered = sum(counts[token] for token in token_ids) / counts.total()
    shape = HeadShape(target.hidden_size, inner_size, target.layer_ids, covered)
    head = HydraHead(shape, torch.tensor(token_ids))
    with torch.no_grad():
        head.bias.copy_(frequent.log())
        head.last_norm.fill_(0.1)  # near no opinion beside the frequencies
    return head


def some_of(layers: Sequence[int]) -> list[int]:
    """The second, the middle one and the last of those that a drafter reads."""
    return sorted({layers[min(1, len(layers) - 1)], layers[len(layers) // 2], layers[-1]})
