"""Drafters in the layout of the `speculators` library, read as if they were in the published one.

Its config keeps the shape of the layers in `transformer_layer_config`, without what equals the
defaults of their `model_type`, and counts the target's layers from 1: it names the state behind a
layer by the number of layers before it. Its checkpoints may bring an embedding and a head, and
`d2t` and `t2d` say which tokens that head knows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.core.errors import ModelError

MARK = "speculators_model_type"
"""The key that only this layout has."""

ARCHITECTURE_OF = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
"""Kinds that are read, and what they are called in the published layout."""

OF_THE_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that the library needs in training only: copies of the target's."""

_DRAFTER_KEYS = ("mask_token_id", "block_size", "sample_from_anchor")
_DSPARK_RANK = 256
"""Of a DSpark drafter that names none."""


def published_layout(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A `config.json` in the published layout; one that is in it already comes back as it is.

    Raises:
        ModelError: it is of another kind of drafter, or lacks a part.
    """
    kind = raw.get(MARK)
    if kind is None:
        return raw
    if kind not in ARCHITECTURE_OF:
        raise ModelError(
            f"the drafter's config.json has {MARK} = {kind!r}, which is not supported yet; use one "
            f"of {', '.join(ARCHITECTURE_OF)}"
        )
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ModelError(
            f"the drafter's config.json has {MARK} = {kind!r} and transformer_layer_config = "
            f"{layers!r}; copy the checkpoint again"
        )
    own = {name: value for name, value in raw.items() if value is not None}
    drafter = {name: own.pop(name) for name in _DRAFTER_KEYS if name in own}
    drafter["target_layer_ids"] = zero_based(
        own.pop("aux_hidden_state_layer_ids", None), "aux_hidden_state_layer_ids"
    )
    if own.pop("sliding_window_non_causal", False):
        drafter["causal"] = False
    if kind == "dspark":
        for name in ("projector_type", "shift_label"):  # of other methods, beside this mark
            own.pop(name, None)
        drafter.setdefault("sample_from_anchor", _drafts_whole_block(raw))
        own.setdefault("markov_rank", _DSPARK_RANK)
    del own["transformer_layer_config"], own[MARK]
    return (
        with_defaults(layers)
        | own
        | {
            "architectures": [ARCHITECTURE_OF[kind]],
            "dflash_config": drafter,
        }
    )


def _drafts_whole_block(raw: Mapping[str, Any]) -> bool:
    """Whether the anchor's slot drafts too, of a config that does not say so.

    Such configs are older than the key, and then it did not; unless the number of tokens that the
    drafter proposes says otherwise.
    """
    proposing = raw.get("speculators_config")
    methods = proposing.get("proposal_methods") if isinstance(proposing, Mapping) else None
    return isinstance(methods, list) and any(
        isinstance(own, Mapping) and own.get("speculative_tokens") == raw.get("block_size")
        for own in methods
    )


def zero_based(ids: object, name: str) -> list[int]:
    """The layers whose outputs are read, from the numbers of layers before these states.

    Raises:
        ModelError: under this name is no list of them, or one is the embedding.
    """
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(
            f"{name} is {ids!r} in the drafter's config.json; give a list of "
            "the target's layers, the first being 1"
        )
    if 0 in ids:
        raise ModelError(
            f"{name} is {ids} in the drafter's config.json: 0 is the target's "
            "embedding, and only outputs of its layers can be read; use another drafter"
        )
    return [i - 1 for i in ids]


def with_defaults(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of the layers, with what equals the defaults of their `model_type`."""
    from transformers import CONFIG_MAPPING  # slow to import, and needed for this layout only

    kind = layers.get("model_type", "qwen3")
    if kind not in CONFIG_MAPPING:
        return dict(layers)
    config: dict[str, Any] = CONFIG_MAPPING[kind](**layers).to_dict()
    return config


def draft_vocabulary_of(tensors: dict[str, Tensor], vocab_size: int, folder: Path) -> Tensor | None:
    """Take `d2t` and `t2d` out of a checkpoint's tensors: the token ids [n] that its head knows.

    None if it has neither, or if they name all tokens.

    Raises:
        ModelError: they contradict each other, or are not of this vocabulary.
    """
    offsets, known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    found: Tensor | None = None
    if known is not None:
        found = known.bool().flatten().nonzero().flatten()
    if offsets is not None:
        offsets = offsets.flatten()
        ids = offsets.long() + torch.arange(len(offsets))
        if found is not None and not torch.equal(ids, found):
            raise ModelError(
                f"{folder} holds d2t and t2d that name different tokens; copy the checkpoint again"
            )
        found = ids
    if found is None:
        return None
    in_order = len(found) > 0 and bool((found.diff() > 0).all())
    if not in_order or found[0] < 0 or found[-1] >= vocab_size:
        raise ModelError(
            f"{folder} holds a draft vocabulary (d2t) that is not an ascending list of tokens from "
            f"0 to {vocab_size - 1}; copy the checkpoint again"
        )
    return None if len(found) == vocab_size else found


def d2t_of(token_ids: Sequence[int]) -> Tensor:
    """What `draft_vocabulary_of` reads: for each of these ids, ascending, what its place lacks."""
    return torch.tensor(token_ids) - torch.arange(len(token_ids))


def over_whole_vocabulary(tensors: dict[str, Tensor], token_ids: Tensor, vocab_size: int) -> None:
    """Spread weights with a row for each token of the draft vocabulary over all tokens.

    A token outside has the predecessor's row of the nearest known one before it, as in training;
    it follows nothing.
    """
    before = (torch.bucketize(torch.arange(vocab_size), token_ids, right=True) - 1).clamp(min=0)
    for name, value in tensors.items():
        is_predecessor = "predecessor_codebook" in name
        is_successor = "successor_codebook" in name or "markov_w2" in name
        if not (is_predecessor or is_successor) or len(value) != len(token_ids):
            continue
        if is_predecessor:
            tensors[name] = value[before]
        else:
            tensors[name] = value.new_zeros(vocab_size, value.shape[1])
            tensors[name][token_ids] = value
