"""Everything that decides a training run, in one frozen dataclass."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from blockdraft.core.errors import ConfigError

PositionWeights = Literal["dpace", "decay", "uniform"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one training run. Times are in minutes unless the name says otherwise.

    Attributes that need a word:
        target: folder of the frozen target.
        data: JSONL files of the target's own answers.
        out: folder of the run: `drafter/`, `log.jsonl`, `state.pt`.
        init_from: folder of a drafter to continue from with its weights and shape, except the block
            size; None starts from random weights of the shape given below.
        mask_token_id: None picks a token that no text uses.
        feature_cache: folder that keeps the target's features on disk for later passes; 2 bytes *
            hidden size * (num_features + 1) a token. None computes them in every pass.
        batch_sequences: sequences a step.
        num_anchors: blocks per sequence and step, drawn anew each time.
        anchors_per_forward: blocks of each sequence that one draft forward holds. Small groups
            waste less attention, because blocks do not see each other, and need less memory.
        distill_share: share of the loss that follows the target's distribution rather than the
            token that it chose.
        num_frequent, num_random: the vocabulary of the loss, see `PartialVocabulary`;
            num_frequent 0 takes the whole vocabulary.
        draft_vocabulary: the most frequent answer tokens, so many, are all that the drafter will
            guess, see `models.draft_vocabulary`; 0 for everything.
        max_minutes, max_steps: whichever comes first ends the run, and one may be None; the
            schedule follows the share that is done. Only a run without max_minutes is the same
            each time.
        lr: of the matrices (Muon, matched to AdamW's step size) and of the norms (AdamW).
        ema_decay: of the averaged weights that are evaluated and saved; 0 saves the last ones.
        threads: torch threads; None keeps torch's choice.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    target: Path
    data: tuple[Path, ...]
    out: Path
    init_from: Path | None = None

    num_layers: int = 5
    num_features: int = 5
    block_size: int = 8
    mask_token_id: int | None = None

    held_out_share: float = 0.02
    min_response_len: int = 8
    max_len: int = 1024
    feature_cache: Path | None = None

    batch_sequences: int = 24
    num_anchors: int = 40
    anchors_per_forward: int = 8
    distill_share: float = 0.5
    position_weights: PositionWeights = "dpace"
    dpace_alpha: float = 0.5
    decay_gamma: float = 4.0
    num_frequent: int = 6144
    num_random: int = 1024
    draft_vocabulary: int = 16384

    max_minutes: float | None = 60.0
    max_steps: int | None = None
    lr: float = 3e-3
    min_lr_share: float = 0.02
    warmup_steps: int = 20
    weight_decay: float = 0.0
    momentum: float = 0.95
    grad_clip: float = 1.0
    ema_decay: float = 0.98

    eval_minutes: float = 10.0
    eval_sequences: int = 96
    save_minutes: float = 5.0
    seed: int = 0
    device: str = "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            self._check(name, _is_of(getattr(self, name), kind), _described(kind))
        if not self.data:
            raise ConfigError("data names no file; give at least one JSONL file of answers")
        for name in (
            *("num_layers", "num_features", "min_response_len", "batch_sequences", "num_anchors"),
            *("anchors_per_forward", "eval_sequences"),
        ):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "grad_clip", "decay_gamma", "eval_minutes", "save_minutes"):
            self._check(name, getattr(self, name) > 0, "above 0")
        for name in (
            "num_frequent",
            "num_random",
            "draft_vocabulary",
            "warmup_steps",
            "weight_decay",
        ):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("distill_share", "dpace_alpha", "min_lr_share"):
            self._check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        for name in ("ema_decay", "momentum", "held_out_share"):
            self._check(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        if self.max_minutes is None and self.max_steps is None:
            raise ConfigError("max_minutes and max_steps are both unset; the run would not end")
        for name in ("max_minutes", "max_steps", "threads"):
            self._check(name, getattr(self, name) is None or getattr(self, name) > 0, "above 0")
        self._check("mask_token_id", (self.mask_token_id or 0) >= 0, "at least 0")
        self._check("seed", 0 <= self.seed < 2**63, "at least 0 and below 2^63")
        self._check("block_size", self.block_size >= 2, "at least 2")
        self._check("max_len", self.max_len > self.min_response_len, "above min_response_len")

    def _check(self, name: str, good: bool, rule: str) -> None:
        if not good:
            raise ConfigError(f"{name} is {_plain(getattr(self, name))!r}; it must be {rule}")

    def to_dict(self) -> dict[str, object]:
        """The settings as JSON values."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a path",
    type(None): "unset",
}


def _is_of(value: object, kind: Any) -> bool:
    """True if a value is of a field's type; a whole number passes for a float, a bool for none."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(kind, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(v, get_args(kind)[0]) for v in value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if isinstance(kind, UnionType):
        return " or ".join(_described(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {_described(get_args(kind)[0])}"
    return _NAMES[kind]
