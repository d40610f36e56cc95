"""The target's answers as training examples: reading, filtering, splitting, ordering."""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.core.jsonl import bad_row
from blockdraft.data.answer_file import shared_ids
from blockdraft.data.shards import read_rows
from blockdraft.text.kinds import loops

logger = logging.getLogger(__name__)

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
    """Rows of one text or several, padded on the right; all [b, S].

    token_ids: 0 in the padding. positions: of a token in its text. documents: which text of the row
    a token belongs to, -1 in the padding. is_answer: True where the target wrote the token.
    """

    token_ids: Tensor
    positions: Tensor
    documents: Tensor
    is_answer: Tensor

    def rows(self, chosen: slice | Tensor) -> "Batch":
        """Some of the rows."""
        return Batch(
            self.token_ids[chosen],
            self.positions[chosen],
            self.documents[chosen],
            self.is_answer[chosen],
        )


def read_examples(paths: Sequence[Path], *, min_response_len: int, max_len: int) -> list[Example]:
    """Examples of files or folders of answers that are fit to learn from, see `read_rows`.

    Left out: answers that loop, answers under `min_response_len` tokens, and repeated answers to a
    prompt, in whatever file. Answers are cut so that prompt and answer hold at most `max_len`
    tokens.

    Raises:
        ConfigError: a file is missing or damaged, a row lacks a key, or nothing is left.
    """
    examples: dict[tuple[tuple[int, ...], ...], Example] = {}
    num_loops = num_short = num_repeated = 0
    for path in paths:
        for number, row in read_rows(path):
            example = _example(row, path, number, max_len)
            key = (example.prompt_ids, example.response_ids)
            if len(example.response_ids) < min_response_len:
                num_short += 1
            elif row.get("finish") == "loop" or loops(example.response_ids):
                num_loops += 1
            elif examples.setdefault(key, example) is not example:
                num_repeated += 1
    if num_repeated:
        logger.info("answers left out as repeated: %d", num_repeated)
    if not examples:
        names = ", ".join(map(str, paths))
        raise ConfigError(
            f"no answer in {names} is fit to train on ({num_loops} loop, {num_short} hold under "
            f"{min_response_len} tokens within max_len {max_len}); write more or longer answers"
        )
    return list(examples.values())


def _example(row: Mapping[str, Any], path: Path, number: int, max_len: int) -> Example:
    prompt_ids, response_ids = row.get("prompt_ids"), row.get("response_ids")
    if response_ids is None and {"prompt", "turns", "messages", "text"} & row.keys():
        remedy = "let the target answer it: blockdraft data --prompts"
        raise bad_row(path, number, "it is a prompt without an answer", remedy)
    good = "id" in row and isinstance(row.get("set"), str)
    if not good or not _are_ids(prompt_ids) or not _are_ids(response_ids):
        reason = "it needs id, set, and token ids in prompt_ids and response_ids"
        raise bad_row(path, number, reason, "delete that line, or write the answers again")
    return Example(
        id=str(row["id"]),
        set=row["set"],
        prompt_ids=shared_ids(prompt_ids),
        response_ids=shared_ids(response_ids[: max(0, max_len - len(prompt_ids))]),
    )


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def split_held_out(
    examples: Sequence[Example], share: float
) -> tuple[list[Example], list[Example]]:
    """(to train on, held out): by prompt, whose variants "id+..." are not parted.

    The same prompt under several ids is on one side too, that of the first of them: so examples
    that are added behind others do not move these, and many names hold no more prompts out.
    """
    first_names = _first_names(examples)
    held_out = {base for base, first in first_names.items() if is_held_out(first, share)}
    return (
        [e for e in examples if _base(e.id) not in held_out],
        [e for e in examples if _base(e.id) in held_out],
    )


def _first_names(examples: Iterable[Example]) -> dict[str, str]:
    """Of each id without its variant the first one with the same prompt, directly or by others."""
    places: dict[str, int] = {}
    owners: dict[tuple[int, ...], int] = {}
    earlier: list[int] = []

    def first(place: int) -> int:
        while earlier[place] != place:
            place = earlier[place]
        return place

    for example in examples:
        place = places.setdefault(_base(example.id), len(places))
        if place == len(earlier):
            earlier.append(place)
        one, two = first(place), first(owners.setdefault(example.prompt_ids, place))
        earlier[max(one, two)] = min(one, two)
    names = list(places)
    return {name: names[first(place)] for name, place in places.items()}


def is_held_out(prompt_id: str, share: float) -> bool:
    """Whether the answers to a prompt are not trained on; so it is for its variants."""
    digest = hashlib.sha256(_base(prompt_id).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _base(prompt_id: str) -> str:
    return prompt_id.split("+")[0]


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


Row = Sequence[int]
"""Indices of the examples that share a row of a batch."""


def epoch_batches(
    examples: Sequence[Example],
    batch_sequences: int,
    seed: int,
    epoch: int,
    pack_len: int | None = None,
) -> list[list[Row]]:
    """The rows of each batch of one pass, a function of the arguments alone.

    Random. Without `pack_len` every example has a row of its own, and those of like length come
    together, which saves most of the padding; with it rows are filled up to that many tokens.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(examples)))
    rng.shuffle(order)
    rows: list[Row] = []
    if pack_len is not None:
        rows = _packed(order, examples, pack_len)
    else:
        bucket = BUCKET_BATCHES * batch_sequences
        for start in range(0, len(order), bucket):
            part = sorted(order[start : start + bucket], key=lambda i: len(examples[i]))
            rows += [[index] for index in part]
    batches = [rows[i : i + batch_sequences] for i in range(0, len(rows), batch_sequences)]
    rng.shuffle(batches)
    return batches


def _packed(order: Iterable[int], examples: Sequence[Example], pack_len: int) -> list[Row]:
    """Each example goes into the newest row, or begins another one that has room for it."""
    rows: list[Row] = []
    row: list[int] = []
    room = 0
    for index in order:
        if len(examples[index]) > room:
            row, room = [], pack_len
            rows.append(row)
        row.append(index)
        room -= len(examples[index])
    return rows


def collate(
    examples: Sequence[Example], device: torch.device | str = "cpu", width: int | None = None
) -> Batch:
    """One example a row, see `collate_rows`."""
    return collate_rows([[example] for example in examples], device, width)


def collate_rows(
    rows: Sequence[Sequence[Example]],
    device: torch.device | str = "cpu",
    width: int | None = None,
) -> Batch:
    """Texts one after another in each row, padded to `width` tokens or the longest row.

    Causal models never look at the padding from a real token.
    """
    width = width or max(sum(len(example) for example in row) for row in rows)
    token_ids, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    documents = torch.full((len(rows), width), -1)
    is_answer = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        start = 0
        for document, example in enumerate(row):
            end = start + len(example)
            token_ids[number, start:end] = torch.tensor(example.token_ids)
            positions[number, start:end] = torch.arange(len(example))
            documents[number, start:end] = document
            is_answer[number, start + len(example.prompt_ids) : end] = True
            start = end
    return Batch(*(t.to(device) for t in (token_ids, positions, documents, is_answer)))
