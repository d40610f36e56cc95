"""Which tokens follow the last few, counted once in the target's own answers. No torch.

A context of one to three tokens has its successors with probabilities. What is left of its mass is
that of the context a token shorter, by the number of different successors (Witten and Bell, "The
zero-frequency problem", 1991); behind all of them stands how frequent each token is. Small tables
of n-grams as drafts: arXiv 2411.03786.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from blockdraft.core.errors import ModelError
from blockdraft.core.files import replace_file
from blockdraft.kernels.ngram_interface import NGramPart

NGRAMS_NAME = "ngrams.safetensors"
"""Beside the weights of a drafter."""
LONGEST = 3
"""Tokens of a context."""
HEAD = 16
"""The most probable successors of a context, so many, are always looked at."""

_LEAST_COUNT = 2
"""What followed a context of several tokens less often is not kept."""
_MAX_SUCCESSORS = 2**16 - 1
_LEVELS_OF_E = 24.0
"""Probabilities are kept in a byte: so many levels are a factor of e, and 255 is 2e-5."""
PROBABILITIES = np.exp(-np.arange(256) / _LEVELS_OF_E)
"""Of each level."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1
_KEY_SHIFT = 32

Levels = NDArray[np.uint8]
Shares = dict[int, float]
"""Probabilities of tokens."""


class NGramTable:
    """The successors of the last tokens of a text."""

    def __init__(self, parts: Sequence[NGramPart], frequencies: Levels | None = None) -> None:
        self.parts = tuple(parts)
        """Contexts of one token, of two, and so on."""
        self.frequencies = np.zeros(0, np.uint8) if frequencies is None else frequencies
        """Of each token, as a level. The last level may mean never; so do tokens behind the end."""

    @property
    def num_contexts(self) -> int:
        """Of all lengths together."""
        return sum(len(part.keys) for part in self.parts)

    def after(self, token_ids: Sequence[int], others: Collection[int] = ()) -> Shares:
        """The most probable successors of a text, and those of `others` that may follow at all."""
        hashes, value = list[int](), 0
        for token_id in reversed(token_ids[-LONGEST:]):
            value = _mixed(value, token_id)
            hashes.append(value >> _KEY_SHIFT)
        found: Shares = {}
        mass = 1.0
        for part, key in reversed(list(zip(self.parts, hashes, strict=False))):
            place = int(np.searchsorted(part.keys, np.uint32(key)))
            if place == len(part.keys) or part.keys[place] != key:
                continue
            first, end = part.starts[place : place + 2].tolist()
            tokens, levels = part.tokens[first:end].tolist(), part.levels[first:end].tolist()
            for rank, (token_id, level) in enumerate(zip(tokens, levels, strict=True)):
                if rank < HEAD or token_id in others:
                    share = mass * float(PROBABILITIES[level])
                    found[token_id] = found.get(token_id, 0.0) + share
            mass *= float(PROBABILITIES[part.rests[place]])
        for token_id in [*found, *(one for one in others if one not in found)]:
            if token_id < len(self.frequencies):
                share = mass * float(PROBABILITIES[self.frequencies[token_id]])
                found[token_id] = found.get(token_id, 0.0) + share
        return found

    @classmethod
    def count(cls, answers: Iterable[tuple[Sequence[int], int]]) -> "NGramTable":
        """The table of answers: of each its tokens, prompt included, and the prompt's length.

        Successors are tokens of answers; the last tokens of a prompt are contexts of the first.
        """
        tokens, is_successor = _joined(answers)
        hashes = np.zeros(len(tokens), np.uint64)
        parts: list[NGramPart] = []
        for length in range(1, LONGEST + 1):
            hashes = _mixed_all(hashes, tokens, length)
            parts.append(_part(tokens, is_successor, hashes, length))
        return cls(parts, _frequencies(tokens[is_successor]))

    def save(self, folder: Path) -> None:
        """Write NGRAMS_NAME into a drafter's folder."""
        arrays: dict[str, NDArray[Any]] = {"frequencies": self.frequencies}
        for length, part in enumerate(self.parts, start=1):
            is_narrow = not len(part.tokens) or int(part.tokens.max()) < 2**16
            arrays[f"{length}.keys"] = part.keys
            arrays[f"{length}.counts"] = np.diff(part.starts).astype(np.uint16)
            arrays[f"{length}.rests"] = part.rests
            arrays[f"{length}.tokens"] = part.tokens.astype(np.uint16) if is_narrow else part.tokens
            arrays[f"{length}.levels"] = part.levels
        replace_file(folder / NGRAMS_NAME, lambda path: save_file(arrays, path))

    @classmethod
    def load(cls, folder: Path, vocab_size: int | None = None) -> "NGramTable | None":
        """The table in a drafter's folder; None if it has none.

        vocab_size: of the target, if it is known.

        Raises:
            ModelError: the file is damaged, of an earlier version, or of another target.
        """
        path = folder / NGRAMS_NAME
        if not path.exists():
            return None
        try:
            arrays = load_file(path)
            if odd := [name for name, one in arrays.items() if not _is_list_of_counts(one)]:
                raise ValueError(f"{odd[0]} are not counts")
            frequencies = arrays["frequencies"]
            if vocab_size is not None and len(frequencies) > vocab_size:
                raise ValueError(f"of {len(frequencies)} tokens; the target has {vocab_size}")
            parts = [_loaded(arrays, length, len(frequencies)) for length in range(1, LONGEST + 1)]
            return cls(parts, frequencies)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ModelError(
                f"{path} is not a table of n-grams ({error}); copy it again, or delete it to draft "
                "without"
            ) from error


