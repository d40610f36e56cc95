"""Which turns of the conversations are asked: those whose earlier answers are there."""

import logging
import random
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from blockdraft.core.errors import ConfigError
from blockdraft.data.answer_file import Answered, Key
from blockdraft.data.answers import Job
from blockdraft.data.config import DataConfig
from blockdraft.data.prompts import Prompt, prompt_ids, turn_id
from blockdraft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Asked = tuple[Key, Prompt, tuple[int, ...]]
"""What an answer is known by, the conversation, and the tokens that are to be answered."""


def num_turns(config: DataConfig, prompts: Sequence[Prompt]) -> int:
    """The turns of the longest conversation, as far as they are answered."""
    return min(config.max_turns, max((len(prompt.turns) for prompt in prompts), default=0))


def asked_turns(
    prompts: Sequence[Prompt],
    turn: int,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    answered: Answered,
) -> Iterator[Asked]:
    """Turn `turn` (from 0) of each conversation that got that far: (key, prompt, its tokens)."""
    # It needs llguidance, and training, which reads this module too, does without.
    from blockdraft.text.sent_back import as_sent_back

    serving = Tokenizer(tokenizer, ())
    for prompt in prompts:
        for temperature, sample in _samples(config, prompt):
            keys = [(turn_id(prompt, t), temperature, sample) for t in range(turn + 1)]
            before = [answered[key] for key in keys[:-1] if key in answered]
            is_whole = len(before) == turn and all(answer.response_ids for answer in before)
            if len(prompt.turns) <= turn or not is_whole:
                continue
            sent_back = [as_sent_back(serving, a.prompt_ids, a.response_ids or ()) for a in before]
            yield keys[-1], prompt, prompt_ids(tokenizer, prompt, sent_back, config.thinking)


def num_broken_off(config: DataConfig, prompts: Sequence[Prompt], answered: Answered) -> int:
    """Conversations with turns that are not asked, since an answer before them has no end."""
    number = 0
    for prompt in prompts:
        num_before = min(len(prompt.turns), config.max_turns) - 1
        for temperature, sample in _samples(config, prompt):
            keys = [(turn_id(prompt, turn), temperature, sample) for turn in range(num_before)]
            before = [answered[key] for key in keys if key in answered]
            number += not all(answer.response_ids for answer in before)
    return number


def _samples(config: DataConfig, prompt: Prompt) -> Iterator[tuple[float, int]]:
    """The (temperature, sample) of each answer to a prompt."""
    temperatures = config.temperatures
    if config.mix_temperatures:
        draw = random.Random(f"{config.seed}/{prompt.id}")
        temperatures = (draw.choice(temperatures),)
    for temperature in temperatures:
        for sample in range(config.samples if temperature > 0 else 1):
            yield temperature, sample


def jobs_for(asked: Sequence[Asked], config: DataConfig, answered: Answered) -> Iterator[Job]:
    """What is to be answered, and what was cut off at fewer tokens than are asked for now."""
    too_long = set[str]()
    for key, prompt, ids in asked:
        if key in answered and not answered[key].is_cut_below(config.max_tokens):
            continue
        if len(ids) > config.max_prompt_tokens:
            too_long.add(key[0])
            continue
        name, temperature, sample = key
        yield Job(
            id=name,
            set=prompt.set,
            prompt_ids=ids,
            max_tokens=config.max_tokens,
            temperature=temperature,
            sample=sample,
        )
    if too_long:
        logger.warning(
            "prompts left out as too long: %d; raise max_prompt_tokens (it is %d)",
            *(len(too_long), config.max_prompt_tokens),
        )


def check_same_prompts(
    config: DataConfig,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    answered: Answered,
) -> None:
    """Refuse a folder that holds answers to others of the same names."""
    names = {name for name, _, _ in answered}
    begun = [prompt for prompt in prompts if prompt.id in names]
    for turn in range(num_turns(config, begun)):
        for key, prompt, ids in asked_turns(begun, turn, config, tokenizer, answered):
            if key not in answered:
                continue
            before = answered[key].prompt_ids
            if before != ids and not _is_dated(tokenizer, prompt.turns[turn], before, ids):
                raise ConfigError(
                    f"{config.output} holds an answer to a different prompt with the id "
                    f"{key[0]!r}, or with a different thinking setting; give another --output, and "
                    "--join the two"
                )


def _is_dated(
    tokenizer: PreTrainedTokenizerBase, asked: str, one: Sequence[int], other: Sequence[int]
) -> bool:
    """True if two prompts may be one of two days: they end alike from what the user said on.

    Some templates write today's date into every prompt.
    """
    if "strftime_now" not in str(tokenizer.chat_template):
        return False
    before, now = tokenizer.decode(one), tokenizer.decode(other)
    _, found, end = now.rpartition(asked.strip())
    return bool(found) and before.endswith(found + end)
