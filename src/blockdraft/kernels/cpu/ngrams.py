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
from blockdraft.kernels.ngram_interface import NGramPart, NGramPaths, NGramRules, TokenNoise

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

    def paths(
        self,
        key: int,
        token_ids: Sequence[int],
        noise: TokenNoise | None,
        num_nodes: int,
        max_depth: int,
        features: NDArray[np.float32] | None = None,
    ) -> NGramPaths:
        """See NGramSearch.paths."""
        if self._layers is None or features is None:
            features = None
        elif not 0 <= token_ids[-1] < len(self._layers.places):
            raise ValueError(f"token {token_ids[-1]} of {len(self._layers.places)}")
        elif not features.flags.c_contiguous:
            raise ValueError("features do not lie one behind another")
        elif features.dtype != np.float32 or features.size != self._layers.feature_norms.numel():
            raise ValueError(
                f"{features.size} features in {features.dtype}, not "
                f"{self._layers.feature_norms.numel()} in float32"
            )
        if key not in self._texts:
            self._texts[key] = _Text(self._kernels, max(0, len(token_ids) - self._max_read))
        text = self._texts[key]
        begin = max(0, text.num_read - LONGEST)
        own = token_ids[begin:]
        ids = (ctypes.c_int64 * len(own))(*own)
        tokens, parents = (ctypes.c_int64 * num_nodes)(), (ctypes.c_int64 * num_nodes)()
        probabilities = (ctypes.c_double * num_nodes)()
        seen = noise or _NO_NOISE
        search = native.Search(
            ctypes.addressof(ids),
            text.num_read - begin,
            len(own),
            seen.seed,
            seen.sample_index,
            seen.position,
            seen.temperature,
            native.Large() if seen.large is None else _large(*seen.large),
            None if features is None else features.ctypes.data,
            torch.get_num_threads(),
            num_nodes,
            max_depth,
            ctypes.addressof(tokens),
            ctypes.addressof(parents),
            ctypes.addressof(probabilities),
        )
        num = self._kernels.ngrams(
            ctypes.addressof(self._rules), text.address, ctypes.addressof(search)
        )
        if num < 0:
            raise MemoryError("no memory is left to count a text in")
        text.num_read = len(token_ids)
        return NGramPaths(tuple(tokens[:num]), tuple(parents[:num]), tuple(probabilities[:num]))

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
