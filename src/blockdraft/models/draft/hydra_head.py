"""A Hydra head: guesses the tokens behind the newest one, which no feature of the target knows yet.

It reads the outputs of some layers of the target behind the last token but one, and the last token
itself; one layer of attention looks back at what it read before, and the target's own head reads
what it makes of them. For tokens further ahead its own state stands in for the target's features.

Heads on the target's features: Medusa (arXiv 2401.10774); those that read the tokens behind them
and the text before, too: Hydra (arXiv 2402.05109); a state in place of features: EAGLE (arXiv
2401.15077), trained on its own states as in EAGLE-3 (arXiv 2503.01840).

D: hidden size of the target, V: its vocabulary, K: layers whose outputs are read, n: tokens that
are guessed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from blockdraft.core.errors import ModelError
from blockdraft.core.files import replace_file
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.kernels.backends import kernels_state
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.interface import Linear
from blockdraft.kernels.weights import GroupWeight
from blockdraft.models.layers.packed import side_by_side
from blockdraft.models.layers.quantized import look_up

HEAD_NAME = "hydra_head.safetensors"
"""Beside the weights of a drafter."""
EPS = 1e-6
ROTATION_BASE = 10_000.0

MOST_LEVEL = 127
"""Matrices are kept as whole numbers of at most this size, with a scale for each output."""

_SHAPE, _PROVENANCE, _MATRIX, _SCALES = "shape", "provenance", ".weight", ".scales"

MOST_WINDOW = 32_768
"""No weights tell how far a head looks back, and memory for all of it is taken for each text."""


@dataclass(frozen=True)
class HeadShape:
    """hidden_size: of the target. inner_size: of the gated layer. target_layer_ids: 0-based.

    covered: of the target's choices, the share that the head's tokens have. num_heads, num_keys,
    head_dim: of attention, query heads and those of keys and values. window: places that a place
    looks back at, itself among them.
    """

    hidden_size: int
    inner_size: int
    target_layer_ids: tuple[int, ...]
    covered: float
    num_heads: int = 8
    num_keys: int = 4
    head_dim: int = 64
    window: int = 256

    def fault(self) -> str:
        """What no head can have; empty if all is right."""
        sizes = self.inner_size, self.num_heads, self.num_keys, self.head_dim, self.window
        layers = self.target_layer_ids
        if not all(type(size) is int and size >= 1 for size in sizes):
            return "its sizes are not whole numbers above zero"
        if self.window > MOST_WINDOW:
            return (
                f"it looks back at {self.window} positions, and at most {MOST_WINDOW} are supported"
            )
        if not layers or not all(type(layer) is int and layer >= 0 for layer in layers):
            return f"it reads the layers {layers}"
        if self.num_heads % self.num_keys or self.head_dim % 2:
            return f"{self.num_heads} heads of {self.head_dim} do not share {self.num_keys} keys"
        if not 0.0 < self.covered <= 1.0:
            return f"its tokens cover {self.covered} of the target's choices"
        return ""


class HydraHead(nn.Module):
    """What is trained; embedding and head are the target's.

    token_ids: [n], rising, that are guessed; all others are left to other drafters.
    """

    token_ids: Tensor

    def __init__(self, shape: HeadShape, token_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        size, num_features = shape.hidden_size, len(shape.target_layer_ids)
        self.register_buffer("token_ids", token_ids.long(), persistent=False)
        self.feature_norms = nn.Parameter(torch.ones(num_features, size))
        self.embedding_norm = nn.Parameter(torch.ones(size))
        self.join = nn.Linear((num_features + 1) * size, size, bias=False)
        self.state_norm = nn.Parameter(torch.ones(size))
        self.next_norm = nn.Parameter(torch.ones(size))
        self.join_on = nn.Linear(2 * size, size, bias=False)
        self.attention_norm = nn.Parameter(torch.ones(size))
        num_heads = shape.num_heads + 2 * shape.num_keys
        self.heads = nn.Linear(size, num_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.num_heads * shape.head_dim, size, bias=False)
        self.norm = nn.Parameter(torch.ones(size))
        self.gate_up = nn.Linear(size, 2 * shape.inner_size, bias=False)
        self.down = nn.Linear(shape.inner_size, size, bias=False)
        self.last_norm = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(len(token_ids)))

    def forward(self, features: Tensor, embeddings: Tensor, depths: int) -> list[Tensor]:
        """What is guessed at each place of texts, from 1 to `depths` tokens ahead of what is known.

        features: [texts, places, K * D], embeddings: [texts, places, D] of the tokens behind them.
        Returns [texts, places, D] of each depth, which the target's head reads: all of a place are
        of the same token, and the d-th knows no features of the last d - 1 places.
        """
        shape, places = self.shape, torch.arange(embeddings.shape[1], device=embeddings.device)
        distance = places[:, None] - places
        rotation = rotation_of(places, shape.head_dim)
        x = layer_input(self, features, embeddings)
        keys, values, states = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth in range(depths):
            if depth:
                before = F.pad(states[-1], (0, 0, 1, 0))[:, :-1]
                x = next_layer_input(self, before, embeddings)
            query, key, value = split_heads(self, x, rotation)
            keys.append(key)
            values.append(value)
            # The last places as they were read at that depth, all before them with their features.
            seen = [(distance >= depth) & (distance < shape.window)]
            seen += [distance == depth - own for own in range(1, depth + 1)]
            known = torch.cat(keys, 2), torch.cat(values, 2), torch.cat(seen, 1)
            states.append(state_of(self, x, query, *known))
        return [_normed(state, self.last_norm) for state in states]

    def layers(
        self,
        embed_weight: Tensor | GroupWeight,
        lm_head_weight: Tensor | GroupWeight,
        feature_layers: Sequence[int],
    ) -> HydraLayers:
        """The head at work on a CPU, beside a target with these weights [V, D].

        Shares the embedding where kernels read its type. feature_layers: of the target, whose
        outputs drafters get, with its own among them.
        """
        places = torch.full((embed_weight.shape[0],), -1)
        places[self.token_ids] = torch.arange(len(self.token_ids))
        return HydraLayers(
            join=_layer(self.join.weight),
            join_on=_layer(self.join_on.weight),
            heads=_layer(self.heads.weight),
            out=_layer(self.out.weight),
            gate_up=_layer(self.gate_up.weight),
            down=_layer(self.down.weight),
            score=_layer(look_up(self.token_ids, lm_head_weight), self.bias),
            feature_norms=self.feature_norms.detach().float().contiguous(),
            embedding_norm=self.embedding_norm.detach().float(),
            state_norm=self.state_norm.detach().float(),
            next_norm=self.next_norm.detach().float(),
            attention_norm=self.attention_norm.detach().float(),
            norm=self.norm.detach().float(),
            last_norm=self.last_norm.detach().float(),
            eps=EPS,
            covered=self.shape.covered,
            num_heads=self.shape.num_heads,
            num_keys=self.shape.num_keys,
            head_dim=self.shape.head_dim,
            window=self.shape.window,
            frequencies=_frequencies(self.shape.head_dim),
            feature_layers=tuple(feature_layers),
            read_places=np.array(
                [feature_layers.index(layer) for layer in self.shape.target_layer_ids], np.int64
            ),
            embedding=_embedding(embed_weight),
            token_ids=self.token_ids.numpy().astype(np.int64),
            places=places.numpy(),
        )

    def save(self, folder: Path, provenance: Mapping[str, Any] | None = None) -> None:
        """Write HEAD_NAME into a drafter's folder: matrices in int8, as kernels use them.

        provenance: how the head was made, as values of JSON; kept in the file's metadata.
        """
        tensors = {}
        for name, value in self.state_dict().items():
            if name.endswith(_MATRIX):
                scales = (value.abs().amax(1) / MOST_LEVEL).clamp_min(
                    torch.finfo(torch.float32).tiny
                )
                tensors[name] = (value / scales[:, None]).round().to(torch.int8)
                tensors[name + _SCALES] = scales
            else:
                tensors[name] = value.bfloat16()
        tensors["token_ids"] = self.token_ids.int()
        shape = asdict(self.shape)
        del shape["hidden_size"]  # the target's
        facts = {_SHAPE: shape} | ({_PROVENANCE: provenance} if provenance else {})
        metadata = {name: json.dumps(value) for name, value in facts.items()}
        replace_file(folder / HEAD_NAME, lambda path: save_file(tensors, path, metadata))

    @classmethod
    def load(cls, folder: Path, hidden_size: int, vocab_size: int) -> "HydraHead | None":
        """The head in a drafter's folder, in float32; None if it has none.

        Raises:
            ModelError: the file is damaged, or belongs to a target of other sizes.
        """
        path = folder / HEAD_NAME
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                shape = json.loads(file.metadata()[_SHAPE])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            token_ids = tensors.pop("token_ids").long()
            for name in [name for name in tensors if name.endswith(_MATRIX)]:
                tensors[name] = tensors[name] * tensors.pop(name + _SCALES)[:, None]
            shape["target_layer_ids"] = tuple(shape["target_layer_ids"])
            sizes = HeadShape(hidden_size, **shape)
            if fault := sizes.fault():
                raise ValueError(fault)
            head = cls(sizes, token_ids)
            head.load_state_dict({name: value.float() for name, value in tensors.items()})
            rises = bool((token_ids.diff() > 0).all())
            if not (len(token_ids) and rises and token_ids[0] >= 0 and token_ids[-1] < vocab_size):
                raise ValueError(f"its tokens are not ascending ids below {vocab_size}")
            if not all(bool(value.isfinite().all()) for value in tensors.values()):
                raise ValueError("some weights are not finite")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"{path} is not a Hydra head for a target with hidden size {hidden_size} "
                f"({' '.join(str(error).split())}); copy it again, or delete it to draft without"
            ) from error
        return head.eval()


Parts = HydraHead | HydraLayers
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [places, head_dim] each."""