def _is_list_of_counts(array: NDArray[Any]) -> bool:
    return array.ndim == 1 and array.dtype.kind == "u" and array.dtype.itemsize <= 4


def _loaded(arrays: dict[str, NDArray[Any]], length: int, num_tokens: int) -> NGramPart:
    """Raises KeyError or ValueError for arrays that are missing or do not fit each other."""
    keys, counts, rests, tokens, levels = (
        arrays[f"{length}.{name}"] for name in ("keys", "counts", "rests", "tokens", "levels")
    )
    starts = np.zeros(len(keys) + 1, np.int64)
    if not len(counts) == len(rests) == len(keys):
        raise ValueError(f"{len(keys)} contexts, {len(counts)} counts and {len(rests)} rests")
    np.cumsum(counts, out=starts[1:])
    if not len(tokens) == len(levels) == starts[-1]:
        raise ValueError(f"{starts[-1]} successors, {len(tokens)} tokens and {len(levels)} levels")
    if len(tokens) and int(tokens.max()) >= num_tokens:
        raise ValueError(f"a successor {tokens.max()}, of {num_tokens} tokens")
    return NGramPart(keys, starts, rests, tokens.astype(np.uint32), levels)


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
    texts, marks = list[NDArray[np.int64]](), list[NDArray[np.bool_]]()
    for token_ids, num_prompt in answers:
        begin = max(0, num_prompt - LONGEST)
        text = np.array([_BETWEEN_ANSWERS, *token_ids[begin:]], np.int64)
        mark = np.arange(len(text)) > num_prompt - begin
        texts.append(text)
        marks.append(mark)
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    return np.concatenate(texts), np.concatenate(marks)


def _part(
    tokens: NDArray[np.int64],
    is_successor: NDArray[np.bool_],
    hashes: NDArray[np.uint64],
    length: int,
) -> NGramPart:
    """Count the contexts of so many tokens. hashes: of those that end at each place."""
    places = np.flatnonzero(is_successor)
    places = places[places >= length]
    for back in range(1, length + 1):  # no context reaches into another text
        places = places[tokens[places - back] != _BETWEEN_ANSWERS]
    keys = (hashes[places - 1] >> np.uint64(_KEY_SHIFT)).astype(np.uint32)
    # Pairs of context and successor, each with its number.
    order = np.lexsort((tokens[places], keys))
    keys, successors = keys[order], tokens[places][order]
    is_new = np.ones(len(keys), np.bool_)
    is_new[1:] = (keys[1:] != keys[:-1]) | (successors[1:] != successors[:-1])
    first = np.flatnonzero(is_new)
    counts = np.diff(np.append(first, len(keys)))
    keys, successors = keys[first], successors[first]
    # Contexts, each with the number of its tokens and of its different successors.
    unique, context = np.unique(keys, return_inverse=True)
    totals = np.bincount(context, counts, len(unique))
    kinds = np.bincount(context, minlength=len(unique))
    shares = counts / (totals + kinds)[context]
    # The most probable first, equal ones by token.
    order = np.lexsort((successors, -shares, context))
    context, successors = context[order], successors[order]
    shares, counts = shares[order], counts[order]
    rank = np.arange(len(context)) - np.searchsorted(context, context)
    kept = rank < _MAX_SUCCESSORS
    if length > 1:
        kept &= counts >= _LEAST_COUNT
    context, successors, shares = context[kept], successors[kept], shares[kept]
    numbers = np.bincount(context, minlength=len(unique))
    rests = 1 - np.bincount(context, shares, len(unique))
    is_kept = numbers > 0
    starts = np.append(0, np.cumsum(numbers[is_kept]))
    return NGramPart(
        unique[is_kept],
        starts.astype(np.int64),
        _levels(rests[is_kept].astype(np.float64)),
        successors.astype(np.uint32),
        _levels(shares),
    )


def _frequencies(tokens: NDArray[np.int64]) -> Levels:
    """How frequent each token is, up to the largest one."""
    counts = np.bincount(tokens).astype(np.float64)
    return _levels(counts / max(1.0, counts.sum()))


def _levels(probabilities: NDArray[np.float64]) -> Levels:
    with np.errstate(divide="ignore"):
        levels = np.round(-_LEVELS_OF_E * np.log(probabilities))
    return np.clip(levels, 0, 255).astype(np.uint8)
