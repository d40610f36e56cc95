"""What kernels need of a Hydra head, to guess tokens inside a search of n-grams."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.kernels.interface import Linear


@dataclass(frozen=True, slots=True, eq=False)
class HydraLayers:
    """A Hydra head at work on a CPU, on rows in float32; see `models.draft.hydra_head`.

    D: hidden size of the target, V: its vocabulary, K: layers whose outputs are read.

    join: [K * D + D -> D], from normed features and the normed embedding of the token behind them.
    join_on: [2 * D -> D], from the normed state before and the normed embedding. heads: [D ->
    (num_heads + 2 * num_keys) * head_dim], queries, keys and values of attention. out: [num_heads *
    head_dim -> D]. gate_up: [D -> 2 * inner], the gates first. down: [inner -> D]. score: [D -> n],
    of the tokens that are guessed. feature_norms: [K, D]. embedding_norm, state_norm, next_norm (of
    the embedding that is joined to a state), attention_norm, norm, last_norm: [D]. eps: of norms.
    frequencies: [head_dim / 2], of rotations. window: places that are looked back at.
    covered: of the target's choices, the share that the tokens have which are guessed.
    feature_layers: of the target, whose outputs features are, one behind the other. read_places:
    [K], int64: which of these are read. embedding: [V, D], float32 or bfloat16. token_ids: [n],
    int64, rising: the tokens that are guessed. places: [V], int64: of each token among them, -1
    where it is not.
    """

    join: Linear
    join_on: Linear
    heads: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    score: Linear
    feature_norms: Tensor
    embedding_norm: Tensor
    state_norm: Tensor
    next_norm: Tensor
    attention_norm: Tensor
    norm: Tensor
    last_norm: Tensor
    frequencies: Tensor
    num_heads: int
    num_keys: int
    head_dim: int
    window: int
    eps: float
    covered: float
    feature_layers: tuple[int, ...]
    read_places: NDArray[np.int64]
    embedding: Tensor
    token_ids: NDArray[np.int64]
    places: NDArray[np.int64]

    @property
    def num_values(self) -> int:
        """Of the features of a token, of all layers."""
        return len(self.feature_layers) * self.feature_norms.shape[1]