def layer_input(parts: Parts, features: Tensor, embeddings: Tensor) -> Tensor:
    """Features [.., K * D] and embeddings [.., D] of the tokens behind them -> [.., D]."""
    by_layer = features.view(*features.shape[:-1], *parts.feature_norms.shape)
    by_layer = _normed(by_layer, parts.feature_norms)
    return parts.join(
        torch.cat((by_layer.flatten(-2), _normed(embeddings, parts.embedding_norm)), -1)
    )


def next_layer_input(parts: Parts, states: Tensor, embeddings: Tensor) -> Tensor:
    """As `layer_input`, with states [.., D] in place of the features."""
    return parts.join_on(
        torch.cat((_normed(states, parts.state_norm), _normed(embeddings, parts.next_norm)), -1)
    )


def rotation_of(places: Tensor, head_dim: int) -> Rotation:
    """Of queries and keys at these places [places]; rotary embeddings (arXiv 2104.09864)."""
    angles = places.float()[:, None] * _frequencies(head_dim).to(places.device)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def split_heads(parts: Parts, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [texts, heads, places, head_dim] of [texts, places, D]."""
    shape = parts.shape if isinstance(parts, HydraHead) else parts
    heads = parts.heads(_normed(x, parts.attention_norm)).view(*x.shape[:-1], -1, shape.head_dim)
    query, key, value = heads.transpose(1, 2).split(
        (shape.num_heads, shape.num_keys, shape.num_keys), 1
    )
    return _turned(query, rotation), _turned(key, rotation), value


def state_of(
    parts: Parts, x: Tensor, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None
) -> Tensor:
    """[texts, places, D] of `layer_input` there, plus what attention and the gated layer add.

    seen: [places, keys], which keys a place looks at; None: all.
    """
    attended = F.scaled_dot_product_attention(query, keys, values, seen, enable_gqa=True)
    x = x + parts.out(attended.transpose(1, 2).flatten(2))
    gates, gated = parts.gate_up(_normed(x, parts.norm)).chunk(2, -1)
    return x + parts.down(F.silu(gates) * gated)


def logits_of(layers: HydraLayers, state: Tensor) -> Tensor:
    """Of the tokens that are guessed, [.., n], from states [.., D]."""
    return layers.score(_normed(state, layers.last_norm))


def _frequencies(head_dim: int) -> Tensor:
    return ROTATION_BASE ** (-torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)


def _turned(heads: Tensor, rotation: Rotation) -> Tensor:
    first, second = heads.chunk(2, -1)
    turned = heads * rotation[0] + torch.cat((-second, first), -1) * rotation[1]
    return turned.to(heads.dtype)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS) * weight


def _embedding(weight: Tensor | GroupWeight) -> Tensor:
    """Itself, where kernels read its type."""
    if isinstance(weight, Tensor) and weight.dtype in (torch.float32, torch.bfloat16):
        return weight.detach().contiguous()
    return look_up(torch.arange(weight.shape[0]), weight).detach().bfloat16()


def _layer(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """In int8 where kernels multiply: guesses need no exactness."""
    has_kernels, _, _ = kernels_state()
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return side_by_side(linear, in_int8=has_kernels)
