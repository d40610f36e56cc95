"""What a Hydra head guesses behind a text; see `models.hydra_head`.

The kernels do the same inside their search of n-grams; this serves where there are none.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.models.hydra_head import read
from blockdraft.speculate.drafters.ngram_table import Shares

WEIGHT = 0.8
"""Of the guesses beside what the table says."""
NUM_GUESSES = 16
"""Tokens that are looked at whoever else names them, the most probable ones."""
LEAST_TEMPERATURE = 0.7
"""Logits are divided by a request's temperature, but by no less, and never by more than 1."""


@torch.inference_mode()
def guess(
    layers: HydraLayers, features: Tensor, anchor: int, temperature: float
) -> NDArray[np.float64] | None:
    """Probabilities [n] of what follows the anchor, from the features before it.

    temperature: of the request, 0 for greedy. None where features are no numbers.
    """
    embedded = layers.embedding[[anchor]].float()
    by_layer = features.float().view(len(layers.feature_layers), -1)
    own = by_layer[torch.from_numpy(layers.read_places)].view(1, -1)
    logits = layers.score(read(layers, own, embedded))[0].double()
    sharpened = logits / min(1.0, max(LEAST_TEMPERATURE, temperature))
    found: NDArray[np.float64] = (layers.covered * torch.softmax(sharpened, -1)).numpy()
    return found if np.isfinite(found).all() else None


def mixed(layers: HydraLayers, guessed: NDArray[np.float64], known: Shares) -> Shares:
    """What a table says of tokens, mixed with guesses of these and of the most probable ones."""
    found = {token_id: (1 - WEIGHT) * share for token_id, share in known.items()}
    num = min(NUM_GUESSES, len(guessed))
    for place in np.argpartition(-guessed, num - 1)[:num]:
        found.setdefault(int(layers.token_ids[place]), 0.0)
    for token_id in found:
        place = layers.places[token_id] if token_id < len(layers.places) else -1
        if place >= 0:
            found[token_id] += WEIGHT * float(guessed[place])
    return found
