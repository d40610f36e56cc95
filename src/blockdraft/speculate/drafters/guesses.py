"""What a Hydra head guesses behind a text; see `models.hydra_head`.

The kernels do the same inside their search of n-grams; this serves where there are none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.models.hydra_head import read, read_on
from blockdraft.speculate.drafters.ngram_table import Shares

WEIGHT = 0.8
"""Of the guesses beside what the table says."""
NUM_GUESSES = 16
"""Tokens that are looked at whoever else names them, the most probable ones."""
LEAST_TEMPERATURE = 0.7
"""Logits are divided by a request's temperature, but by no less, and never by more than 1."""


NUM_GUESSED_ON = 4
"""Paths of a length, the most probable ones, that guesses go on from."""
LEAST_GUESSED_ON = 0.7
"""Their probability together, or no guess goes on: it takes a fiftieth of a step's time. With 0.3
no more tokens were kept on the default pair, and twice the time was taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """What a head says of the token behind a path.

    read: [D], what it read there. probabilities: [n], of its tokens.
    """

    read: Tensor
    probabilities: NDArray[np.float64]


@torch.inference_mode()
def guess(
    layers: HydraLayers, features: NDArray[np.float32], anchor: int, temperature: float
) -> Guess | None:
    """What follows the anchor, from the features [K * D] before it.

    temperature: of the request, 0 for greedy. None where features are no numbers.
    """
    hidden = read(layers, torch.from_numpy(features)[None], _embedded(layers, [anchor]))
    return _guesses(layers, hidden, temperature)[0]


@torch.inference_mode()
def guess_on(
    layers: HydraLayers, before: Sequence[Guess], token_ids: Sequence[int], temperature: float
) -> list[Guess | None]:
    """What follows each token, of a path behind which a guess was made before it."""
    hidden = torch.stack([own.read for own in before])
    hidden = read_on(layers, hidden, _embedded(layers, token_ids))
    return _guesses(layers, hidden, temperature)


def _embedded(layers: HydraLayers, token_ids: Sequence[int]) -> Tensor:
    return layers.embedding[list(token_ids)].float()


def _guesses(layers: HydraLayers, hidden: Tensor, temperature: float) -> list[Guess | None]:
    sharpened = layers.score(hidden).double() / min(1.0, max(LEAST_TEMPERATURE, temperature))
    found = (layers.covered * torch.softmax(sharpened, -1)).numpy()
    return [
        Guess(own, probabilities) if np.isfinite(probabilities).all() else None
        for own, probabilities in zip(hidden, found, strict=True)
    ]


def mixed(layers: HydraLayers, guessed: Guess, known: Shares) -> Shares:
    """What a table says of tokens, mixed with guesses of these and of the most probable ones."""
    found = {token_id: (1 - WEIGHT) * share for token_id, share in known.items()}
    guesses = guessed.probabilities
    num = min(NUM_GUESSES, len(guesses))
    for place in np.argpartition(-guesses, num - 1)[:num]:
        found.setdefault(int(layers.token_ids[place]), 0.0)
    for token_id in found:
        place = layers.places[token_id] if token_id < len(layers.places) else -1
        if place >= 0:
            found[token_id] += WEIGHT * float(guesses[place])
    return found
