"""The most probable paths behind a text, by a table of n-grams and by the text itself.

The kernels hold the same search; this one serves where there are none, and says what is meant.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from blockdraft.core.plan import ROOT
from blockdraft.kernels.backends import native_ngrams
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.ngram_interface import (
    NGramPaths,
    NGramQuery,
    NGramRules,
    NGramSearch,
    OwnTextBelief,
    TokenNoise,
)
from blockdraft.speculate.drafters.guesses import (
    LEAST_GUESSED_ON,
    LEAST_TEMPERATURE,
    NUM_GUESSED_ON,
    NUM_GUESSES,
    WEIGHT,
    HeadReader,
    HeadState,
    mixed,
)
from blockdraft.speculate.drafters.ngram_table import (
    HEAD,
    LONGEST,
    PROBABILITIES,
    NGramTable,
    Shares,
)
from blockdraft.speculate.drafters.own_text import (
    BESIDE_GUESS,
    BESIDE_TABLE,
    MAX_READ,
    MAX_REMEMBERED,
    OwnText,
)
from blockdraft.speculate.sampler.noise import noise_at
from blockdraft.speculate.sampler.philox import Stream

LEAST_PROBABILITY = 0.05
"""Of a path that is worth proposing. A row of the target's forward is worth more elsewhere, or is
better not computed."""
MOST_NOISE = 300.0
"""Noise times temperature counts as at most this, so that its exponential is a number."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A token that may be proposed.

    probability: of its whole path. index: in the order of finding; the root's is ROOT. path: the
    tokens from the anchor's successor to it.
    """

    probability: float
    index: int
    parent: int
    path: tuple[int, ...]


class PlainSearch:
    """See NGramSearch."""

    def __init__(self, table: NGramTable, layers: HydraLayers | None = None) -> None:
        self._table, self._layers = table, layers
        self._texts: dict[int, OwnText] = {}
        self._readers: dict[int, HeadReader] = {}

    def paths(self, queries: Sequence[NGramQuery]) -> list[NGramPaths]:
        """See NGramSearch.paths."""
        return [self._paths(query) for query in queries]

    def _paths(self, query: NGramQuery) -> NGramPaths:
        noise, guesses = query.noise, self._guesses(query)
        text = self._texts.setdefault(query.key, OwnText())
        text.read(query.token_ids)
        ending = tuple(query.token_ids[-LONGEST:])
        found: list[_Node] = []
        best: list[_Node] = []
        newest = [_Node(1.0, ROOT, ROOT, ())]
        for depth in range(query.max_depth):
            known = self._known(ending, newest, _ahead(noise, depth))
            beliefs = [BESIDE_TABLE] * len(newest)
            if guesses is not None:
                known, beliefs = guesses.mixed(newest, known)
            successors = [
                text.mixed((*ending, *node.path)[-LONGEST:], shares, belief)
                for node, shares, belief in zip(newest, known, beliefs, strict=True)
            ]
            found += self._children(newest, successors, _ahead(noise, depth), len(found))
            # What is not among the best now never will be, nor what follows it.
            best = heapq.nsmallest(query.num_nodes, found, key=_by_probability)
            newest = [node for node in best if len(node.path) == depth + 1]
            if not newest:
                break
        places = {node.index: place for place, node in enumerate(best)} | {ROOT: ROOT}
        return NGramPaths(
            tuple(node.path[-1] for node in best),
            tuple(places[node.parent] for node in best),
            tuple(node.probability for node in best),
        )

    def _guesses(self, query: NGramQuery) -> "_Guesses | None":
        if self._layers is None or query.features is None:
            return None
        reader = self._readers.setdefault(query.key, HeadReader(self._layers))
        temperature = 0.0 if query.noise is None else query.noise.temperature
        state = reader.read(query.features, query.token_ids)
        return _Guesses(self._layers, reader, temperature, state, query.guess_depth)

    def _known(
        self, ending: tuple[int, ...], nodes: list[_Node], noise: TokenNoise | None
    ) -> list[Shares]:
        """What the table says of the successors of nodes of one depth; noise: there."""
        large = [] if noise is None or noise.large is None else noise.large[0].tolist()
        contexts = [(*ending, *node.path)[-LONGEST:] for node in nodes]
        return [self._table.after(context, large) for context in contexts]

    def _children(
        self,
        nodes: list[_Node],
        successors: list[Shares],
        noise: TokenNoise | None,
        num_found: int,
    ) -> list[_Node]:
        """The successors of nodes of one depth that are likely enough.

        noise: there. num_found: nodes that were found before.
        """
        if noise is not None:
            successors = _with_noise(successors, noise)
        children: list[_Node] = []
        for node, following in zip(nodes, successors, strict=True):
            for token_id, share in sorted(following.items(), key=lambda one: -one[1]):
                # Sums of shares round, and no child may come before its parent.
                probability = node.probability * min(share, 1.0)
                if probability < LEAST_PROBABILITY:
                    break
                index = num_found + len(children)
                children.append(_Node(probability, index, node.index, (*node.path, token_id)))
        return children

    def search_ahead(self, queries: Sequence[NGramQuery]) -> None:
        """See NGramSearch.search_ahead: all is done when it is asked for."""

    def close(self, key: int) -> None:
        """See NGramSearch.close."""
        self._texts.pop(key, None)
        self._readers.pop(key, None)


class _Guesses:
    """What a head says behind a text and behind the likely paths that are searched there."""

    def __init__(
        self,
        layers: HydraLayers,
        reader: HeadReader,
        temperature: float,
        end: HeadState,
        depth: int,
    ) -> None:
        self._layers, self._reader, self._temperature = layers, reader, temperature
        self._depth = depth
        self._states = {ROOT: end}

    def mixed(
        self, nodes: list[_Node], known: list[Shares]
    ) -> tuple[list[Shares], list[OwnTextBelief]]:
        """What is known behind nodes of one depth, the most probable first, with guesses.

        And how far the text is believed beside it.
        """
        if nodes[0].path:
            self._go_on(nodes)
        found, beliefs = [], []
        for node, shares in zip(nodes, known, strict=True):
            state = self._states.get(node.index)
            guessed = None if state is None else self._reader.guess(state, self._temperature)
            found.append(shares if guessed is None else mixed(self._layers, guessed, shares))
            beliefs.append(BESIDE_TABLE if guessed is None else BESIDE_GUESS)
            if guessed is None:
                self._states.pop(node.index, None)
        return found, beliefs

    def _go_on(self, nodes: list[_Node]) -> None:
        """Read the tokens of nodes whose parents were guessed behind."""
        if len(nodes[0].path) >= self._depth:
            return
        likely = [
            node
            for node in nodes
            if node.parent in self._states
            and node.probability >= LEAST_GUESSED_ON
            and node.path[-1] < len(self._layers.places)
        ]
        for node in likely[:NUM_GUESSED_ON]:
            before = self._states[node.parent]
            self._states[node.index] = self._reader.read_on(before, node.path[-1])


def rules_for(table: NGramTable) -> NGramRules:
    """What the kernels are told."""
    return NGramRules(
        parts=table.parts,
        frequencies=table.frequencies,
        probabilities=PROBABILITIES,
        head=HEAD,
        beside_table=BESIDE_TABLE,
        beside_guess=BESIDE_GUESS,
        least_probability=LEAST_PROBABILITY,
        most_noise=MOST_NOISE,
        max_read=MAX_READ,
        max_remembered=MAX_REMEMBERED,
        guess_weight=WEIGHT,
        num_guesses=NUM_GUESSES,
        guess_temperature=LEAST_TEMPERATURE,
        num_guessed_on=NUM_GUESSED_ON,
        least_guessed_on=LEAST_GUESSED_ON,
    )


def ngram_search(table: NGramTable, layers: HydraLayers | None = None) -> NGramSearch:
    """The kernels' search, or the plain one where there are none; beside a Hydra head or not."""
    return native_ngrams(rules_for(table), layers) or PlainSearch(table, layers)


