"""The truth while training: tau and speed-up of real decoding, by the engine that serves."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Protocol

from transformers import AutoTokenizer, PreTrainedModel

from blockdraft.core.config import LLMConfig, Thinking
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.core.files import full_disk_refused
from blockdraft.core.request import SamplingParams
from blockdraft.data.prompts import Prompt, check_template, prompt_ids, read_prompts
from blockdraft.data.shards import told_thinking
from blockdraft.data.store import Example
from blockdraft.engine.bundled_prompts import decode_alone
from blockdraft.engine.engine import Engine
from blockdraft.engine.load import free_dropped_models, make_drafter, make_target
from blockdraft.engine.record import SampleRecord
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.models.supported import context_of
from blockdraft.speculate.drafters.kinds import load_checkpoint
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.text.kinds import loops
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.train.config import TrainConfig

Encoded = tuple[str, tuple[int, ...]]
"""The set of a prompt, and its token ids."""


class Saved(Protocol):
    """A drafter that can be written as serving loads it."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write it."""


@dataclass(frozen=True, kw_only=True)
class TrueTau:
    """Both by set, and over "all" and "all without loops"; empty if nothing was decoded.

    tau: acceptance length. speedup: seconds of plain over seconds of drafted decoding of the same
    tokens, from the first to the last, whole blocks drafted; the median of the prompts, since a
    machine at work has moments in which one of them takes ten times as long.
    """

    tau: Mapping[str, float]
    speedup: Mapping[str, float]


@dataclass
class _Sums:
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    speedups: list[float] = field(default_factory=list)


class RealDecoding:
    """Measures a drafter: greedy decoding of prompts, one at a time, drafted and plain in turns.

    Args:
        model: the target; it is left as it was.
        eos_ids: end an answer.
        prompts: to decode.
        max_tokens: decoded for each.
        asked: what the prompts say, whatever their tokens.

    `prompts_sha256` tells what is decoded from other measurements; empty without prompts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: frozenset[int],
        prompts: Sequence[Encoded],
        max_tokens: int,
        asked: str,
    ) -> None:
        self._model = model
        self._eos_ids = eos_ids
        self._prompts = prompts
        self._params = SamplingParams(max_tokens=max_tokens)
        name = f"{asked} {max_tokens}".encode()
        self.prompts_sha256 = hashlib.sha256(name).hexdigest() if prompts else ""

    def measure(self, drafter: Saved, tick: Callable[[], object]) -> TrueTau:
        """Decode with the drafter as it is, saved and loaded.

        `tick` is called on the way, so that a clock can tell work from a stopped process.

        Raises:
            DiskError: the disk of temporary files is full.
        """
        if not self._prompts:
            return TrueTau(tau={}, speedup={})
        with TemporaryDirectory() as folder:
            with full_disk_refused(Path(folder)):
                drafter.save_pretrained(folder)
            try:
                return self._measured(Path(folder), tick)
            finally:
                # Else its keys and values stay on a card, beside those of the next evaluation.
                free_dropped_models()

    def _measured(self, folder: Path, tick: Callable[[], object]) -> TrueTau:
        sums: dict[str, _Sums] = defaultdict(_Sums)
        with serving(self._model, folder) as served:
            plain = Engine(served.target, NoDrafter())
            for name, prompt_ids in self._prompts:
                drafted = self._decode(served, prompt_ids, tick)
                oracle = self._decode(plain, prompt_ids, tick)
                names = [name, "all"]
                if not loops(drafted.sequence.output_ids):
                    names.append("all without loops")
                seconds, plain_seconds = _decode_seconds(drafted), _decode_seconds(oracle)
                for counted in names:
                    sums[counted].acceptance.add(drafted.acceptance)
                    if seconds:
                        sums[counted].speedups.append(plain_seconds / seconds)
        return TrueTau(
            tau={name: s.acceptance.acceptance_length for name, s in sums.items()},
            speedup={name: median(s.speedups) for name, s in sums.items() if s.speedups},
        )

    def _decode(
        self, engine: Engine, prompt_ids: Sequence[int], tick: Callable[[], object]
    ) -> SampleRecord:
        return decode_alone(engine, prompt_ids, self._params, self._eos_ids, tick)


@contextmanager
def serving(model: PreTrainedModel, folder: Path) -> Iterator[Engine]:
    """An engine of a target and the drafter in a folder; afterwards the target is as it was.

    Raises:
        ModelError: the target cannot be served.
    """
    checkpoint = load_checkpoint(folder, model, model.dtype, str(model.device))
    try:
        # The run goes on with the same weights.
        target = make_target(LLMConfig(max_concurrency=1), model, checkpoint, keep_weights=True)
    except ModelError as error:
        raise ModelError(f"{error}; or set tau_limit=0 to skip real decoding") from error
    with target.released_after():
        yield Engine(target, make_drafter(target, checkpoint))


def _decode_seconds(record: SampleRecord) -> float:
    """From the first token to the last: the prompt's pass is the same both ways."""
    if record.first_token_at is None or record.finished_at is None:
        return 0.0
    return record.finished_at - record.first_token_at


