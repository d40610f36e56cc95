"""The values in the drafter's config that change what it computes and never raise an error."""

from collections.abc import Mapping
from typing import Any

from blockdraft.core.errors import ModelError
from blockdraft.core.words import counted
from blockdraft.diagnose.doctor.check import Check
from blockdraft.diagnose.doctor.offline import Offline
from blockdraft.diagnose.doctor.pair import Pair
from blockdraft.models.draft.config_reader import DEFAULT_ROPE_THETA
from blockdraft.models.draft.vocabulary import read_draft_vocabulary

MAX_PADDING_SHARE = 0.01
"""Of all guesses: tokens that do not exist."""
_UNREAD = "its config cannot be read"


def rope_check(pair: Pair, measured: Offline | None) -> Check:
    """Rotation: a base or a scaling that a conversion has dropped."""
    name, target = "rope", target_rope(pair)
    if not pair.fields:
        return Check(name, "unknown", _UNREAD)
    rope = pair.fields["rope"]
    if trained := pair.trained.get("rope"):
        if dict(rope) != dict(trained):
            return Check(
                name,
                "out",
                f"{_described(rope)} in config.json, and it was trained with {_described(trained)}",
                f"set rope_theta {trained['rope_theta']:g}{_scaling(trained)} in its config.json",
            )
        return Check(name, "ok", f"{_described(rope)}, as in training")
    if not _names_theta(pair.raw) and target["rope_theta"] != DEFAULT_ROPE_THETA:
        return Check(
            name,
            "out",
            f"config.json has no rope_theta, so {DEFAULT_ROPE_THETA:g} is used; the target has "
            f"{target['rope_theta']:g}",
            f'add "rope_theta": {target["rope_theta"]:g} to the drafter\'s config.json',
        )
    if dict(rope) == target:
        return Check(name, "ok", f"{_described(rope)}, as the target")
    told = f"{_described(rope)}, and the target has {_described(target)}"
    if measured is None:
        return Check(name, "unknown", f"{told}; not measured", "run without --quick")
    if measured.is_better("target rope"):
        return Check(
            name,
            "out",
            f"{told}: with that, offline tau is {measured.change('target rope')}",
            f"set rope_theta {target['rope_theta']:g}{_scaling(target)} in its config.json",
        )
    return Check(name, "ok", f"{told}, which does no better")


