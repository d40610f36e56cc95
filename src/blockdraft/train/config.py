"""Everything that decides a training run, in one frozen dataclass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockdraft.core.config import DeviceMap, Quantize
from blockdraft.core.errors import ConfigError
from blockdraft.core.settings import check_kinds, require, to_dict
from blockdraft.models.draft.config_reader import DFLASH2_KEYS

PositionWeights = Literal["dpace", "decay", "uniform"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one training run.

    Each is explained here once, in the order of the fields; `blockdraft train --keys` prints it:
        target: folder or name of the target model, which is not trained.
        data: JSONL files of the target's own answers, or folders that `blockdraft data` wrote.
        out: folder of the run. It gets `drafter/` (the best drafter), `last/` (the newest one),
            `index.html` (curves), `log.jsonl` and `state.pt` (to resume from).
        init_from: folder of a drafter to continue training. Its weights, shape and mask token are
            kept; the block size may change. A language model is trained as a draft_model. None
            makes a new drafter from the settings below.
        only_adapter: train only what joins the drafter of `init_from` to its target: the fusion of
            the features, and the norms. For a target whose weights changed a little, rounded or
            fine-tuned ones.
        quantize: round the target's weights, as serving does with --quantize. None keeps them.
        init: how a new drafter starts: with random weights, or with copies of the target's last
            layers.
        architecture: what drafts. None takes that of `init_from`, or dflash for a new drafter. If
            `init_from` is a dflash drafter, dflash2 adds its parts so that the output is the same
            at first. The others are what DFlash is compared with: diffusion fills blocks without
            features of the target; eagle3 extrapolates features token by token; draft_model is a
            causal LM of the target's class with fewer layers.
        num_denoising_steps: forwards in which a diffusion drafter fills a block. None takes those
            of `init_from`, or 1.
        conv_kernel_size, conv_group_size, selector_rank, selector_top_k: sizes of the convolutions
            and of the candidate selector of dflash2. None takes those of `init_from`, or 2, 16, 256
            and 16.
        selector_weight: weight of the selector's loss (dflash2) beside the loss of the drafter.
        num_layers, num_features: layers of the drafter, and number of target layers whose hidden
            states (features) it reads. None takes those of `init_from`, or 5.
        block_size: length of a block: its anchor (the last known token) and the slots to predict. A
            block of 8 drafts at most 7 tokens. For eagle3 and draft_model: the tokens of a drafted
            chain and one more.
        mask_token_id: token that stands in the slots to predict. None picks one that no answer or
            prompt contains.
        held_out_share: share of the prompts whose answers are not trained on; the drafter is
            evaluated on them.
        min_response_len: shorter answers, in tokens, are left out. At least 2.
        max_len: most tokens of prompt and answer together. The end of longer answers is cut off.
        feature_cache: folder that keeps the target's features on disk, so that later epochs need no
            target pass. It takes 2 bytes * hidden size * (num_features + 1) for each token. None
            computes the features in every epoch.
        batch_sequences: rows of a batch, over all processes. A row is one text, or several with
            `pack_len`.
        accumulate: batches whose gradients are added up before each optimizer step.
        pack_len: pack several texts into rows of this many tokens; no text sees another. None gives
            every text a row of its own.
        num_anchors: blocks that are trained in each row; their positions are redrawn for each step.
        anchors_per_forward: blocks of each row that one forward pass of the drafter computes. Fewer
            need less memory, and waste less attention: blocks do not see each other.
        attention: flex skips masked positions and needs a GPU; dense computes them; auto is flex on
            a GPU, else dense.
        distill_share: share of the loss that is distillation from the target's probabilities; the
            rest is cross entropy on the tokens of the answer. 0 needs less computing.
        position_weights, dpace_alpha, decay_gamma: weight of each slot in the loss. dpace (arXiv
            2605.18810) estimates from the drafter's probabilities how much a slot adds to the
            accepted length; dpace_alpha goes from 0 (trust these probabilities) to 1 (ignore them).
            decay is exp(-j / decay_gamma), where j is 0 for the first slot after the anchor.
            uniform gives all slots the same weight.
        fused_loss: use the faster loss whose gradient is written by hand. Set false if you edit
            the loss in `train/loss.py`.
        num_frequent, num_random: the loss is computed over a part of the vocabulary: the tokens
            that are most frequent in the answers, and random others, redrawn for each step. If
            num_frequent is 0, it is computed over the whole vocabulary.
        draft_vocabulary: the drafter only ever proposes this many tokens, the most frequent ones of
            the answers, which makes it faster. 0 allows the whole vocabulary, which a draft_model
            always has.
        max_minutes, max_steps: the run ends at the first limit that it reaches; one of them may be
            None. The learning rate follows the same progress. Only a run without max_minutes gives
            the same result each time.
        optimizer: what updates the weight matrices. Everything else is always updated by AdamW.
        lr: highest learning rate, for all weights (Muon's step is scaled to AdamW's).
        min_lr_share: the learning rate falls in a cosine to this share of `lr`.
        warmup_steps: steps over which the learning rate rises at the start.
        weight_decay: weight decay of the weight matrices.
        momentum: momentum of Muon; AdamW has its own constants.
        grad_clip: largest norm of the gradient; a larger gradient is scaled down to it.
        ema_decay: decay of the moving average of the weights, which is what is evaluated and saved.
            0 takes the weights themselves.
        eval_minutes, eval_steps: an evaluation is due when either has passed since the last one.
        eval_sequences: most held-out answers that an evaluation reads.
        tau_prompts: files of prompts for real decoding at each evaluation, which measures tau, the
            tokens per target pass. Empty takes the prompts of held-out answers.
        tau_limit: most prompts to decode of each file or set. 0 skips real decoding.
        tau_max_tokens: most tokens to decode for each of these prompts.
        save_minutes, save_steps: the state is saved when either has passed since the last time.
        tensorboard: also write TensorBoard event files to `out`; needs the package tensorboard.
        seed: seed of everything random in the run.
        device: auto (a GPU if CUDA finds one, else the CPU), cpu, or a torch device such as cuda:1.
        dtype: precision of target and drafter; the optimizer keeps float32 copies of the weights.
            auto is bfloat16 where the device multiplies it in hardware, else float32.
        threads: CPU threads of torch. None is torch's choice, or fewer while other programs keep
            the cores busy.
        shard_target: with several processes, divide the target's layers among them (FSDP2).
        shard_drafter: with several processes, divide the drafter's weights, gradients and optimizer
            state among them (FSDP2).
        device_map: with a single process, spread the target over its devices, as in transformers.
            With device_map or shard_target, set tau_limit to 0: real decoding needs the whole
            target on one device.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    target: Path
    data: tuple[Path, ...]
    out: Path
    init_from: Path | None = None
    only_adapter: bool = False
    quantize: Quantize | None = None
    init: Literal["random", "target"] = "random"

    architecture: Literal["dflash", "dflash2", "diffusion", "eagle3", "draft_model"] | None = None
    num_denoising_steps: int | None = None
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
    device_map: DeviceMap | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        if not self.data:
            raise ConfigError("data names no file; give at least one JSONL file of answers")
        for name in (
            *("batch_sequences", "accumulate", "num_anchors"),
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
            *("num_layers", "num_features", "num_denoising_steps", *DFLASH2_KEYS),
        ):
            require(self, name, getattr(self, name) is None or getattr(self, name) > 0, "above 0")
        require(self, "mask_token_id", (self.mask_token_id or 0) >= 0, "at least 0")
        require(self, "seed", 0 <= self.seed < 2**63, "at least 0 and below 2^63")
        self._check_lengths()
        self._check_folders()
        if self.attention == "flex" and self.device == "cpu":
            raise ConfigError("attention=flex has no gradient on a CPU; use auto or dense")
        if self.init_from is not None and self.init != "random":
            raise ConfigError("init_from and init=target exclude each other; leave one out")

        if self.only_adapter and self.init_from is None:
            raise ConfigError(
                "only_adapter trains a few weights of an existing drafter; give init_from"
            )

        self._check_spread()

    def _check_folders(self) -> None:
        """Refuse to mix what may be deleted at any time with what may not."""
        answers = {path.resolve() for path in self.data}
        require(self, "out", self.out.resolve() not in answers, "a folder of its own, not data's")
        cache = self.feature_cache
        good = cache is None or cache.resolve() not in answers | {self.out.resolve()}
        require(self, "feature_cache", good, "a folder of its own, not out or data's")

    def _check_lengths(self) -> None:
        # Of an answer of one token nothing is drafted: it has an anchor and no slot.
        for name in ("block_size", "min_response_len"):
            require(self, name, getattr(self, name) >= 2, "at least 2")
        least = self.min_response_len
        require(self, "max_len", self.max_len > least, f"above min_response_len, {least}")
        fits = self.pack_len is None or self.pack_len >= self.max_len
        require(self, "pack_len", fits, f"unset, or at least max_len, {self.max_len}")

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
