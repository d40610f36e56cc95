"""The search of n-grams by kernels; see `kernels.ngram_interface.NGramSearch`."""

import ctypes
from collections.abc import Sequence
from typing import cast
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray

from blockdraft.kernels.cpu import library as native
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import IS_BFLOAT16, check_sizes
from blockdraft.kernels.cpu.products import NativeProduct
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.ngram_interface import (
    NGramPart,
    NGramPaths,
    NGramQuery,
    NGramRules,
    TokenNoise,
)

LONGEST = 3
"""`kLongest` of ngrams.cpp."""
NUM_LEVELS = 256

_NO_NOISE = TokenNoise(0, 0, 0, 0.0)


class NativeNGrams:
    """By compiled kernels. The arrays of the rules must not change.

    Raises:
        ValueError: the parts of the table do not fit the kernels.
    """

    def __init__(
        self, kernels: Library, rules: NGramRules, layers: HydraLayers | None = None
    ) -> None:
        self._kernels, self._max_read = kernels, rules.max_read
        self._layers = layers
        self._head = None if layers is None else _head(layers)
        self._texts: dict[int, _Text] = {}
        self._parts = [_plain(part) for part in rules.parts]
        if len(self._parts) not in (0, LONGEST):
            raise ValueError(f"{len(self._parts)} lengths of contexts, {LONGEST} are known")
        self._levels = np.ascontiguousarray(rules.frequencies, np.uint8)
        self._probabilities = np.ascontiguousarray(rules.probabilities, np.float64)
        if len(self._probabilities) != NUM_LEVELS:
            raise ValueError(
                f"probabilities of {len(self._probabilities)} levels, not {NUM_LEVELS}"
            )
        self._rules = native.Rules(
            (native.TablePart * LONGEST)(*map(_table_part, self._parts)),
            self._levels.ctypes.data,
            len(self._levels),
            self._probabilities.ctypes.data,
            rules.head,
            rules.known_token,
            (ctypes.c_double * LONGEST)(*rules.priors),
            rules.least_probability,
            rules.most_noise,
            rules.max_remembered,
            None if self._head is None else ctypes.addressof(self._head),
            rules.guess_weight,
            rules.num_guesses,
            rules.guess_temperature,
        )

    def paths(self, queries: Sequence[NGramQuery]) -> list[NGramPaths]:
        """See NGramSearch.paths. On all threads: those of one text share its products."""
        for query in queries:
            self._check(query)
        texts = [self._text(query) for query in queries]
        asked = [_Asked(query, text) for query, text in zip(queries, texts, strict=True)]
        num, num_threads = len(asked), torch.get_num_threads()
        searches = (native.Search * num)(*(own.search for own in asked))
        addresses = (ctypes.c_void_p * num)(*(text.address for text in texts))
        found = (ctypes.c_int64 * num)()
        self._kernels.ngrams(
            ctypes.addressof(self._rules), ctypes.addressof(addresses),
            ctypes.addressof(searches), ctypes.addressof(found), num, num_threads,
        )  # fmt: skip
        for query, text, count in zip(queries, texts, found, strict=True):
            text.num_read = len(query.token_ids)
            if count < 0:  # half of it is counted: it begins anew
                self.close(query.key)
        if min(found, default=0) < 0:
            raise MemoryError("no memory is left to count a text in")
        return [own.paths(count) for own, count in zip(asked, found, strict=True)]

    def _check(self, query: NGramQuery) -> None:
        """Raise a ValueError where features or the token behind them do not fit the head."""
        features = query.features
        if self._layers is None or features is None:
            return
        if not 0 <= query.token_ids[-1] < len(self._layers.places):
            raise ValueError(f"token {query.token_ids[-1]} of {len(self._layers.places)}")
        if not features.flags.c_contiguous:
            raise ValueError("features do not lie one behind another")
        if features.dtype != np.float32 or features.size != self._layers.feature_norms.numel():
            raise ValueError(
                f"{features.size} features in {features.dtype}, not "
                f"{self._layers.feature_norms.numel()} in float32"
            )

    def _text(self, query: NGramQuery) -> "_Text":
        if query.key not in self._texts:
            first = max(0, len(query.token_ids) - self._max_read)
            self._texts[query.key] = _Text(self._kernels, first)
        return self._texts[query.key]

    def close(self, key: int) -> None:
        """See NGramSearch.close."""
        self._texts.pop(key, None)


def takes_layers(layers: HydraLayers) -> bool:
    """True if kernels multiply with all layers of a Hydra head."""
    own = (layers.join, layers.gate_up, layers.down, layers.score)
    return all(isinstance(one, NativeProduct) and one.dtype == torch.float32 for one in own)


