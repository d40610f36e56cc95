"""The target's answers as training examples: reading, filtering, splitting, ordering."""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import full_disk_refused
from blockdraft.core.jsonl import bad_row
from blockdraft.core.words import counted
from blockdraft.data.answer_file import are_ids, hash_of
from blockdraft.data.holding_out import are_held_out
from blockdraft.data.identity import file_sha256
from blockdraft.data.shards import files_of, read_rows, tell_unfinished
from blockdraft.data.store import Example, TextArrays, TextStore, Writer
from blockdraft.hub.cache_dir import cache_dir
from blockdraft.text.kinds import loops

logger = logging.getLogger(__name__)

BUCKET_BATCHES = 16
"""Batches whose sequences are sorted by length together: enough to spare padding, few enough to
leave the order random."""
SMALL_BYTES = 32 * 2**20
"""Of files of answers: fewer are read each time, and kept in memory."""
FORMAT = 3
"""Of the arrays in the cache."""


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

    @property
    def lengths(self) -> Tensor:
        """[b], tokens of each row without the padding."""
        return (self.documents >= 0).sum(dim=1)

    def rows(self, chosen: slice | Tensor) -> "Batch":
        """Some of the rows."""
        return Batch(
            self.token_ids[chosen],
            self.positions[chosen],
            self.documents[chosen],
            self.is_answer[chosen],
        )


def read_examples(
    paths: Sequence[Path], *, min_response_len: int, max_len: int | None
) -> TextStore:
    """Examples of files or folders of answers that are fit to learn from, see `read_rows`.

    Left out: answers that loop, answers under `min_response_len` tokens, and repeated answers to a
    prompt, in whatever file. Answers are cut so that prompt and answer hold at most `max_len`
    tokens, and left out where too few would stay; None cuts none. Many of them are read once and
    then mapped from a folder of the cache, by whichever process comes first.

    Raises:
        ConfigError: a file is missing or damaged, a row lacks a key, or nothing is left.
        DiskError: the cache's disk is full.
    """
    tell_unfinished(paths)
    files = [file for path in paths for file in files_of(path)]
    if sum(file.stat().st_size for file in files if file.exists()) < SMALL_BYTES:
        return TextStore(_read(paths, Writer(), min_response_len, max_len))
    inputs = [FORMAT, min_response_len, max_len, *map(str, map(file_sha256, files))]
    # A folder of answers that were answered anew holds older ones too, which its file does not say.
    inputs += [str(path.is_dir()) for path in paths]
    folder = cache_dir() / "texts" / hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"), full_disk_refused(folder.parent):
        if not folder.exists():
            logger.info("reading the answers into %s", folder)
            with TemporaryDirectory(dir=folder.parent) as name:
                part = Path(name) / "texts"
                part.mkdir()
                _read(paths, Writer(part), min_response_len, max_len)
                part.rename(folder)
    return TextStore(TextArrays.open(folder))


def _read(
    paths: Sequence[Path], writer: Writer, min_response_len: int, max_len: int | None
) -> TextArrays:
    seen: set[bytes] = set()
    num_loops = num_short = num_long = num_repeated = num_cut = 0
    for path in paths:
        for number, row in read_rows(path):
            prompt_ids, response_ids = _ids_of(row, path, number)
            if len(response_ids) < min_response_len:
                num_short += 1
                continue
            room = len(response_ids) if max_len is None else max_len - len(prompt_ids)
            if room < min_response_len:
                num_long += 1
                continue
            is_cut, response_ids = room < len(response_ids), response_ids[:room]
            if row.get("finish") == "loop" or loops(response_ids):
                num_loops += 1
                continue
            key = hash_of(prompt_ids, response_ids)
            if key in seen:
                num_repeated += 1
                continue
            seen.add(key)
            num_cut += is_cut
            writer.add(str(row["id"]), row["set"], prompt_ids, response_ids)
    reasons = {
        "looping": num_loops,
        f"shorter than {counted(min_response_len, 'token')}": num_short,
        f"without room in max_len {max_len} behind their prompt": num_long,
        "repeated": num_repeated,
    }
    left_out = ", ".join(f"{why} {number}" for why, number in reasons.items() if number)
    if not len(writer):
        names = ", ".join(map(str, paths))
        remedy = "raise max_len" if num_long else "generate more or longer answers"
        raise ConfigError(
            f"no answer in {names} is usable for training ({left_out or 'there is none'}); {remedy}"
        )
    if left_out:
        logger.info("answers left out: %s", left_out)
    if num_cut:
        logger.info("answers cut off at max_len %s: %d", max_len, num_cut)
    return writer.finish()


