"""Texts in arrays, mapped from files where there are many: a million of them need no memory.

A text is a slice of `tokens`, its prompt first. A `TextStore` is a choice of texts of one set of
arrays, and a sequence of `Example`s, each made when it is asked for.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from blockdraft.core.files import write_whole
from blockdraft.data.holding_out import Together

CHUNK = 4096
"""Texts that are looked at together when all are gone through."""
FLUSH_TOKENS = 2**20

_ARRAYS: dict[str, type[np.generic]] = {
    "tokens": np.uint32,
    "starts": np.int64,
    "prompt_lens": np.int32,
    "ids": np.uint8,
    "id_starts": np.int64,
    "sets": np.int32,
    "draws": np.uint64,
}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TextArrays:
    """n texts.

    tokens: of all, one after another; text i is tokens[starts[i]:starts[i + 1]], of which the first
    prompt_lens[i] are the prompt. ids: names in UTF-8, cut by `id_starts` in the same way. sets:
    places in `set_names`. draws: [n], uniform in 0 .. 2^64, alike for texts that must not be parted
    by holding some of them out.
    """

    tokens: NDArray[Any]
    starts: NDArray[Any]
    prompt_lens: NDArray[Any]
    ids: NDArray[Any]
    id_starts: NDArray[Any]
    sets: NDArray[Any]
    draws: NDArray[Any]
    set_names: tuple[str, ...]

    def save(self, folder: Path) -> None:
        """Write all but the tokens, which a `Writer` has written already."""
        for name in _ARRAYS.keys() - {"tokens"}:
            getattr(self, name).tofile(folder / f"{name}.bin")
        write_whole(folder / "sets.json", json.dumps(self.set_names))

    @classmethod
    def open(cls, folder: Path) -> "TextArrays":
        """Map what `save` wrote."""
        names = json.loads((folder / "sets.json").read_text(encoding="utf-8"))
        mapped = {name: _mapped(folder / f"{name}.bin", kind) for name, kind in _ARRAYS.items()}
        return cls(**mapped, set_names=tuple(names))


def _mapped(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    # An empty file cannot be mapped: texts without a name or a token.
    if not path.stat().st_size:
        return np.empty(0, kind)
    return np.memmap(path, dtype=kind, mode="r")


class TextStore(Sequence[Example]):
    """Some texts of `arrays`: those at `chosen`, in that order."""

    def __init__(self, arrays: TextArrays, chosen: NDArray[Any] | None = None) -> None:
        self.arrays = arrays
        self.chosen = np.arange(len(arrays.prompt_lens)) if chosen is None else chosen

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "TextStore":
        """The same texts as a store, which they may be already."""
        if isinstance(examples, TextStore):
            return examples
        writer = Writer()
        for example in examples:
            writer.add(example.id, example.set, example.prompt_ids, example.response_ids)
        return cls(writer.finish())

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[Example]]) -> "TextStore":
        """The texts of all parts, one part behind the other."""
        stores = [cls.of(part) for part in parts if len(part)]
        if stores and all(store.arrays is stores[0].arrays for store in stores):
            return cls(stores[0].arrays, np.concatenate([store.chosen for store in stores]))
        writer = Writer()
        for store in stores:
            for example in store:
                writer.add(example.id, example.set, example.prompt_ids, example.response_ids)
        return cls(writer.finish())

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> "TextStore": ...

    def __getitem__(self, index: int | slice) -> "Example | TextStore":
        if isinstance(index, slice):
            return TextStore(self.arrays, self.chosen[index])
        place, arrays = int(self.chosen[index]), self.arrays
        ids: list[int] = arrays.tokens[arrays.starts[place] : arrays.starts[place + 1]].tolist()
        prompt_len = int(arrays.prompt_lens[place])
        name = arrays.ids[arrays.id_starts[place] : arrays.id_starts[place + 1]]
        return Example(
            id=name.tobytes().decode(),
            set=arrays.set_names[arrays.sets[place]],
            prompt_ids=tuple(ids[:prompt_len]),
            response_ids=tuple(ids[prompt_len:]),
        )

    def where(self, wanted: NDArray[Any]) -> "TextStore":
        """The texts at which `wanted`, a boolean for each, is true."""
        return TextStore(self.arrays, self.chosen[wanted])

    @property
    def draws(self) -> NDArray[Any]:
        """See `TextArrays`."""
        return np.asarray(self.arrays.draws[self.chosen])

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens of each text."""
        starts = self.arrays.starts
        return np.asarray(starts[self.chosen + 1] - starts[self.chosen])

    @property
    def prompt_lens(self) -> NDArray[Any]:
        """Tokens of each prompt."""
        return np.asarray(self.arrays.prompt_lens[self.chosen])

    def tokens(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield (all tokens of some texts, whether each is of an answer), until all have come."""
        for begin in range(0, len(self), CHUNK):
            part = self[begin : begin + CHUNK]
            lens = np.stack([part.prompt_lens, part.lengths - part.prompt_lens], axis=1).ravel()
            yield part._joined(), np.repeat(np.arange(len(lens)) % 2 == 1, lens)

    def _joined(self) -> NDArray[Any]:
        """All tokens, copied run by run of texts that lie behind each other."""
        starts, chosen = self.arrays.starts, self.chosen
        breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
        firsts = chosen[np.concatenate([[0], breaks])]
        lasts = chosen[np.concatenate([breaks - 1, [len(chosen) - 1]])]
        runs = zip(starts[firsts].tolist(), starts[lasts + 1].tolist(), strict=True)
        return np.concatenate([self.arrays.tokens[start:end] for start, end in runs])

    def count_answer_tokens(self) -> Counter[int]:
        """How often each token occurs in the answers, in the order of their first occurrence."""
        counts, firsts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        seen = 0
        for tokens, is_answer in self.tokens():
            answer_ids = tokens[is_answer]
            if not len(answer_ids):
                continue
            size = max(len(counts), int(answer_ids.max()) + 1)
            counts = np.pad(counts, (0, size - len(counts)))
            firsts = np.pad(firsts, (0, size - len(firsts)), constant_values=-1)
            counts += np.bincount(answer_ids, minlength=size)
            here = np.full(size, -1)
            # Of several values for one place the last one stays.
            here[answer_ids[::-1]] = np.arange(len(answer_ids))[::-1] + seen
            firsts = np.where(firsts < 0, here, firsts)
            seen += len(answer_ids)
        found = np.flatnonzero(counts)
        found = found[np.argsort(firsts[found])]
        return Counter(dict(zip(found.tolist(), counts[found].tolist(), strict=True)))

    def used_tokens(self) -> set[int]:
        """All tokens that occur."""
        used: set[int] = set()
        for tokens, _ in self.tokens():
            used.update(np.unique(tokens).tolist())
        return used

    def first_above(self, limit: int) -> Example | None:
        """The first text that holds a token id above `limit`."""
        for begin in range(0, len(self), CHUNK):
            part = self[begin : begin + CHUNK]
            if int(part._joined().max(initial=0)) > limit:
                return next(e for e in part if max(e.token_ids, default=0) > limit)
        return None

    def sha256(self) -> str:
        """Hash of the tokens of all texts, in their order."""
        digest = hashlib.sha256()
        for begin in range(0, len(self), CHUNK):
            part = self[begin : begin + CHUNK]
            digest.update(np.stack([part.prompt_lens, part.lengths]).astype("<i8").tobytes())
            digest.update(part._joined().astype("<u4").tobytes())
        return digest.hexdigest()


class Writer:
    """Makes arrays of texts that come one after another.

    folder: where the tokens go, and all else at the end; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._tokens = array("I")
        self._starts, self._id_starts = array("q", [0]), array("q", [0])
        self._prompt_lens, self._sets, self._groups = array("i"), array("i"), array("q")
        self._ids = bytearray()
        self._set_names: dict[str, int] = {}
        self._together = Together()

    def __len__(self) -> int:
        return len(self._prompt_lens)

    def add(
        self, name: str, set_name: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> None:
        """One more text."""
        prompt = array("I", prompt_ids)
        self._groups.append(self._together.add(name, prompt.tobytes()))
        self._tokens += prompt
        self._tokens.extend(response_ids)
        self._starts.append(self._starts[-1] + len(prompt) + len(response_ids))
        self._prompt_lens.append(len(prompt))
        self._ids += name.encode()
        self._id_starts.append(len(self._ids))
        self._sets.append(self._set_names.setdefault(set_name, len(self._set_names)))
        if self._folder is not None and len(self._tokens) >= FLUSH_TOKENS:
            self._flush(self._folder)

    def _flush(self, folder: Path) -> None:
        with (folder / "tokens.bin").open("ab") as file:
            self._tokens.tofile(file)
        del self._tokens[:]

    def finish(self) -> TextArrays:
        """The arrays of all texts."""
        if self._folder is not None:
            self._flush(self._folder)
        arrays = TextArrays(
            tokens=np.asarray(self._tokens, np.uint32),
            starts=np.asarray(self._starts, np.int64),
            prompt_lens=np.asarray(self._prompt_lens, np.int32),
            ids=np.asarray(self._ids, np.uint8),
            id_starts=np.asarray(self._id_starts, np.int64),
            sets=np.asarray(self._sets, np.int32),
            draws=self._together.draws()[np.asarray(self._groups, np.int64)],
            set_names=tuple(self._set_names),
        )
        if self._folder is not None:
            arrays.save(self._folder)
        return arrays
