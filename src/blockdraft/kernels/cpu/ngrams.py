"""The search of n-grams by kernels; see `kernels.ngram_interface.NGramSearch`."""

import atexit
import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import cast
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.checks import check_sizes
from blockdraft.kernels.cpu import structs
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import IS_BFLOAT16
from blockdraft.kernels.cpu.products import NativeProduct
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.interface import Linear
from blockdraft.kernels.ngram_interface import (
    READ_DTYPES,
    NGramPart,
    NGramPaths,
    NGramQuery,
    NGramRules,
    OwnTextBelief,
    TokenNoise,
)

LONGEST = 3
"""`kLongest` of ngrams.cpp."""
NUM_LANES, MOST_HEAD_DIM = 16, 256
"""`kLanes` of lanes.h and `kMostDim` of hydra_head.h."""
NUM_LEVELS = 256

_NO_NOISE = TokenNoise(0, 0, 0, 0.0)
_NOTHING_LARGE, _NO_FEATURES = structs.Large(), structs.Features()


class NativeNGrams:
    """By compiled kernels. The arrays of the rules must not change.

    Raises:
        ValueError: the parts of the table do not fit the kernels, or nothing may be guessed.
    """

    def __init__(
        self, kernels: Library, rules: NGramRules, layers: HydraLayers | None = None
    ) -> None:
        self._kernels, self._max_read = kernels, rules.max_read
        self._layers = layers
        self._head = None if layers is None else _head(layers)
        self._num_values = 0 if layers is None else layers.num_values
        self._texts: dict[int, _Text] = {}
        self._parts = [_plain(part) for part in rules.parts]
        if len(self._parts) not in (0, LONGEST):
            raise ValueError(f"{len(self._parts)} lengths of contexts, {LONGEST} are known")
        if layers is not None and rules.num_guesses < 1:
            raise ValueError(f"{rules.num_guesses} guesses of a head; give at least one")
        self._levels = np.ascontiguousarray(rules.frequencies, np.uint8)
        self._probabilities = np.ascontiguousarray(rules.probabilities, np.float64)
        if len(self._probabilities) != NUM_LEVELS:
            raise ValueError(
                f"probabilities of {len(self._probabilities)} levels, not {NUM_LEVELS}"
            )
        self._rules = structs.Rules(
            (structs.TablePart * LONGEST)(*map(_table_part, self._parts)),
            self._levels.ctypes.data,
            len(self._levels),
            self._probabilities.ctypes.data,
            rules.head,
            _belief(rules.beside_table),
            _belief(rules.beside_guess),
            rules.least_probability,
            rules.most_noise,
            rules.max_remembered,
            None if self._head is None else ctypes.addressof(self._head),
            rules.guess_weight,
            rules.num_guesses,
            rules.guess_temperature,
            rules.num_guessed_on,
            rules.least_guessed_on,
        )
        self._rules_address = ctypes.addressof(self._rules)
        self._begun: list[_Text] = []
        """Their searches were begun ahead, and not taken. Always the same list."""
        self._ahead = kernels.ahead_new(self._rules_address)
        if self._ahead is None:
            raise MemoryError("no memory is left for searches of n-grams")
        # It waits for searches that are under way. Until then it holds their texts, which the
        # garbage collector might otherwise delete first.
        finalize(self, _delete_ahead, kernels, self._ahead, self._begun).atexit = False

    def paths(self, queries: Sequence[NGramQuery]) -> list[NGramPaths]:
        """See NGramSearch.paths. All threads share the searches, and the products of all texts."""
        for query in queries:
            self._check(query.token_ids, query.features)
        self._take_ahead()
        texts = [self._text(query.key, query.token_ids) for query in queries]
        new = [
            (query, text)
            for query, text in zip(queries, texts, strict=True)
            if not text.has_answered(query)
        ]
        if new:
            searches = _asked(new)
            self._kernels.ngrams(
                self._rules_address, ctypes.addressof(searches), len(new), torch.get_num_threads()
            )
        failed = [query.key for query, text in zip(queries, texts, strict=True) if text.has_failed]
        for key in failed:  # half of it is counted: it begins anew
            self.close(key)
        if failed:
            raise MemoryError("no memory is left to count a text in")
        return [text.found() for text in texts]

    def search_ahead(self, queries: Sequence[NGramQuery]) -> None:
        """See NGramSearch.search_ahead. Not where torch has one thread: no core is free then."""
        self._take_ahead()
        known = [query for query in queries if query.key in self._texts]
        if not known or torch.get_num_threads() == 1:
            return
        for query in known:
            self._check(query.token_ids, query.features)
        asked = [(query, self._texts[query.key]) for query in known]
        self._searches = _asked(asked)
        _end_at_exit(self._kernels)
        self._begun += [text for _, text in asked]  # an interrupt must not let it be forgotten
        self._kernels.search_ahead(self._ahead, ctypes.addressof(self._searches), len(asked))

    def _take_ahead(self) -> None:
        """End what was begun ahead; its answers wait for who asks."""
        if self._begun and self._kernels.take_ahead(self._ahead):
            for text in self._begun:
                text.is_ahead = True
        self._begun.clear()

    def _check(self, token_ids: Sequence[int], features: Tensor | None) -> None:
        """Raise a ValueError where features or the tokens behind them do not fit the head."""
        if self._layers is None or features is None:
            return
        if features.dim() != 2 or not 0 < len(features) <= len(token_ids):
            raise ValueError(f"features {tuple(features.shape)} before {len(token_ids)} tokens")
        for token_id in token_ids[-len(features) :]:
            if not 0 <= token_id < len(self._layers.places):
                raise ValueError(f"token {token_id} of {len(self._layers.places)}")
        if not features.is_contiguous():
            raise ValueError("features do not lie one behind another")
        if features.dtype not in READ_DTYPES or features.shape[1] != self._num_values:
            raise ValueError(
                f"{features.shape[1]} features in {features.dtype}, not {self._num_values} in "
                "float32 or bfloat16"
            )

    def _text(self, key: int, token_ids: Sequence[int]) -> "_Text":
        text = self._texts.get(key)
        if text is None:
            first = max(0, len(token_ids) - self._max_read)
            text = self._texts[key] = _Text(self._kernels, first)
        return text

    def close(self, key: int) -> None:
        """See NGramSearch.close."""
        if self._texts.get(key) in self._begun:
            self._take_ahead()
        self._texts.pop(key, None)


