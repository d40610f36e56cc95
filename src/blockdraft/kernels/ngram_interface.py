"""What a search of n-grams is told and finds; kernels have one, and drafters a plain one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

READ_DTYPES = (torch.float32, torch.bfloat16)
"""Of features."""


@dataclass(frozen=True, slots=True, eq=False)
class NGramPart:
    """Contexts of one length in a table of n-grams. keys: [contexts], rising, the hash of each.

    starts: [contexts + 1], where the successors of each begin, the most probable first, in tokens
    and levels, [successors]. rests: [contexts], the level of what is left to shorter contexts.
    """

    keys: NDArray[np.uint32]
    starts: NDArray[np.int64]
    rests: NDArray[np.uint8]
    tokens: NDArray[np.uint32]
    levels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OwnTextBelief:
    """How far a text is believed about what follows in it.

    known_token: so many times as probable is a successor that the text holds. priors: so many
    observations is the shorter context worth, for contexts of one token, two, and three.
    """

    known_token: float
    priors: tuple[float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class NGramRules:
    """What a search of n-grams goes by.

    parts: of the table, contexts of one token first; none or three. frequencies: [tokens], the
    level of each token whatever stands before it. probabilities: [256], of the levels. head: the
    successors of a context that are looked at, whatever their noise. beside_table, beside_guess:
    what is believed of the text itself where only a table knows more, and where a head has guessed,
    which has seen the text too. least_probability: of what is found.
    most_noise: what is added to the logarithm of a share at most. max_read: tokens of a new text
    that are counted, its last ones. max_remembered: successors of a context in the text that count.
    guess_weight: of a Hydra head beside the table. num_guesses: of the most probable ones.
    guess_temperature: the lowest that its logits are divided by. num_guessed_on: paths of a length
    behind which it guesses, the most probable ones. least_guessed_on: probability of such a path.
    """

    parts: Sequence[NGramPart]
    frequencies: NDArray[np.uint8]
    probabilities: NDArray[np.float64]
    head: int
    beside_table: OwnTextBelief
    beside_guess: OwnTextBelief
    least_probability: float
    most_noise: float
    max_read: int
    max_remembered: int
    guess_weight: float
    num_guesses: int
    guess_temperature: float
    num_guessed_on: int
    least_guessed_on: float


@dataclass(frozen=True, slots=True, eq=False)
class TokenNoise:
    """The noise that chooses a token: a stream of random words, and what it is multiplied by.

    Tokens further on have the positions behind. large: of the first one the tokens with the largest
    noise, rising ids, and their noise; None if they are not to be looked at.
    """

    seed: int
    sample_index: int
    position: int
    temperature: float
    large: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None


@dataclass(frozen=True, slots=True)
class NGramPaths:
    """Nodes of a tree: tokens, places of parents (-1 for none), and never rising probabilities."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NGramQuery:
    """A text whose most probable paths are wanted, `num_nodes` nodes at most.

    key: names the text, which only ever grows: what is new of it is counted first. noise: of the
    first token; None if nothing but probability decides. features: [rows, values] of the tokens
    before the last ones, as `HydraLayers` has them, of READ_DTYPES; without, no head guesses.
    guess_depth: tokens ahead that it guesses at most.
    """

    key: int
    token_ids: Sequence[int]
    noise: TokenNoise | None
    num_nodes: int
    max_depth: int
    features: Tensor | None = None
    guess_depth: int = 1


class NGramSearch(Protocol):
    """Finds what is likely to follow a text, by a table and by what followed in the text itself."""

    def paths(self, queries: Sequence[NGramQuery]) -> list[NGramPaths]:
        """The most probable tokens behind each text, each with the path to it; no key twice."""

    def search_ahead(self, queries: Sequence[NGramQuery]) -> None:
        """Begin with queries that are likely to be asked next, if it can; no key twice.

        Whoever asks the same later need not wait so long. Features stay as they are until then.
        """

    def close(self, key: int) -> None:
        """Forget a text, known or not."""
