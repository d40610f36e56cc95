"""The options of a loaded pair of models. Every default stands here, once."""

from dataclasses import dataclass
from typing import Literal

from blockdraft.core.errors import ConfigError
from blockdraft.core.settings import check_kinds
from blockdraft.core.threads import check_threads

DEFAULT_TARGET = "smollm2-135m"

DraftDtype = Literal["auto", "int8", "target"]
Quantize = Literal["int8", "int4"]
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"]
KVCacheDtype = Literal["auto", "int8"]
MOST_DRAFT_TOKENS = 1024
"""Of a step: far more than pay anywhere, and the policy keeps a belief for each."""
Thinking = Literal["template", "on", "off"]
"""What a chat template is told of thinking; "template" leaves its own default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LLMConfig:
    """What to load, and how to run it.

    target, drafter: a name of the catalog, a folder, or a hub id, where `org/name@revision` is a
    branch, tag or commit. The drafter "auto" is the one that the catalog knows for the target;
    "none" or None decodes plainly.
    dtype: "bfloat16", "float32" or "float64"; "auto" is bfloat16 where the device multiplies it in
    hardware, as GPUs do from compute capability 8.0 on, else float32.
    draft_dtype: of the drafter's weights, "int8", or "target" for the target's; "auto" is int8
    where this machine multiplies it faster. Output never depends on it.
    quantize: round the weights of the target's linear layers to groups of whole numbers, "int8" or
    "int4" (the head is int8 then, too); another target with other output. None leaves them.
    device: "auto" is a GPU that CUDA can use, else "cpu"; or a torch device.
    device_map: spread the target's layers over all devices, in one of the ways of transformers; the
    drafter lies beside embedding and head. None puts all on `device`.
    exact: drafted output equals plain output, bit for bit.
    max_concurrency: sequences that advance together. prefill_chunk: prompt tokens a step, of all
    prompts together; each gets 32 at least, so very many prompts make a larger step.
    kv_cache_dtype: of the target's keys and values: "int8", or "auto" for the target's precision.
    int8 takes about half of bfloat16's memory and gives other output; the CPU's kernels read it at
    nearly the same speed, torch's operations more slowly.
    memory: GiB for keys and values of target and drafter; None is room for `max_concurrency`
    sequences of full length, but at most a quarter of the machine's (or container's) memory.
    adaptive: verify as much as pays on this machine, nothing included; False verifies all that is
    drafted.
    num_draft_tokens: the most candidates that are verified for a sequence in one step, the anchor
    not counted, up to 1,024; 0 decodes plainly, without a drafter. None is 15 of the drafter, or a
    whole block if that has more; without `adaptive` a whole block.
    draft_depth: the longest path of them; None is the drafter's own. More candidates than the
    drafter's path is long make a tree, with branches where it is unsure.
    lookup: also draft what followed the same words earlier in prompt and output; None does so
    beside a drafter, True without one too. shared_lookup: in so many tokens of the last outputs of
    all requests too. ngrams: also draft from the drafter's table of n-grams and its Hydra head, if
    it has them, and where lookup is on from the n-grams of prompt and output.
    recheck: test the kernels and time the steps again, instead of taking what an earlier start of
    the same models on this machine found out.
    trust_remote_code: run the code that comes with a model which transformers does not know.
    num_threads: of the whole process, at most the cores that it may use; None leaves torch's
    setting, but for no more than those cores, and fewer where other programs keep them busy.

    Raises:
        ConfigError: a value is of another type, or out of its range.
    """

    target: str = DEFAULT_TARGET
    drafter: str | None = "auto"
    dtype: str = "auto"
    draft_dtype: DraftDtype = "auto"
    quantize: Quantize | None = None
    device: str = "auto"
    device_map: DeviceMap | None = None
    exact: bool = True
    max_concurrency: int = 16
    prefill_chunk: int = 512
    kv_cache_dtype: KVCacheDtype = "auto"
    memory: float | None = None
    adaptive: bool = True
    num_draft_tokens: int | None = None
    draft_depth: int | None = None
    lookup: bool | None = None
    shared_lookup: int = 0
    ngrams: bool = True
    num_threads: int | None = None
    recheck: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("max_concurrency", "prefill_chunk", "draft_depth", "num_threads"):
            _check_count(name, getattr(self, name), 1)
        check_threads("num_threads", self.num_threads)
        check_num_draft_tokens(self.num_draft_tokens)
        if self.device_map is not None and self.device != "auto":
            raise ConfigError(
                f"device is {self.device!r}, and device_map chooses devices too; leave one out"
            )
        if self.memory is not None and not self.memory > 0:
            raise ConfigError(f"memory is {self.memory!r}; give a number of GiB above 0")
        if self.shared_lookup < 0:
            raise ConfigError(
                f"shared_lookup is {self.shared_lookup!r}; give a number of tokens, 0 for none"
            )
        if self.shared_lookup and not self.looks_up(has_drafter=self.names_drafter):
            raise ConfigError(
                f"shared_lookup is {self.shared_lookup}, but lookup is off; turn it on, or leave "
                "out shared_lookup"
            )

    @property
    def drafts(self) -> bool:
        """False if plain decoding was asked for."""
        return self.names_drafter or (self.lookup is True and self.num_draft_tokens != 0)

    @property
    def names_drafter(self) -> bool:
        """True if a model drafts."""
        return self.drafter not in (None, "none") and self.num_draft_tokens != 0

    def looks_up(self, *, has_drafter: bool) -> bool:
        """Whether lookup drafts where a model does so too, or none does."""
        return has_drafter if self.lookup is None else self.lookup


def check_num_draft_tokens(value: object) -> None:
    """Raise ConfigError unless it is a number of candidates, or None for no limit."""
    _check_count("num_draft_tokens", value, 0)
    if isinstance(value, int) and value > MOST_DRAFT_TOKENS:
        raise ConfigError(f"num_draft_tokens is {value}; give at most {MOST_DRAFT_TOKENS}")


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None and (not isinstance(value, int) or value < least):
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {least}")