def _ids_of(row: Mapping[str, Any], path: Path, number: int) -> tuple[list[int], list[int]]:
    """The token ids of a row's prompt and answer."""
    prompt_ids, response_ids = row.get("prompt_ids"), row.get("response_ids")
    if response_ids is None and {"prompt", "turns", "messages", "text"} & row.keys():
        remedy = "let the target answer it: blockdraft data --prompts"
        raise bad_row(path, number, "it is a prompt without an answer", remedy)
    good = "id" in row and isinstance(row.get("set"), str)
    if not good or not are_ids(prompt_ids) or not are_ids(response_ids):
        reason = "it needs id, set, and token ids in prompt_ids and response_ids"
        raise bad_row(path, number, reason, "delete that line, or generate the answers again")
    return prompt_ids, response_ids


def split_held_out(examples: Sequence[Example], share: float) -> tuple[TextStore, TextStore]:
    """(to train on, held out): by prompt, whose variants "id+word" are not parted.

    The same prompt under several ids is on one side too, that of the first of them: so examples
    that are added behind others do not move these, and many names hold no more prompts out.
    """
    store = TextStore.of(examples)
    held_out = are_held_out(store.draws, share)
    return store.where(~held_out), store.where(held_out)


def count_answer_tokens(examples: Sequence[Example]) -> Counter[int]:
    """How often each token occurs in the answers."""
    return TextStore.of(examples).count_answer_tokens()


def unused_special_token(special_ids: Iterable[int], used: Set[int], vocab_size: int) -> int:
    """The first of the special tokens that no text uses, to stand for a masked slot.

    Those of images may be `vocab_size` or above: a target of text alone has no rows for them.

    Raises:
        ConfigError: all of them are `used`; a token that is not is named, if there is one below
            `vocab_size`.
    """
    for token in special_ids:
        if token < vocab_size and token not in used:
            return token
    free = next((token for token in reversed(range(vocab_size)) if token not in used), None)
    if free is None:
        raise ConfigError(
            f"all {vocab_size} tokens of the vocabulary occur in the data, so none is left for "
            "masked slots; give architecture=draft_model, which needs none, or other data"
        )
    raise ConfigError(
        "every special token occurs in the data; set mask_token_id to a token that no text uses, "
        f"such as {free}"
    )


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
    lengths = TextStore.of(examples).lengths.tolist()
    order = list(range(len(lengths)))
    rng.shuffle(order)
    rows: list[Row] = []
    if pack_len is not None:
        rows = _packed(order, lengths, pack_len)
    else:
        bucket = BUCKET_BATCHES * batch_sequences
        for start in range(0, len(order), bucket):
            part = sorted(order[start : start + bucket], key=lengths.__getitem__)
            rows += [[index] for index in part]
    batches = [rows[i : i + batch_sequences] for i in range(0, len(rows), batch_sequences)]
    rng.shuffle(batches)
    return batches


def _packed(order: Iterable[int], lengths: Sequence[int], pack_len: int) -> list[Row]:
    """Each example goes into the newest row, or begins another one that has room for it."""
    rows: list[Row] = []
    row: list[int] = []
    room = 0
    for index in order:
        if lengths[index] > room:
            row, room = [], pack_len
            rows.append(row)
        row.append(index)
        room -= lengths[index]
    return rows


def collate(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """One example a row, see `collate_rows`."""
    return collate_rows([[example] for example in examples], device)


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