def takes_layers(layers: HydraLayers) -> bool:
    """True if kernels multiply with all layers of a Hydra head."""
    fits = layers.head_dim % NUM_LANES == 0 and layers.head_dim <= MOST_HEAD_DIM
    return fits and all(
        isinstance(one, NativeProduct) and one.dtype == torch.float32 for one in _products(layers)
    )


def _products(layers: HydraLayers) -> tuple[Linear, ...]:
    """In the order in which the kernels know them."""
    return (
        *(layers.join, layers.join_on, layers.heads, layers.out),
        *(layers.gate_up, layers.down, layers.score),
    )


def _head(layers: HydraLayers) -> structs.HydraHead:
    """As the kernels know it; valid as long as the layers."""
    products = [_read_again(cast(NativeProduct, one).struct) for one in _products(layers)]
    num_features, size = layers.feature_norms.shape
    num_heads = layers.num_heads + 2 * layers.num_keys
    check_sizes(
        len(layers.read_places) == num_features
        and bool((layers.read_places >= 0).all())
        and bool((layers.read_places < len(layers.feature_layers)).all())
        and layers.join.shape == (size, (num_features + 1) * size)
        and layers.join_on.shape == (size, 2 * size)
        and layers.heads.shape == (num_heads * layers.head_dim, size)
        and layers.out.shape == (size, layers.num_heads * layers.head_dim)
        and layers.num_heads % layers.num_keys == 0 < layers.window
        and layers.frequencies.shape == (layers.head_dim // 2,)
        and layers.gate_up.shape == (2 * layers.down.shape[1], size)
        and layers.down.shape[0] == layers.score.shape[1] == layers.embedding.shape[1] == size
        and len(layers.token_ids) == layers.score.shape[0]
        and len(layers.places) == layers.embedding.shape[0]
    )
    return structs.HydraHead(
        *products,
        layers.feature_norms.data_ptr(),
        layers.embedding_norm.data_ptr(),
        layers.state_norm.data_ptr(),
        layers.next_norm.data_ptr(),
        layers.attention_norm.data_ptr(),
        layers.norm.data_ptr(),
        layers.last_norm.data_ptr(),
        layers.frequencies.data_ptr(),
        layers.num_heads,
        layers.num_keys,
        layers.head_dim,
        layers.window,
        layers.embedding.data_ptr(),
        IS_BFLOAT16[layers.embedding.dtype],
        layers.read_places.ctypes.data,
        num_features,
        layers.num_values,
        len(layers.places),
        layers.token_ids.ctypes.data,
        layers.places.ctypes.data,
        layers.covered,
        layers.eps,
    )


def _read_again(product: structs.Product) -> structs.Product:
    """A copy for weights that one step reads for each token ahead."""
    own = structs.Product.from_buffer_copy(product)
    own.is_read_again = True
    return own


@lru_cache
def _end_at_exit(kernels: Library) -> None:
    """Search nothing ahead while the interpreter ends, and frees what searches read."""
    atexit.register(kernels.end_ahead)


def _delete_ahead(kernels: Library, ahead: int, begun: "list[_Text]") -> None:
    kernels.ahead_delete(ahead)
    begun.clear()


class _Text:
    """What the kernels counted of a text, and its search. num_read: its first tokens, left out."""

    def __init__(self, kernels: Library, num_read: int) -> None:
        address: int | None = kernels.text_new()
        if address is None:
            raise MemoryError("no memory is left to count a text in")
        finalize(self, kernels.text_delete, address).atexit = False  # others may be at work there
        self._search = structs.Search(text=address, num_read=num_read)
        self.search_address = ctypes.addressof(self._search)
        self._query: NGramQuery | None = None
        """The last one that was asked."""
        self.is_ahead = False
        """It was answered ahead, and nobody has asked it since."""
        # Kept from step to step: to make all of it anew takes a third of a search's time.
        self._make_room(0)

    def has_answered(self, query: NGramQuery) -> bool:
        """True if this query was answered ahead, or was tried and failed."""
        is_ahead, self.is_ahead = self.is_ahead, False
        return is_ahead and (self.has_failed or self._is_asked(query))

    def _is_asked(self, query: NGramQuery) -> bool:
        """True if it is the same as the last one, whose text has grown no longer."""
        last, search = self._query, self._search
        return (
            last is not None
            and len(query.token_ids) == search.num_text
            and (query.num_nodes, query.max_depth) == (search.num_nodes, search.max_depth)
            and (query.features is None) == (last.features is None)
            and query.guess_depth == last.guess_depth
            and _is_same(query.noise, last.noise)
        )

    def ask(self, query: NGramQuery) -> None:
        """Write down what is searched for. What the query holds stays until the next one."""
        search, noise, num_tokens = self._search, query.noise or _NO_NOISE, len(query.token_ids)
        self._query = query
        num_rows = 0 if query.features is None else len(query.features)
        begin = max(0, min(search.num_read - LONGEST, num_tokens - num_rows))
        own = query.token_ids[begin:]
        self._ids = (ctypes.c_int64 * len(own))(*own)
        search.token_ids = ctypes.addressof(self._ids)
        search.num_known, search.num_tokens = search.num_read - begin, len(own)
        search.num_text = num_tokens
        search.seed, search.sample_index = noise.seed, noise.sample_index
        search.position, search.temperature = noise.position, noise.temperature
        search.large = _NOTHING_LARGE if noise.large is None else _large(*noise.large)
        if query.features is None:
            search.features = _NO_FEATURES
        else:
            is_bfloat16 = IS_BFLOAT16[query.features.dtype]
            search.features = structs.Features(query.features.data_ptr(), is_bfloat16, num_rows)
        if query.num_nodes > len(self._tokens):
            self._make_room(query.num_nodes)
        search.num_nodes, search.max_depth = query.num_nodes, query.max_depth
        search.guess_depth = query.guess_depth

    def _make_room(self, num_nodes: int) -> None:
        self._tokens, self._parents = (ctypes.c_int64 * num_nodes)(), (ctypes.c_int64 * num_nodes)()
        self._probabilities = (ctypes.c_double * num_nodes)()
        self._search.tokens = ctypes.addressof(self._tokens)
        self._search.parents = ctypes.addressof(self._parents)
        self._search.probabilities = ctypes.addressof(self._probabilities)

    @property
    def has_failed(self) -> bool:
        """True if there was no memory left."""
        return bool(self._search.num_found < 0)

    def found(self) -> NGramPaths:
        """The nodes."""
        num = self._search.num_found
        return NGramPaths(
            tuple(self._tokens[:num]),
            tuple(self._parents[:num]),
            tuple(self._probabilities[:num]),
        )


def _asked(asked: Sequence[tuple[NGramQuery, _Text]]) -> "ctypes.Array[ctypes.c_void_p]":
    """Queries are written down; returns the searches, as the kernels take them."""
    for query, text in asked:
        text.ask(query)
    return (ctypes.c_void_p * len(asked))(*(text.search_address for _, text in asked))


def _is_same(one: TokenNoise | None, other: TokenNoise | None) -> bool:
    if one is None or other is None:
        return one is other
    return _names(one) == _names(other)


def _names(noise: TokenNoise) -> tuple[object, ...]:
    """What noise is told by; the rest follows from it."""
    stream = noise.seed, noise.sample_index, noise.position
    return *stream, noise.temperature, noise.large is None


def _belief(belief: OwnTextBelief) -> structs.Belief:
    return structs.Belief(belief.known_token, (ctypes.c_double * LONGEST)(*belief.priors))


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


def _table_part(part: NGramPart) -> structs.TablePart:
    return structs.TablePart(
        part.keys.ctypes.data,
        len(part.keys),
        part.starts.ctypes.data,
        part.rests.ctypes.data,
        part.tokens.ctypes.data,
        part.levels.ctypes.data,
    )


def _large(token_ids: NDArray[np.int64], noise: NDArray[np.float64]) -> structs.Large:
    """Of arrays that somebody holds until the search is over."""
    if token_ids.dtype != np.int64 or noise.dtype != np.float64 or len(token_ids) != len(noise):
        raise ValueError(f"{len(token_ids)} {token_ids.dtype} tokens, {len(noise)} {noise.dtype}")
    return structs.Large(token_ids.ctypes.data, noise.ctypes.data, len(token_ids))
