"""The target's answers as training examples: reading, filtering, splitting, ordering."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.core.jsonl import bad_row, read_jsonl
from blockdraft.text.kinds import loops

BUCKET_BATCHES = 16
"""Batches whose sequences are sorted by length together: enough to spare padding, few enough to
leave the order random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A prompt and the target's answer to it; `set` names where the prompt came from."""

    id: str
    set: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_ids + self.response_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded on the right. token_ids: [b, S]; prompt_lens, lengths: [b]."""

    token_ids: Tensor
    prompt_lens: Tensor
    lengths: Tensor


def read_examples(paths: Sequence[Path], *, min_response_len: int, max_len: int) -> list[Example]:
    """Examples of (gzipped) JSONL files that are fit to learn from.

    Left out: answers that loop, answers under `min_response_len` tokens. Answers are cut so that
    prompt and answer hold at most `max_len` tokens.

    Raises:
        ConfigError: a file is missing or damaged, a row lacks a key, or nothing is left.
    """
    examples = []
    for path in paths:
        for number, row in read_jsonl(path, is_growing=True):
            example = _example(row, path, number, max_len)
            good = len(example.response_ids) >= min_response_len
            if good and row.get("finish") != "loop" and not loops(example.response_ids):
                examples.append(example)
    if not examples:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"no answer in {names} is fit to train on; write answers first")
    return examples


def _example(row: dict[str, Any], path: Path, number: int, max_len: int) -> Example:
    prompt_ids, response_ids = row.get("prompt_ids"), row.get("response_ids")
    good = "id" in row and isinstance(row.get("set"), str)
    if not good or not _are_ids(prompt_ids) or not _are_ids(response_ids):
        reason = "it needs id, set, and token ids in prompt_ids and response_ids"
        raise bad_row(path, number, reason, "delete that line, or write the answers again")
    return Example(
        id=str(row["id"]),
        set=row["set"],
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(response_ids[: max(0, max_len - len(prompt_ids))]),
    )


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def split_held_out(
    examples: Iterable[Example], share: float
) -> tuple[list[Example], list[Example]]:
    """(to train on, held out): by prompt, so that variants "id+..." of one are not parted."""
    train: list[Example] = []
    held_out: list[Example] = []
    for example in examples:
        digest = hashlib.sha256(example.id.split("+")[0].encode()).digest()
        chosen = int.from_bytes(digest[:8], "big") < share * 2**64
        (held_out if chosen else train).append(example)
    return train, held_out


def count_answer_tokens(examples: Iterable[Example]) -> Counter[int]:
    """How often each token occurs in the answers."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.response_ids)
    return counts


def unused_special_token(special_ids: Iterable[int], examples: Iterable[Example]) -> int:
    """The first special token that no example holds, to stand for a masked slot.

    Raises:
        ConfigError: all of them occur.
    """
    used: set[int] = set()
    for example in examples:
        used.update(example.prompt_ids, example.response_ids)
    free = sorted(set(special_ids) - used)
    if not free:
        raise ConfigError("every special token occurs in the data; set mask_token_id yourself")
    return free[0]


def epoch_batches(
    examples: Sequence[Example], batch_sequences: int, seed: int, epoch: int
) -> list[list[int]]:
    """Indices of the examples of each batch of one pass, a function of seed and epoch alone.

    Random, but sequences of like length come together, which saves most of the padding.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(examples)))
    rng.shuffle(order)
    batches = []
    bucket = BUCKET_BATCHES * batch_sequences
    for start in range(0, len(order), bucket):
        part = sorted(order[start : start + bucket], key=lambda i: len(examples[i]))
        batches += [part[i : i + batch_sequences] for i in range(0, len(part), batch_sequences)]
    rng.shuffle(batches)
    return batches


def collate(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """Pad on the right with token 0; causal models never look at it from a real token."""
    width = max(len(example) for example in examples)
    rows = [example.token_ids + (0,) * (width - len(example)) for example in examples]
    return Batch(
        token_ids=torch.tensor(rows, device=device),
        prompt_lens=torch.tensor([len(e.prompt_ids) for e in examples], device=device),
        lengths=torch.tensor([len(e) for e in examples], device=device),
    )