def real_decoding(
    config: TrainConfig, model: PreTrainedModel, held_out: Sequence[Example]
) -> RealDecoding:
    """What a run measures, see `prompts_to_decode`."""
    prompts = prompts_to_decode(config, model, held_out)
    eos_ids = load_tokenizer(config.target).eos_ids
    # By what is said: a template may write today's date into the tokens.
    asked = repr(_read_named(config) if config.tau_prompts else prompts)
    if config.tau_prompts and (thinking := _thinking_of(config)) != "template":
        asked += f" thinking {thinking}"
    return RealDecoding(model, eos_ids, prompts, config.tau_max_tokens, asked)


def prompts_to_decode(
    config: TrainConfig, model: PreTrainedModel, held_out: Sequence[Example]
) -> list[Encoded]:
    """The prompts that a run names, or those of its held-out answers that fit the context.

    The target may be without weights.

    Raises:
        ConfigError: a file of prompts is missing, damaged or empty, a prompt cannot be asked, or
            tau_max_tokens leaves no room for it.
        ModelError: there is no template to ask in.
    """
    if not config.tau_limit:
        return []
    context = context_of(model)
    room = context - config.tau_max_tokens
    prompts = _named_prompts(config) if config.tau_prompts else []
    if prompts:
        needed = max(len(prompt_ids) for _, prompt_ids in prompts)
    else:
        needed = min((len(example.prompt_ids) for example in held_out), default=1)
    if needed > room:
        raise ConfigError(
            f"tau_max_tokens is {config.tau_max_tokens}, which after a prompt of {needed} tokens "
            f"exceeds the target's context of {context}; lower it, or give shorter tau_prompts"
        )
    return prompts or _held_out_prompts(config, held_out, room)


def _read_named(config: TrainConfig) -> list[Prompt]:
    return [
        prompt for path in config.tau_prompts for prompt in read_prompts(path)[: config.tau_limit]
    ]


def _named_prompts(config: TrainConfig) -> list[Encoded]:
    tokenizer = AutoTokenizer.from_pretrained(
        config.target, local_files_only=True, trust_remote_code=False
    )
    prompts = _read_named(config)
    if not prompts:
        names = ", ".join(map(str, config.tau_prompts))
        raise ConfigError(f"tau_prompts {names} hold no prompt; give others, or leave it out")
    thinking = _thinking_of(config)
    if not all(prompt.is_plain for prompt in prompts):
        check_template(tokenizer, thinking)
    return [(prompt.set, prompt_ids(tokenizer, prompt, (), thinking)) for prompt in prompts]


def _thinking_of(config: TrainConfig) -> Thinking:
    """As all answers to train on were asked for; the template's default if that is not known."""
    told = told_thinking(config.data)
    return "on" if told == {"on"} else "off" if told == {"off"} else "template"


def _held_out_prompts(config: TrainConfig, held_out: Iterable[Example], room: int) -> list[Encoded]:
    """The first distinct prompts of each set of at most `room` tokens; an empty one is none."""
    by_set: dict[str, dict[tuple[int, ...], None]] = defaultdict(dict)
    for example in held_out:
        if 0 < len(example.prompt_ids) <= room:
            by_set[example.set][example.prompt_ids] = None
    return [
        (name, prompt_ids)
        for name, prompts in sorted(by_set.items())
        for prompt_ids in list(prompts)[: config.tau_limit]
    ]
