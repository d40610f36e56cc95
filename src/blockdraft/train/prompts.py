"""Prompts to train on: read from files, and written by the target itself.

A prompt is a chat turn of a user. Files are (gzipped) JSONL with `turns` (the first is used), or
`prompt`, and optionally `id`. Self-written prompts follow Magpie (arXiv 2406.08464): an instruct
model that is given only its template's opening of a user turn writes a user turn. A few words of
that turn steer it to a kind of task.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from blockdraft.core.errors import ConfigError
from blockdraft.core.jsonl import prompt_text, read_jsonl
from blockdraft.text.kinds import loops
from blockdraft.train.answers import AnswerWriter, Job

OPENINGS: Mapping[str, Sequence[str]] = {
    "self_chat": ("", "How", "What", "Why", "Explain", "Describe", "Give me", "Can you", "List"),
    "self_write": (
        "Compose",
        "Write a",
        "Imagine you are",
        "Draft an email",
        "Create a",
        "Pretend",
    ),
    "self_code": (
        "Write a Python function",
        "Write a function to",
        "Write a program",
        "Implement",
        "Write a python function to find",
        "Write a function to check",
        "Fix the bug in this code:\n```python\n",
        "How do I",
    ),
    "self_rewrite": (
        "Rewrite the following",
        "Summarize the following paragraph:",
        "Edit the following",
        "Extract",
        "Paraphrase",
        "Make this email",
        "Convert",
        "Classify",
    ),
}
BOXED_LINE = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MIN_PROMPT_CHARS = 12
SELF_WRITTEN_TOKENS = 96
"""Most tokens that the target adds to the words of a self-written prompt."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A user's turn; `set` names where it came from."""

    id: str
    set: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of one (gzipped) JSONL file.

    Raises:
        ConfigError: the file is missing, or a row holds neither `turns` nor `prompt`.
    """
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    # Named by its place among the rows, which an answered prompt is known by.
    return [
        Prompt(
            id=str(row.get("id", f"{name}-{place}")), set=name, text=prompt_text(row, path, number)
        )
        for place, (number, row) in enumerate(read_jsonl(path))
    ]


def with_variants(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Each prompt, and the other common wordings of the same task.

    Grade-school maths is asked bare and with the boxed-answer line; a programming task with its
    tests and without.
    """
    for prompt in prompts:
        yield prompt
        if prompt.set.startswith("gsm8k"):
            text = prompt.text + BOXED_LINE
            yield Prompt(id=f"{prompt.id}+boxed", set=prompt.set, text=text)
        head, found, _ = prompt.text.partition(" Your code should pass")
        if found:
            yield Prompt(id=f"{prompt.id}+bare", set=prompt.set, text=head)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of one user turn in the tokenizer's chat template, ready to be answered."""
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
    )
    return tuple(encoded["input_ids"])


def user_opening(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template's text up to where the user's words begin.

    Raises:
        ConfigError: the template changes the words it is given.
    """
    probe = "blockdraft-user-turn"
    text = tokenizer.apply_chat_template([{"role": "user", "content": probe}], tokenize=False)
    assert isinstance(text, str)
    head, found, _ = text.partition(probe)
    if not found:
        raise ConfigError("the chat template rewrites user turns; give prompts from files instead")
    return head


def write_prompts(
    writer: AnswerWriter, tokenizer: PreTrainedTokenizerBase, number: int, seed: int
) -> Iterator[Prompt]:
    """Yield up to `number` distinct prompts that the target writes itself, kinds in turn."""
    opening = user_opening(tokenizer)
    kinds = [(kind, words) for kind, all_words in OPENINGS.items() for words in all_words]
    random.Random(seed).shuffle(kinds)
    jobs = (
        Job(
            id=f"{kind}-{seed}-{index}",
            set=f"{kind}|{words}",
            prompt_ids=tuple(tokenizer(opening + words, add_special_tokens=False)["input_ids"]),
            max_tokens=SELF_WRITTEN_TOKENS,
            temperature=0.9,
        )
        for index, (kind, words) in zip(range(number), itertools.cycle(kinds), strict=False)
    )
    seen: set[str] = set()
    for answer in writer.write(jobs):
        kind, _, words = answer.job.set.partition("|")
        if answer.finish != "stop" or loops(answer.response_ids):
            continue
        text = words + tokenizer.decode(answer.response_ids[:-1], skip_special_tokens=True)
        key = " ".join(text.lower().split())
        if len(key) < MIN_PROMPT_CHARS or key in seen:
            continue
        seen.add(key)
        yield Prompt(id=answer.job.id, set=kind, text=text.strip())
