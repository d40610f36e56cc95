"""DFlash drafters and their successors as AngelSpec exports them, read as in the published layout.

Its configs keep all keys at the top level. `num_target_layers` counts the layers that are read, and
`target_num_hidden_layers` those of the target. In training the anchor's slot predicts nothing, for
any kind, and the size of a block is an option of the trainer that the export leaves out. Tensors
have other names, see `checkpoint.plain_name`.
"""

from collections.abc import Mapping
from typing import Any

from blockdraft.core.errors import ModelError

_MARKS = (
    *("target_num_hidden_layers", "_angelspec_version", "model_arch"),
    *("enable_hidden_correction", "hidden_correction_intermediate_size"),
)
"""Keys that only this layout has at the top level."""

_OF_DSPARK = (
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
)
"""What DFly's configs may have too: its first version shared DSpark's. It has none of the heads."""

_SAYS_WHICH_SLOTS = ("sample_from_anchor", "shift_label")


def is_angelspec(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is in this layout."""
    return any(raw.get(mark) is not None for mark in _MARKS)


def from_angelspec(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A `config.json` in the published layout; one that is in it already comes back as it is.

    Raises:
        ModelError: it lacks the size of a block, or two keys contradict each other.
    """
    if not is_angelspec(raw):
        return raw
    own = {name: value for name, value in raw.items() if value is not None}
    if "block_size" not in own:
        raise ModelError(
            "the drafter's config.json has no block_size, which AngelSpec's exports leave out; add "
            "the dflash_block_size that it was trained with (names that end in B8 mean 8)"
        )
    num_read = own.pop("num_target_layers", None)
    own["num_target_layers"] = own.pop("target_num_hidden_layers", None)
    ids = own.get("target_layer_ids")
    if isinstance(ids, list) and num_read not in (None, len(ids)):
        raise ModelError(
            f"the drafter's config.json has num_target_layers = {num_read}, and target_layer_ids "
            f"names {len(ids)}; correct one of them"
        )
    if ids is None and num_read != own.get("num_hidden_layers"):
        # The rule for a config that names none takes as many layers as the drafter has.
        raise ModelError(
            f"the drafter's config.json has no target_layer_ids and num_target_layers = {num_read};"
            " add the layers of the target that it reads, the first being 0"
        )
    if own.get("model_arch") == "dfly" or own.get("architectures") == ["Qwen3DFlyModel"]:
        for name in _OF_DSPARK:
            own.pop(name, None)
    if not any(name in own for name in _SAYS_WHICH_SLOTS):
        own["sample_from_anchor"] = False
    return own