def target_rope(pair: Pair) -> dict[str, Any]:
    """The target's rotation in the drafter's terms; that of its full layers if it has several."""
    rope = getattr(pair.target_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    values = {name: value for name, value in rope.items() if value is not None}
    base = {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA}
    return base | {name: value for name, value in values.items() if name != "partial_rotary_factor"}


def _names_theta(raw: Mapping[str, Any]) -> bool:
    places = (raw, raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {})
    return any(place.get("rope_theta") is not None for place in places)


def _described(rope: Mapping[str, Any]) -> str:
    return f"theta {rope['rope_theta']:g}{_scaling(rope)}"


def _scaling(rope: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
    kind = rope.get("rope_type", "default")
    return "" if kind == "default" else f" with {kind} {rest}"


def window_check(pair: Pair) -> Check:
    """A sliding window that stands in the config, or stood there, and that no layer has."""
    name = "sliding window"
    if not pair.fields:
        return Check(name, "unknown", _UNREAD)
    found = _windows(pair.fields)
    if pair.trained and found != _windows(pair.trained):
        return Check(
            name,
            "out",
            f"{found} in config.json, and it was trained with {_windows(pair.trained)}",
            "set layer_types, sliding_window and use_sliding_window as they were in training",
        )
    window = pair.raw.get("sliding_window")
    is_off = pair.raw.get("use_sliding_window") is False
    if pair.fields.get("sliding_window") is None and window is not None and not is_off:
        return Check(
            name,
            "out",
            f"config.json has sliding_window {window}, but no sliding layer: it is ignored",
            'name the sliding layers in layer_types, or say "use_sliding_window": false',
        )
    return Check(name, "ok", found)


def _windows(fields: Mapping[str, Any]) -> str:
    kinds = fields["layer_types"]
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    if not sliding:
        return "no sliding window"
    return f"{sliding} of {len(kinds)} layers see {fields.get('sliding_window')} tokens"


_SURE_OF_MASK = "make sure that the drafter was trained with this mask token"


def mask_check(pair: Pair) -> Check:
    """The token that stands for a slot to be filled: it must exist and mean nothing else."""
    name = "mask token"
    if not pair.fields:
        return Check(name, "unknown", _UNREAD)
    mask, trained = pair.fields["mask_token_id"], pair.trained.get("mask_token_id")
    remedy = "set mask_token_id in its config.json to the token that it was trained with"
    if not 0 <= mask < pair.num_rows:
        found = f"{mask} is outside the vocabulary: the target's embedding has {pair.num_rows} rows"
        return Check(name, "out", found, remedy)
    text = _token_text(pair, mask)
    if trained is not None and mask != trained:
        was = _token_text(pair, trained)
        return Check(name, "out", f"{mask} {text}, and it was trained with {trained} {was}", remedy)
    if mask in _template_ids(pair):
        found = f"{mask} {text} is written by the chat template: a slot looks like text"
        return Check(name, "out", found, remedy)
    if mask in pair.tokenizer.eos_ids:
        found = f"{mask} {text} ends an answer too"
        return Check(name, "warning", found, _SURE_OF_MASK)
    if mask < pair.num_tokens and mask not in pair.tokenizer.backend.get_added_tokens_decoder():
        found = f"{mask} {text} is a token of ordinary text"
        return Check(name, "warning", found, _SURE_OF_MASK)
    return Check(name, "ok", f"{mask} {text}")


def _token_text(pair: Pair, token_id: int) -> str:
    text = pair.tokenizer.backend.id_to_token(token_id)
    return "(a row of padding)" if text is None else repr(text)


def _template_ids(pair: Pair) -> set[int]:
    """Tokens that stand in every conversation."""
    if not pair.tokenizer.has_chat_template:
        return set()
    roles = ("user", "assistant", "user")
    return set(pair.tokenizer.encode_chat([{"role": role, "content": "a"} for role in roles]))


def layers_check(pair: Pair, measured: Offline | None) -> Check:
    """Features from one layer lower or higher: the difference between two conventions."""
    name = "layer ids"
    if not pair.fields:
        return Check(name, "unknown", _UNREAD)
    ids, trained = list(pair.fields["target_layer_ids"]), pair.trained.get("target_layer_ids")
    if not ids:
        return Check(name, "ok", "the drafter reads no features")
    last = pair.target_config.num_hidden_layers - 1
    if wrong := [index for index in ids if not 0 <= index <= last]:
        return Check(
            name,
            "out",
            f"{ids}: the target has layers 0 to {last}, so not {wrong}",
            "target_layer_ids count layers from 0 and refer to their outputs",
        )
    for variant, by in (("one lower", -1), ("one higher", 1)):
        if measured is not None and measured.is_better(variant):
            better = [index + by for index in ids]
            return Check(
                name,
                "out",
                f"{ids}: with {better}, {variant}, offline tau is {measured.change(variant)}",
                f"off by one: set target_layer_ids to {better} in its config.json",
            )
    if trained is not None and ids != list(trained):
        remedy = f"set target_layer_ids to {list(trained)} in its config.json"
        return Check(name, "out", f"{ids}, and it was trained with {list(trained)}", remedy)
    if measured is not None:
        return Check(name, "ok", f"{ids}; neighbors do no better ({measured.described()})")
    if trained is not None:
        return Check(name, "ok", f"{ids}, as in training")
    return Check(name, "unknown", f"{ids}; not measured", "run without --quick")


def vocabulary_check(pair: Pair, measured: Offline | None) -> Check:
    """Sizes that differ by padding, and guesses that no text can contain."""
    name = "vocabulary"
    if not pair.fields:
        return Check(name, "unknown", _UNREAD)
    rows, known = pair.num_rows, pair.num_tokens
    size, target_size = pair.fields["vocab_size"], pair.target_config.vocab_size
    if size != target_size:
        return Check(
            name,
            "out",
            f"{size} tokens in the drafter and {target_size} in the target",
            f"if they differ by padding only, set vocab_size {target_size} in its config.json",
        )
    if known > rows:
        found = f"the tokenizer has {known} tokens and the target's embedding {rows} rows"
        return Check(name, "out", found, "use the tokenizer of this target")
    try:
        chosen = read_draft_vocabulary(pair.drafter_folder, size)
    except ModelError as error:
        return Check(name, "out", str(error))
    if beyond := [token for token in chosen or () if token >= known]:
        return Check(
            name,
            "out",
            f"draft_vocabulary.json names {len(beyond)} tokens that the tokenizer does not have",
            "it belongs to another target: delete it, or download the drafter again",
        )
    return _padding_check(name, rows - known, len(chosen) if chosen else size, measured)


def _padding_check(name: str, padding: int, num_guessable: int, measured: Offline | None) -> Check:
    found = f"{num_guessable} tokens can be proposed, {padding} rows are padding"
    if measured is not None and measured.padding_share > MAX_PADDING_SHARE:
        return Check(
            name,
            "out",
            f"{found}, and {measured.padding_share:.0%} of the draft tokens are such rows",
            "write the ids that exist into draft_vocabulary.json beside the drafter",
        )
    return Check(name, "ok", found)


def fit_check(pair: Pair, failure: str | None, others: list[Check]) -> Check:
    """Whether the pair runs at all; what another line has found already is not told twice."""
    name, reason = "pair", pair.refusal or failure
    if reason is None and not pair.fills_blocks:
        assert pair.shape is not None
        about = f"{pair.shape.kind}, paths of up to {pair.shape.longest_path} tokens"
        return Check(name, "ok", f"sizes fit; {about}")
    if reason is None:
        layers = counted(pair.fields["num_hidden_layers"], "layer")
        return Check(name, "ok", f"sizes fit; {layers}, blocks of {pair.fields['block_size']}")
    if pair.refusal and any(check.mark == "out" for check in others):
        return Check(name, "unknown", "not tried until the rest is fixed")
    what, _, remedy = reason.rpartition("; ")
    return Check(name, "out", what or reason, remedy if what else "")
