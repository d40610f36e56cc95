"""How much there is to train on: counted where the answers exist, expected where they do not."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from blockdraft.core.errors import ConfigError
from blockdraft.train.config import TrainConfig
from blockdraft.train.data import gather_prompts, load_tokenizers
from blockdraft.train.data_config import DataConfig
from blockdraft.train.dataset import Example, read_examples, split_held_out
from blockdraft.train.prepare import check_same_target, read_data
from blockdraft.train.prompts import SELF_WRITTEN_TOKENS, Prompt, prompt_ids
from blockdraft.train.shards import read_manifest

SAMPLED_PROMPTS = 200
"""Prompts that are counted in tokens; the others are taken to be like them."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Numbers of answers, and of tokens of those to train on.

    examples: those that exist. num_expected: of all answers, those yet to be written, which are
    counted as if none ended early or was left out.
    """

    examples: Sequence[Example]
    num_train: int
    num_held_out: int
    num_tokens: int
    num_answer_tokens: int
    num_expected: int = 0


def are_written(answers: DataConfig) -> bool:
    """True once `blockdraft data` has finished with the folder."""
    return "shards" in (read_manifest(answers.output) or {})


def count_texts(config: TrainConfig, answers: DataConfig | None) -> Texts:
    """What a run will train on; `answers` are written at its start unless they are there.

    Raises:
        ConfigError: prompts or data are not usable.
        ModelError: nothing can be asked in the target's template.
    """
    if answers is None or are_written(answers):
        return _counted(*read_data(config))
    check_same_target(config)
    others = [path for path in config.data if path != answers.output]
    found = (
        read_examples(others, min_response_len=config.min_response_len, max_len=config.max_len)
        if others
        else []
    )
    existing = _counted(*split_held_out(found, config.held_out_share))
    return _with_expected(existing, config, answers)


def _counted(train: Sequence[Example], held_out: Sequence[Example]) -> Texts:
    return Texts(
        examples=[*train, *held_out],
        num_train=len(train),
        num_held_out=len(held_out),
        num_tokens=sum(map(len, train)),
        num_answer_tokens=sum(len(example.response_ids) for example in train),
    )


def _with_expected(existing: Texts, config: TrainConfig, answers: DataConfig) -> Texts:
    prompts, _ = gather_prompts(answers)
    _, tokenizer = load_tokenizers(answers, config.target, prompts)
    num_prompts = len(prompts) + answers.num_self_written
    num_prompts = min(num_prompts, answers.limit or num_prompts)
    each = sum(answers.samples if temperature > 0 else 1 for temperature in answers.temperatures)
    turns = [min(len(prompt.turns), answers.max_turns) for prompt in prompts]
    number = round(num_prompts * each * (sum(turns) / len(turns) if turns else 1))
    answer_len = min(answers.max_tokens, config.max_len)
    text_len = min(config.max_len, answer_len + _mean_prompt_len(tokenizer, prompts, answers))
    held_out = round(number * config.held_out_share)
    train = number - held_out
    if not train:
        raise ConfigError("no usable prompt is left; give other prompts")
    return Texts(
        examples=existing.examples,
        num_train=existing.num_train + train,
        num_held_out=existing.num_held_out + held_out,
        num_tokens=existing.num_tokens + round(train * text_len),
        num_answer_tokens=existing.num_answer_tokens + train * answer_len,
        num_expected=number,
    )


def _mean_prompt_len(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], answers: DataConfig
) -> float:
    """Of first turns; those that the target is to write are as long as they may be."""
    some = prompts[:: max(1, len(prompts) // SAMPLED_PROMPTS)]
    lengths = [len(prompt_ids(tokenizer, prompt, (), answers.thinking)) for prompt in some]
    return sum(lengths) / len(lengths) if lengths else SELF_WRITTEN_TOKENS
