"""Everything that decides a training run, in one frozen dataclass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockdraft.core.errors import ConfigError
from blockdraft.core.settings import check_kinds, require, to_dict
from blockdraft.models.draft_config_reader import DFLASH2_KEYS

PositionWeights = Literal["dpace", "decay", "uniform"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one training run. Times are in minutes unless the name says otherwise.

    Attributes that need a word:
        target: folder of the frozen target.
        data: JSONL files of the target's own answers, or folders that `blockdraft data` made.
        out: folder of the run: `drafter/` (the best), `last/`, `index.html`, `log.jsonl`,
            `state.pt`.
        init_from: folder of a drafter to continue from with its weights and shape, except the block
            size; it keeps its mask token too. None starts from the shape given below.
        init: of a new drafter: random weights, or those of the target's last layers.
        architecture: None takes that of `init_from`, or dflash. A dflash drafter may go on as
            dflash2, which then computes the same to begin with.
        conv_kernel_size, conv_group_size, selector_rank, selector_top_k: of dflash2, see
            `models.draft_config`; None takes those of `init_from`, or 2, 16, 256 and 16.
        selector_weight: of the loss of dflash2's selector, beside that of the slots.
        num_layers, num_features: of the drafter, and how many layers of the target it reads; None
            takes those of `init_from`, or 5.
        block_size: slots of a block with its anchor.
        mask_token_id: None picks a token that no text uses.
        held_out_share: of the prompts; their answers judge the drafter.
        min_response_len: answers of fewer tokens are left out.
        max_len: of prompt and answer in tokens; longer answers are cut.
        feature_cache: folder that keeps the target's features on disk for later passes; 2 bytes *
            hidden size * (num_features + 1) a token. None computes them in every pass.
        batch_sequences: rows of a batch, over all processes.
        accumulate: batches whose gradients make one step.
        pack_len: tokens of a row that holds several texts, none of which sees another; None gives
            every text a row of its own.
        num_anchors: blocks per row and step, drawn anew each time.
        anchors_per_forward: blocks of each row that one draft forward holds. Small groups
            waste less attention, because blocks do not see each other, and need less memory.
        attention: flex skips what is masked, and needs a GPU; auto takes it there.
        distill_share: share of the loss that follows the target's distribution rather than the
            token that it chose.
        position_weights, dpace_alpha, decay_gamma: what a slot counts, see `train.loss`; alpha is
            of dpace, gamma of decay.
        fused_loss: compute the loss with a gradient made by hand, which is faster; false takes the
            plain form in `train/loss.py`, which is the one to edit.
        num_frequent, num_random: the vocabulary of the loss, see `PartialVocabulary`;
            num_frequent 0 takes the whole vocabulary.
        draft_vocabulary: the most frequent answer tokens, so many, are all that the drafter will
            guess, see `models.draft_vocabulary`; 0 for everything.
        max_minutes, max_steps: whichever comes first ends the run, and one may be None; the
            schedule follows the share that is done. Only a run without max_minutes is the same
            each time.
        optimizer: of the matrices; AdamW always updates the norms.
        lr: of matrices (Muon is matched to AdamW's step size) and norms.
        min_lr_share: of lr, reached at the end of the run.
        ema_decay: of the averaged weights that are evaluated and saved; 0 saves the last ones.
        eval_minutes, eval_steps: an evaluation is due when either has passed.
        eval_sequences: held-out answers of each evaluation.
        tau_prompts: files of prompts for real decoding at each evaluation; none takes the prompts
            of held-out answers.
        tau_limit: prompts of each set for that; 0 leaves real decoding out.
        tau_max_tokens: decoded for each of them.
        save_minutes, save_steps: the state is saved when either has passed.
        tensorboard: write event files into `out` too; needs the package tensorboard.
        threads: torch threads; None is torch's choice, fewer where other programs compute.
        shard_target: each of several processes holds a share of the target's layers (FSDP2).
        shard_drafter: each of several processes holds a share of the drafter's parameters, masters,
            gradients, averages and optimizer state (FSDP2).
        device_map: spreads the target of a single process over its devices, as transformers reads
            it, such as "auto". With this or shard_target, real decoding is left to a machine that
            has room for the whole target: tau_limit has to be 0.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    target: Path
    data: tuple[Path, ...]
    out: Path
    init_from: Path | None = None
    init: Literal["random", "target"] = "random"

    architecture: Literal["dflash", "dflash2"] | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    selector_weight: float = 1.0
    num_layers: int | None = None
    num_features: int | None = None
    block_size: int = 8
    mask_token_id: int | None = None

    held_out_share: float = 0.02
    min_response_len: int = 8
    max_len: int = 1024
    feature_cache: Path | None = None

    batch_sequences: int = 24
    accumulate: int = 1
    pack_len: int | None = None
    num_anchors: int = 40
    anchors_per_forward: int = 8
    attention: Literal["auto", "dense", "flex"] = "auto"
    distill_share: float = 0.5
    position_weights: PositionWeights = "dpace"
    dpace_alpha: float = 0.5
    decay_gamma: float = 4.0
    fused_loss: bool = True
    num_frequent: int = 6144
    num_random: int = 1024
    draft_vocabulary: int = 16384

    max_minutes: float | None = 60.0
    max_steps: int | None = None
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: float = 3e-3
    min_lr_share: float = 0.02
    warmup_steps: int = 20
    weight_decay: float = 0.0
    momentum: float = 0.95
    grad_clip: float = 1.0
    ema_decay: float = 0.98

    eval_minutes: float = 10.0
    eval_steps: int | None = None
    eval_sequences: int = 96
    tau_prompts: tuple[Path, ...] = ()
    tau_limit: int = 4
    tau_max_tokens: int = 96
    save_minutes: float = 5.0
    save_steps: int | None = None
    tensorboard: bool = False
    seed: int = 0
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: int | None = None
    shard_target: bool = False
    shard_drafter: bool = False
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        if not self.data:
            raise ConfigError("data names no file; give at least one JSONL file of answers")
        for name in (
            *("min_response_len", "batch_sequences", "accumulate", "num_anchors"),
            *("anchors_per_forward", "eval_sequences", "tau_max_tokens"),
        ):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "grad_clip", "decay_gamma", "eval_minutes", "save_minutes"):
            require(self, name, getattr(self, name) > 0, "above 0")
        for name in (
            *("num_frequent", "num_random", "draft_vocabulary", "warmup_steps", "weight_decay"),
            *("tau_limit", "selector_weight"),
        ):
            require(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("distill_share", "dpace_alpha", "min_lr_share"):
            require(self, name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        for name in ("ema_decay", "momentum"):
            require(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        require(self, "held_out_share", 0 < self.held_out_share < 1, "above 0 and below 1")
        if self.max_minutes is None and self.max_steps is None:
            raise ConfigError("max_minutes and max_steps are both unset; the run would not end")
        for name in (
            *("max_minutes", "max_steps", "threads", "eval_steps", "save_steps"),
            *("num_layers", "num_features", *DFLASH2_KEYS),
        ):
            require(self, name, getattr(self, name) is None or getattr(self, name) > 0, "above 0")
        require(self, "mask_token_id", (self.mask_token_id or 0) >= 0, "at least 0")
        require(self, "seed", 0 <= self.seed < 2**63, "at least 0 and below 2^63")
        require(self, "block_size", self.block_size >= 2, "at least 2")
        require(self, "max_len", self.max_len > self.min_response_len, "above min_response_len")
        fits = self.pack_len is None or self.pack_len >= self.max_len
        require(self, "pack_len", fits, f"unset, or at least max_len, {self.max_len}")
        if self.attention == "flex" and self.device == "cpu":
            raise ConfigError("attention=flex has no gradient on a CPU; use auto or dense")
        if self.init_from is not None and self.init != "random":
            raise ConfigError("init_from and init=target exclude each other; leave one out")

        self._check_spread()

    def _check_spread(self) -> None:
        if not self.shard_target and self.device_map is None:
            return
        if self.shard_target and self.device_map is not None:
            raise ConfigError("shard_target and device_map exclude each other; leave one out")
        if self.tau_limit:
            raise ConfigError(
                f"tau_limit is {self.tau_limit}, and real decoding needs the whole target on one "
                "device; set tau_limit=0, or leave shard_target and device_map out"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether blocks attend with tiles."""
        on_gpu = self.device.partition(":")[0] == "cuda"
        return self.attention == "flex" or (self.attention == "auto" and on_gpu)

    def to_dict(self) -> dict[str, object]:
        """The settings as JSON values."""
        return to_dict(self)