def _by_probability(node: _Node) -> tuple[float, int]:
    """A parent comes before its children: it is no less probable, and was found before them."""
    return -node.probability, node.index


def _ahead(noise: TokenNoise | None, depth: int) -> TokenNoise | None:
    """The noise so many tokens ahead."""
    if noise is None or not depth:
        return noise
    return replace(noise, position=noise.position + depth, large=None)


def _with_noise(successors: list[Shares], noise: TokenNoise) -> list[Shares]:
    """The same tokens, weighted with the noise that will choose among those of this depth."""
    several = [following for following in successors if len(following) > 1]
    if not several:
        return successors
    ids = list(dict.fromkeys(token_id for following in several for token_id in following))
    stream = Stream(noise.seed, noise.sample_index, noise.position)
    own = noise.temperature * noise_at([stream], [len(ids)], np.array(ids))
    factors = dict(zip(ids, np.exp(own.clip(-MOST_NOISE, MOST_NOISE)).tolist(), strict=True))
    return [_weighted(following, factors) for following in successors]


def _weighted(following: Shares, factors: Shares) -> Shares:
    """Shares with factors, normalized; one alone stays as it is."""
    if len(following) < 2:
        return following
    weights = {token_id: share * factors[token_id] for token_id, share in following.items()}
    # All other tokens count without noise, as in a block.
    total = sum(weights.values()) + max(0.0, 1.0 - sum(following.values()))
    return {token_id: weight / total for token_id, weight in weights.items()}
