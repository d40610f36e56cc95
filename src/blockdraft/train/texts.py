"""How much there is to train on: counted where the answers exist, expected where they do not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockdraft.core.errors import ConfigError
from blockdraft.data.config import DataConfig
from blockdraft.data.dataset import read_examples, split_held_out
from blockdraft.data.gathering import chosen, gather_prompts
from blockdraft.data.generate import load_tokenizers
from blockdraft.data.holding_out import is_held_out
from blockdraft.data.prompts import SELF_WRITTEN_TOKENS, Prompt, prompt_ids
from blockdraft.data.shards import read_manifest
from blockdraft.data.store import Example, TextStore
from blockdraft.train.config import TrainConfig
from blockdraft.train.prepare import check_same_target, read_data

SAMPLED_PROMPTS = 200
"""Prompts that are counted in tokens; the others are taken to be like them."""
LEAST_HELD_OUT = 0.5
"""Expected prompts under which it is likelier than not that none is held out."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Numbers of answers, and of tokens of those to train on.

    train, held_out: those that exist. num_expected: of all answers, those yet to be written, which
    are counted as if none ended early or was left out. expected: tokens that will be among them.
    """

    train: Sequence[Example]
    held_out: Sequence[Example]
    num_train: int
    num_held_out: int
    num_tokens: int
    num_answer_tokens: int
    num_expected: int = 0
    expected: tuple[Example, ...] = ()

    @property
    def examples(self) -> TextStore:
        """What exists, and what stands for the answers to come."""
        return TextStore.of_parts([self.train, self.held_out, self.expected])


def are_written(answers: DataConfig) -> bool:
    """True once `blockdraft data` has finished with the folder."""
    return "shards" in (read_manifest(answers.output) or {})


def count_texts(config: TrainConfig, answers: DataConfig | None) -> Texts:
    """What a run will train on; `answers` are written at its start unless they are there.

    Raises:
        ConfigError: prompts or data are not usable, or the answers to come will not be.
        ModelError: nothing can be asked in the target's template.
    """
    if answers is None or are_written(answers):
        return _counted(*read_data(config))
    check_same_target(config.data, config.target)
    others = [path for path in config.data if path != answers.output]
    found = (
        read_examples(others, min_response_len=config.min_response_len, max_len=config.max_len)
        if others
        else []
    )
    existing = _counted(*split_held_out(found, config.held_out_share))
    return _with_expected(existing, config, answers)


def _counted(train: TextStore, held_out: TextStore) -> Texts:
    return Texts(
        train=train,
        held_out=held_out,
        num_train=len(train),
        num_held_out=len(held_out),
        num_tokens=int(train.lengths.sum()),
        num_answer_tokens=int((train.lengths - train.prompt_lens).sum()),
    )


def _with_expected(existing: Texts, config: TrainConfig, answers: DataConfig) -> Texts:
    prompts, _ = gather_prompts(answers)
    stop_ids, tokenizer = load_tokenizers(answers, config.target, prompts)
    _check_length(existing, config, answers)
    if not answers.num_self_written:
        prompts = chosen(answers, prompts)
    num_prompts = len(prompts) + answers.num_self_written
    num_prompts = min(num_prompts, answers.limit or num_prompts)
    each: float = sum(answers.samples if t > 0 else 1 for t in answers.temperatures)
    if answers.mix_temperatures:
        each /= len(answers.temperatures)
    turns = [min(len(prompt.turns), answers.max_turns) for prompt in prompts]
    number = round(num_prompts * each * (sum(turns) / len(turns) if turns else 1))
    if not number:
        raise ConfigError("no usable prompt is left; give other prompts")
    share = _held_out_share(prompts, config, answers)
    if existing.num_held_out + share * num_prompts < LEAST_HELD_OUT:
        raise ConfigError(
            f"of {num_prompts} prompts none is expected to be held out, at held_out_share "
            f"{config.held_out_share:g}; give more prompts, or raise held_out_share"
        )
    held_out = round(number * share)
    train = number - held_out
    if not existing.num_train + train:
        raise ConfigError(
            f"{num_prompts} prompts would all be held out; give more, or lower held_out_share"
        )
    some = prompts[:: max(1, len(prompts) // SAMPLED_PROMPTS)]
    encoded = [prompt_ids(tokenizer, prompt, (), answers.thinking) for prompt in some]
    prompt_len = sum(map(len, encoded)) / len(encoded) if encoded else SELF_WRITTEN_TOKENS
    answer_len = min(answers.max_tokens, config.max_len)
    text_len = min(config.max_len, answer_len + prompt_len)
    return Texts(
        train=existing.train,
        held_out=existing.held_out,
        num_train=existing.num_train + train,
        num_held_out=existing.num_held_out + held_out,
        num_tokens=existing.num_tokens + round(train * text_len),
        num_answer_tokens=existing.num_answer_tokens + train * answer_len,
        num_expected=number,
        expected=(_stand_in(encoded, stop_ids),),
    )


def _check_length(existing: Texts, config: TrainConfig, answers: DataConfig) -> None:
    """Refuse to write answers of which none could be trained on."""
    if answers.max_tokens < config.min_response_len:
        raise ConfigError(
            f"answers.max_tokens is {answers.max_tokens}, and answers under min_response_len "
            f"{config.min_response_len} are left out; raise the first, or lower the second"
        )
    train = TextStore.of(existing.train)
    existing_len = int((train.lengths - train.prompt_lens).max(initial=0))
    if max(answers.max_tokens, existing_len) < config.block_size:
        raise ConfigError(
            f"answers.max_tokens is {answers.max_tokens}, fewer than a block of "
            f"{config.block_size}; raise it, or lower block_size"
        )


def _held_out_share(prompts: Sequence[Prompt], config: TrainConfig, answers: DataConfig) -> float:
    """Of the prompts: those that are there are known, those that the target writes are not."""
    share = config.held_out_share
    known = sum(is_held_out(prompt.id, share) for prompt in prompts)
    written = answers.num_self_written
    return (known + share * written) / max(1, len(prompts) + written)


def _stand_in(encoded: Sequence[Sequence[int]], stop_ids: Iterable[int]) -> Example:
    """The tokens that are sure to be in the texts to come, which no mask may be."""
    prompt_tokens = {token for ids in encoded for token in ids}
    return Example(
        id="expected",
        set="expected",
        prompt_ids=tuple(sorted(prompt_tokens)),
        response_ids=tuple(sorted(stop_ids)),
    )
