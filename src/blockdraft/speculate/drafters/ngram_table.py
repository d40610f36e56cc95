"""Which tokens follow the last few, counted once in the target's own answers. No torch.

A context of one to three tokens has up to four successors with probabilities, interpolated with
those of the contexts that are a token shorter, by the number of different successors (Witten and
Bell, "The zero-frequency problem", 1991). Small tables of n-grams as drafts: arXiv 2411.03786.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from blockdraft.core.errors import ModelError
from blockdraft.kernels.interface import NGramPart

NGRAMS_NAME = "ngrams.safetensors"
"""Beside the weights of a drafter."""
LONGEST = 3
"""Tokens of a context."""
MAX_SUCCESSORS = 4
MAX_COUNTED = 2**23
"""Tokens of answers that are counted, the first ones: some 270 bytes each while they are."""

_LEAST_COUNT = 2
"""What followed a context of several tokens only once is not kept."""
_LEAST_CHANGE = 0.03
"""A context whose successors are as probable behind a shorter one needs no place of its own."""
_LEAST_PROBABILITY = 0.02
_LEVELS = 256
"""Probabilities are kept in a byte."""
_REMEMBERED = 2**14
"""Contexts whose successors are kept as Python's own numbers."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1
_KEY_SHIFT = 32

Keys = NDArray[np.uint32]
Successors = tuple[tuple[int, float], ...]


class NGramTable:
    """The most probable successors of the last tokens of a text."""

    def __init__(self, parts: Sequence[NGramPart]) -> None:
        self.parts = tuple(parts)
        """Contexts of one token, of two, and so on."""
        self._found = lru_cache(_REMEMBERED)(self._find)

    @property
    def num_contexts(self) -> int:
        """Of all lengths together."""
        return sum(len(part.keys) for part in self.parts)

    def after(self, token_ids: Sequence[int]) -> Successors:
        """Successors of the longest known end of a text, with their probabilities; most first."""
        return self._found(tuple(token_ids[-LONGEST:]))

    def _find(self, ending: tuple[int, ...]) -> Successors:
        hashes, value = [], 0
        for token_id in reversed(ending):
            value = _mixed(value, token_id)
            hashes.append(value >> _KEY_SHIFT)
        for part, key in reversed(list(zip(self.parts, hashes, strict=False))):
            place = int(np.searchsorted(part.keys, np.uint32(key)))
            if place < len(part.keys) and part.keys[place] == key:
                levels = part.probabilities[place].tolist()
                tokens = part.tokens[place].tolist()
                return tuple(
                    (token_id, (level + 0.5) / _LEVELS)
                    for token_id, level in zip(tokens, levels, strict=True)
                    if level
                )
        return ()

    @classmethod
    def count(cls, answers: Iterable[tuple[Sequence[int], int]]) -> "NGramTable":
        """The table of answers: of each its tokens, prompt included, and the prompt's length.

        Successors are tokens of answers; the last tokens of a prompt are contexts of the first.
        """
        tokens, is_successor = _joined(answers)
        hashes = np.zeros(len(tokens), np.uint64)
        parts: list[NGramPart] = []
        shorter: list[NDArray[np.uint64]] = []
        for length in range(1, LONGEST + 1):
            hashes = _mixed_all(hashes, tokens, length)
            shorter.append(hashes)
            parts.append(_contexts(tokens, is_successor, shorter, parts))
        return cls(parts)

    def save(self, folder: Path) -> None:
        """Write NGRAMS_NAME into a drafter's folder."""
        arrays: dict[str, NDArray[Any]] = {}
        for length, part in enumerate(self.parts, start=1):
            is_narrow = not len(part.tokens) or int(part.tokens.max()) < 2**16
            arrays[f"{length}.keys"] = part.keys
            arrays[f"{length}.tokens"] = part.tokens.astype(np.uint16) if is_narrow else part.tokens
            arrays[f"{length}.probabilities"] = part.probabilities
        save_file(arrays, folder / NGRAMS_NAME)

    @classmethod
    def load(cls, folder: Path) -> "NGramTable | None":
        """The table in a drafter's folder; None if it has none.

        Raises:
            ModelError: the file is damaged.
        """
        path = folder / NGRAMS_NAME
        if not path.exists():
            return None
        try:
            arrays = load_file(path)
            parts = [
                NGramPart(
                    arrays[f"{length}.keys"],
                    arrays[f"{length}.tokens"].astype(np.uint32),
                    arrays[f"{length}.probabilities"],
                )
                for length in range(1, LONGEST + 1)
            ]
            for part in parts:
                if part.tokens.shape != (len(part.keys), MAX_SUCCESSORS):
                    raise ValueError(f"tokens have the shape {part.tokens.shape}")
                if part.probabilities.shape != part.tokens.shape:
                    raise ValueError(f"probabilities have the shape {part.probabilities.shape}")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ModelError(
                f"{path} is no table of n-grams ({error}); copy it again, or delete it to draft "
                "without"
            ) from error
        return cls(parts)


def _mixed(value: int, token_id: int) -> int:
    """The hash of a context that is one token longer to the left."""
    value = ((value ^ (token_id + 1)) * _MULTIPLIER) & _WORD
    return value ^ (value >> 29)


def _mixed_all(
    hashes: NDArray[np.uint64], tokens: NDArray[np.int64], length: int
) -> NDArray[np.uint64]:
    """Of each place the hash of the `length` tokens that end there; nonsense where there are fewer.

    hashes: those of one token less.
    """
    farther = np.zeros(len(tokens), np.uint64)
    farther[length - 1 :] = (tokens[: len(tokens) - length + 1] + 1).astype(np.uint64)
    mixed = (hashes ^ farther) * np.uint64(_MULTIPLIER)
    mixed ^= mixed >> np.uint64(29)
    return mixed


