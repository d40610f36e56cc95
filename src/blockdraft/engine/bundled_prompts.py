"""Twenty bundled prompts that show what drafting gains with a pair, by kind of task.

Measured when a drafter has been trained, and written beside its weights, so that anybody can
measure again and compare.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.config import Thinking
from blockdraft.core.jsonl import prompt_text, read_all
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.engine.record import SampleRecord
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.text.tokenizer import Tokenizer, thinking_options

BUNDLED = Path(__file__).with_name("bundled_prompts.jsonl")
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BundledPrompt:
    """A user's turn, and what kind of task it is."""

    category: str
    text: str


@dataclass(frozen=True, slots=True)
class BundledAnswer:
    """A prompt with the target's greedy answer, drafted in whole blocks."""

    prompt: BundledPrompt
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    acceptance: AcceptanceStats


def read_bundled() -> list[BundledPrompt]:
    """The prompts of the bundled file.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    return read_all(
        BUNDLED,
        lambda row, number: BundledPrompt(str(row["category"]), prompt_text(row, BUNDLED, number)),
    )


def encode_bundled(
    tokenizer: Tokenizer, prompts: Iterable[BundledPrompt], thinking: Thinking = "template"
) -> list[tuple[BundledPrompt, list[int]]]:
    """Token ids of each prompt, in the chat template where there is one.

    Raises:
        RequestError: the template refuses a user's turn.
    """
    if not tokenizer.has_chat_template:
        return [(prompt, tokenizer.encode(prompt.text)) for prompt in prompts]
    options = thinking_options(thinking)
    return [
        (prompt, tokenizer.encode_chat([{"role": "user", "content": prompt.text}], options))
        for prompt in prompts
    ]


def decode_alone(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    eos_ids: frozenset[int],
    tick: Callable[[], object] = lambda: None,
) -> SampleRecord:
    """Decode one prompt in an engine in which nothing else runs; `tick` is called every step."""
    key = engine.add(prompt_ids, params, eos_ids=eos_ids)
    while engine.has_work:
        engine.step()
        tick()
    return engine.take(key)


def answer_bundled(
    engine: Engine,
    encoded: Iterable[tuple[BundledPrompt, Sequence[int]]],
    eos_ids: frozenset[int],
    tick: Callable[[], object] = lambda: None,
) -> list[BundledAnswer]:
    """Answer every prompt greedily, one by one, drafting whole blocks.

    Raises:
        RequestError: a prompt does not fit the target's context.
    """
    engine.use_fixed_drafting()
    params = SamplingParams(max_tokens=MAX_TOKENS)
    answers = []
    for prompt, prompt_ids in encoded:
        record = decode_alone(engine, prompt_ids, params, eos_ids, tick)
        output_ids = tuple(record.sequence.output_ids)
        answers.append(BundledAnswer(prompt, tuple(prompt_ids), output_ids, record.acceptance))
    return answers


def acceptance_by_category(answers: Iterable[BundledAnswer]) -> dict[str, AcceptanceStats]:
    """Counts of each category, in the order of the prompts."""
    sums: dict[str, AcceptanceStats] = defaultdict(AcceptanceStats)
    for answer in answers:
        sums[answer.prompt.category].add(answer.acceptance)
    return dict(sums)


def describe_answers(answers: Sequence[BundledAnswer]) -> Mapping[str, Any]:
    """What is written beside a drafter: tau of each category, and how it was measured."""
    return {
        "max_tokens": MAX_TOKENS,
        "num_prompts": len(answers),
        "tau": {
            name: round(stats.acceptance_length, 4)
            for name, stats in acceptance_by_category(answers).items()
        },
    }
