"""What a Hydra head guesses behind a text; see `models.draft.hydra_head`.

The kernels do the same inside their search of n-grams; this serves where there are none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.models.draft.hydra_head import (
    layer_input,
    logits_of,
    next_layer_input,
    rotation_of,
    split_heads,
    state_of,
)
from blockdraft.speculate.drafters.ngram_table import Shares

WEIGHT = 0.9
"""Of the guesses; what the table says has the rest."""
NUM_GUESSES = 24
"""The most probable guesses, so many, are candidates; others only if the table names them too."""
LEAST_TEMPERATURE = 0.7
"""Logits are divided by a request's temperature, but by no less than this and no more than 1."""
DEPTH = 3
"""Tokens ahead that are guessed; the released head was trained for so many."""
NUM_GUESSED_ON = 3
"""The head guesses behind the most probable paths of a length, so many of them."""
LEAST_GUESSED_ON = 0.2
"""It guesses only behind paths of this probability or more."""


KeyValue = tuple[Tensor, Tensor]
"""Key and value of one place, [num_keys, head_dim] each."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadState:
    """What a head has computed at a place of a text.

    hidden: [D]. path: keys and values of the places behind the end of the text, up to this one.
    """

    place: int
    hidden: Tensor
    path: tuple[KeyValue, ...] = ()


class HeadReader:
    """A head and what it has read of one text, place by place."""

    def __init__(self, layers: HydraLayers) -> None:
        self._layers = layers
        self._read: dict[int, KeyValue] = {}

    @torch.inference_mode()
    def read(self, features: Tensor, token_ids: Sequence[int]) -> HeadState:
        """Read the features [rows, values] of the tokens before the last ones of a text."""
        layers, num = self._layers, len(features)
        by_layer = features.float().view(num, len(layers.feature_layers), -1)
        own = by_layer[:, torch.from_numpy(layers.read_places)].flatten(1)
        places = torch.arange(len(token_ids) - num, len(token_ids))
        x = layer_input(layers, own, self._embedded(token_ids[-num:]))[None]
        query, keys, values = split_heads(layers, x, rotation_of(places, layers.head_dim))
        for row, place in enumerate(places.tolist()):
            key_value = keys[0, :, row], values[0, :, row]
            if all(bool(part.isfinite().all()) for part in key_value):
                self._read[place] = key_value
        last = len(token_ids) - 1
        for place in [place for place in self._read if last - place >= layers.window]:
            del self._read[place]
        return self._state(x[:, -1:], query[:, :, -1:], last, ())

    @torch.inference_mode()
    def read_on(self, before: HeadState, token_id: int) -> HeadState:
        """Read one token behind a place, without its features."""
        layers, place = self._layers, before.place + 1
        x = next_layer_input(layers, before.hidden[None], self._embedded([token_id]))[None]
        rotation = rotation_of(torch.tensor([place]), layers.head_dim)
        query, key, value = split_heads(layers, x, rotation)
        return self._state(x, query, place, (*before.path, (key[0, :, 0], value[0, :, 0])))

    def _state(self, x: Tensor, query: Tensor, place: int, path: tuple[KeyValue, ...]) -> HeadState:
        seen = [own for at, own in self._read.items() if place - at < self._layers.window]
        seen += path
        if not seen:  # nothing that was read is a number
            return HeadState(place, torch.full_like(x[0, 0], torch.nan), path)
        keys, values = (torch.stack(parts, 1)[None] for parts in zip(*seen, strict=True))
        return HeadState(place, state_of(self._layers, x, query, keys, values, None)[0, 0], path)

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        return self._layers.embedding[list(token_ids)].float()

    @torch.inference_mode()
    def guess(self, state: HeadState, temperature: float) -> NDArray[np.float64] | None:
        """Probabilities [n] of what follows; temperature: of the request, 0 for greedy.

        None where features are no numbers.
        """
        logits = logits_of(self._layers, state.hidden[None])[0].double()
        sharpened = logits / min(1.0, max(LEAST_TEMPERATURE, temperature))
        found: NDArray[np.float64] = (self._layers.covered * torch.softmax(sharpened, -1)).numpy()
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