_BETWEEN_ANSWERS = -1


def _joined(
    answers: Iterable[tuple[Sequence[int], int]],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """All texts in one, and of each token whether an answer has it."""
    texts, marks, num_tokens = [], [], 0
    for token_ids, num_prompt in answers:
        begin = max(0, num_prompt - LONGEST)
        text = np.array([_BETWEEN_ANSWERS, *token_ids[begin:]], np.int64)
        mark = np.arange(len(text)) > num_prompt - begin
        texts.append(text)
        marks.append(mark)
        num_tokens += len(text)
        if num_tokens >= MAX_COUNTED:
            break
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    return np.concatenate(texts), np.concatenate(marks)


def _contexts(
    tokens: NDArray[np.int64],
    is_successor: NDArray[np.bool_],
    hashes: Sequence[NDArray[np.uint64]],
    shorter: Sequence[NGramPart],
) -> NGramPart:
    """Count the contexts of the longest length in `hashes`, which are those that end at a place.

    shorter: what was counted of the shorter ones.
    """
    length = len(hashes)
    places = np.flatnonzero(is_successor)
    places = places[places >= length]
    for back in range(1, length + 1):  # no context reaches into another text
        places = places[tokens[places - back] != _BETWEEN_ANSWERS]
    keys = (hashes[-1][places - 1] >> np.uint64(_KEY_SHIFT)).astype(np.uint32)
    # Pairs of context and successor, each with its number.
    order = np.lexsort((tokens[places], keys))
    keys, places = keys[order], places[order]
    successors = tokens[places]
    is_new = np.ones(len(keys), np.bool_)
    is_new[1:] = (keys[1:] != keys[:-1]) | (successors[1:] != successors[:-1])
    first = np.flatnonzero(is_new)
    counts = np.diff(np.append(first, len(keys)))
    keys, successors, places = keys[first], successors[first], places[first]
    # Contexts, each with the number of its tokens and of its different successors.
    unique, begin, context = np.unique(keys, return_index=True, return_inverse=True)
    totals = np.bincount(context, counts, len(unique))
    kinds = np.bincount(context, minlength=len(unique))
    belief = totals / (totals + kinds)
    kept = np.ones(len(counts), np.bool_) if length == 1 else counts >= _LEAST_COUNT
    own = (context[kept], successors[kept], (belief[context] * counts / totals[context])[kept])
    known = _behind_shorter(hashes[:-1], shorter, places[begin] - 1)
    other = (known[0], known[1], (1 - belief[known[0]]) * known[2])
    found = _most_probable(len(unique), own, other)
    before = _most_probable(len(unique), known)
    is_kept = np.zeros(len(unique), np.bool_)
    is_kept[own[0]] = True
    if length > 1:
        same = (found[0] == before[0]).all(axis=1)
        change = np.abs(found[1] - before[1]).max(axis=1, initial=0.0)
        is_kept &= ~(same & (change < _LEAST_CHANGE))
    levels = np.minimum(found[1] * _LEVELS, _LEVELS - 1).astype(np.uint8)
    return NGramPart(unique[is_kept], found[0][is_kept].astype(np.uint32), levels[is_kept])


Listed = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
"""Successors of contexts: of each the number of its context, its token and its probability."""


def _behind_shorter(
    hashes: Sequence[NDArray[np.uint64]], shorter: Sequence[NGramPart], places: NDArray[np.int64]
) -> Listed:
    """What is known to follow the longest shorter context that ends at each place."""
    tokens = np.zeros((len(places), MAX_SUCCESSORS), np.int64)
    probabilities = np.zeros((len(places), MAX_SUCCESSORS))
    for ending, part in zip(hashes, shorter, strict=True):
        if not len(part.keys):
            continue
        keys = (ending[places] >> np.uint64(_KEY_SHIFT)).astype(np.uint32)
        at = np.minimum(np.searchsorted(part.keys, keys), len(part.keys) - 1)
        is_known = part.keys[at] == keys
        tokens[is_known] = part.tokens[at[is_known]]
        levels = part.probabilities[at[is_known]]
        probabilities[is_known] = np.where(levels > 0, (levels + 0.5) / _LEVELS, 0.0)
    context, column = np.nonzero(probabilities)
    return context, tokens[context, column], probabilities[context, column]


def _most_probable(
    num_contexts: int, *lists: Listed
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """[contexts, MAX_SUCCESSORS] tokens and probabilities; those of one token in two lists add."""
    context = np.concatenate([one[0] for one in lists])
    token = np.concatenate([one[1] for one in lists])
    probability = np.concatenate([one[2] for one in lists])
    order = np.lexsort((token, context))
    context, token, probability = context[order], token[order], probability[order]
    is_new = np.ones(len(context), np.bool_)
    is_new[1:] = (context[1:] != context[:-1]) | (token[1:] != token[:-1])
    first = np.flatnonzero(is_new)
    if len(first):
        probability = np.add.reduceat(probability, first)
    context, token = context[first], token[first]
    order = np.lexsort((token, -probability, context))
    context, token, probability = context[order], token[order], probability[order]
    begin = np.searchsorted(context, context)
    rank = np.arange(len(context)) - begin
    is_kept = (rank < MAX_SUCCESSORS) & (probability >= _LEAST_PROBABILITY)
    tokens = np.zeros((num_contexts, MAX_SUCCESSORS), np.int64)
    probabilities = np.zeros((num_contexts, MAX_SUCCESSORS))
    place = context[is_kept], rank[is_kept]
    tokens[place], probabilities[place] = token[is_kept], probability[is_kept]
    return tokens, probabilities