def _head(layers: HydraLayers) -> native.HydraHead:
    """As the kernels know it; valid as long as the layers."""
    products = [
        cast(NativeProduct, one).struct
        for one in (layers.join, layers.gate_up, layers.down, layers.score)
    ]
    num_features, size = layers.feature_norms.shape
    check_sizes(
        layers.join.shape == (size, (num_features + 1) * size)
        and layers.gate_up.shape == (2 * layers.down.shape[1], size)
        and layers.down.shape[0] == layers.score.shape[1] == layers.embedding.shape[1] == size
        and len(layers.token_ids) == layers.score.shape[0]
        and len(layers.places) == layers.embedding.shape[0]
    )
    return native.HydraHead(
        *products,
        layers.feature_norms.data_ptr(),
        layers.embedding_norm.data_ptr(),
        layers.norm.data_ptr(),
        layers.last_norm.data_ptr(),
        layers.embedding.data_ptr(),
        IS_BFLOAT16[layers.embedding.dtype],
        num_features,
        len(layers.places),
        layers.token_ids.ctypes.data,
        layers.places.ctypes.data,
        layers.covered,
        layers.eps,
    )


class _Asked:
    """A search, and the memory that it reads and writes."""

    def __init__(self, query: NGramQuery, text: "_Text") -> None:
        begin = max(0, text.num_read - LONGEST)
        own = query.token_ids[begin:]
        self._ids = (ctypes.c_int64 * len(own))(*own)
        num = query.num_nodes
        self._tokens, self._parents = (ctypes.c_int64 * num)(), (ctypes.c_int64 * num)()
        self._probabilities = (ctypes.c_double * num)()
        noise = query.noise or _NO_NOISE
        self.search = native.Search(
            ctypes.addressof(self._ids),
            text.num_read - begin,
            len(own),
            noise.seed,
            noise.sample_index,
            noise.position,
            noise.temperature,
            native.Large() if noise.large is None else _large(*noise.large),
            None if query.features is None else query.features.ctypes.data,
            num,
            query.max_depth,
            ctypes.addressof(self._tokens),
            ctypes.addressof(self._parents),
            ctypes.addressof(self._probabilities),
        )

    def paths(self, num: int) -> NGramPaths:
        """What was found: so many nodes."""
        return NGramPaths(
            tuple(self._tokens[:num]),
            tuple(self._parents[:num]),
            tuple(self._probabilities[:num]),
        )


class _Text:
    """What the kernels counted of a text, and where it lies. num_read: tokens that are counted."""

    def __init__(self, kernels: Library, num_read: int) -> None:
        self.num_read = num_read
        self.address: int | None = kernels.text_new()
        if self.address is None:
            raise MemoryError("no memory is left to count a text in")
        finalize(self, kernels.text_delete, self.address)


def _plain(part: NGramPart) -> NGramPart:
    """One value behind the other, in the types that the kernels read."""
    own = NGramPart(
        np.ascontiguousarray(part.keys, np.uint32),
        np.ascontiguousarray(part.starts, np.int64),
        np.ascontiguousarray(part.rests, np.uint8),
        np.ascontiguousarray(part.tokens, np.uint32),
        np.ascontiguousarray(part.levels, np.uint8),
    )
    num = len(own.keys)
    has_starts = own.starts.shape == (num + 1,) and own.rests.shape == (num,)
    rises = has_starts and own.starts[0] == 0 and bool((np.diff(own.starts) >= 0).all())
    if not rises or not len(own.tokens) == len(own.levels) == own.starts[-1]:
        raise ValueError(
            f"{num} contexts do not fit {own.starts.shape} starts, {own.rests.shape} rests, "
            f"{own.tokens.shape} tokens and {own.levels.shape} levels"
        )
    return own


def _table_part(part: NGramPart) -> native.TablePart:
    return native.TablePart(
        part.keys.ctypes.data,
        len(part.keys),
        part.starts.ctypes.data,
        part.rests.ctypes.data,
        part.tokens.ctypes.data,
        part.levels.ctypes.data,
    )


def _large(token_ids: NDArray[np.int64], noise: NDArray[np.float64]) -> native.Large:
    """Of arrays that somebody holds until the search is over."""
    if token_ids.dtype != np.int64 or noise.dtype != np.float64 or len(token_ids) != len(noise):
        raise ValueError(f"{len(token_ids)} {token_ids.dtype} tokens, {len(noise)} {noise.dtype}")
    return native.Large(token_ids.ctypes.data, noise.ctypes.data, len(token_ids))
