"""Prompts that the target writes itself.

They follow Magpie (arXiv 2406.08464): an instruct model that is given only its template's opening
of a user turn writes a user turn. A few words of that turn steer it to a kind of task.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from blockdraft.core.jsonl import bad_row, read_jsonl
from blockdraft.data.answer_file import DataProgress, Report, Row, append_rows
from blockdraft.data.answers import Answer, Job, Writer
from blockdraft.data.config import DataConfig
from blockdraft.data.prompts import SELF_WRITTEN_TOKENS, Prompt, user_opening
from blockdraft.text.kinds import loops

SELF_PROMPTS = "self_prompts.jsonl"
MIN_PROMPT_CHARS = 12

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


def write_prompts(
    config: DataConfig, writer: Writer, tokenizer: PreTrainedTokenizerBase, report: Report
) -> list[Prompt]:
    """Let the target try as many prompts as it is told to; returns those that came out.

    Every try is kept in a file, so that a resumed run goes on and sees the same ones.

    Raises:
        ConfigError: the file is not as it was written.
    """
    path = config.output / SELF_PROMPTS
    tried = {row["id"] for row in _rows(path)}
    jobs = [job for job in _jobs(config, tokenizer) if job.id not in tried]

    def to_row(answer: Answer) -> Row:
        kind, _, words = answer.job.set.partition("|")
        text = _text(answer, words, tokenizer)
        return {"id": answer.job.id, "set": kind, "turns": [] if text is None else [text]}

    progress = DataProgress("prompts", len(jobs), 0, 0, 0.0, Counter())
    for _ in append_rows(path, writer.write(jobs), to_row, progress, report):
        pass
    return read_written(config)


def read_written(config: DataConfig) -> list[Prompt]:
    """The prompts that came out so far.

    Raises:
        ConfigError: the file is not as it was written.
    """
    if not config.num_self_written:
        return []
    rows = _rows(config.output / SELF_PROMPTS)
    return [Prompt(id=r["id"], set=r["set"], text=r["turns"][0]) for r in rows if r["turns"]]


def _rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows = []
    for number, row in read_jsonl(path, is_growing=True):
        turns = row.get("turns")
        texts = [row.get("id"), row.get("set"), *(turns if isinstance(turns, list) else [None])]
        if not all(isinstance(text, str) for text in texts):
            reason = "it is not a prompt that this command wrote"
            remedy = "delete that line, and `blockdraft data` lets the target write another one"
            raise bad_row(path, number, reason, remedy)
        rows.append(row)
    return rows


def _jobs(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Job]:
    """A job for each try, kinds in turn."""
    opening, seed = user_opening(tokenizer), config.seed
    kinds = [(kind, words) for kind, all_words in OPENINGS.items() for words in all_words]
    random.Random(seed).shuffle(kinds)
    for index, (kind, words) in zip(
        range(config.num_self_written), itertools.cycle(kinds), strict=False
    ):
        yield Job(
            id=f"{kind}-{seed}-{index}",
            set=f"{kind}|{words}",
            prompt_ids=tuple(tokenizer(opening + words, add_special_tokens=False)["input_ids"]),
            max_tokens=SELF_WRITTEN_TOKENS,
            temperature=0.9,
        )


def _text(answer: Answer, words: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The prompt, None if it has no end, loops or says next to nothing."""
    if answer.finish != "stop" or loops(answer.response_ids):
        return None
    text = words + tokenizer.decode(answer.response_ids[:-1], skip_special_tokens=True)
    return text.strip() if len(" ".join(text.split())) >= MIN_PROMPT_CHARS else None
