"""A Hydra head: guesses the token behind the newest one, which no feature of the target knows yet.

It reads the outputs of some layers of the target behind the last token but one, and the last token
itself; the target's own head reads what it makes of them. There is no attention, so a guess costs a
few products. Heads on the target's features: Medusa (arXiv 2401.10774); those that read the tokens
behind them too: Hydra (arXiv 2402.05109).

D: hidden size of the target, V: its vocabulary, K: layers whose outputs are read, n: tokens that
are guessed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from blockdraft.core.errors import ModelError
from blockdraft.kernels.backends import kernels_state
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.interface import GroupWeight, Linear
from blockdraft.models.packed import side_by_side
from blockdraft.models.quantized import look_up

HEAD_NAME = "hydra_head.safetensors"
"""Beside the weights of a drafter."""
EPS = 1e-6

_SHAPE = "shape"


@dataclass(frozen=True)
class HeadShape:
    """hidden_size: of the target. inner_size: of the gated layer. target_layer_ids: 0-based.

    covered: of the target's choices, the share that the head's tokens have.
    """

    hidden_size: int
    inner_size: int
    target_layer_ids: tuple[int, ...]
    covered: float


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
        self.norm = nn.Parameter(torch.ones(size))
        self.gate_up = nn.Linear(size, 2 * shape.inner_size, bias=False)
        self.down = nn.Linear(shape.inner_size, size, bias=False)
        self.last_norm = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(len(token_ids)))

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
            gate_up=_layer(self.gate_up.weight),
            down=_layer(self.down.weight),
            score=_layer(look_up(self.token_ids, lm_head_weight), self.bias),
            feature_norms=self.feature_norms.detach().float().contiguous(),
            embedding_norm=self.embedding_norm.detach().float(),
            norm=self.norm.detach().float(),
            last_norm=self.last_norm.detach().float(),
            eps=EPS,
            covered=self.shape.covered,
            feature_layers=tuple(feature_layers),
            read_places=np.array(
                [feature_layers.index(layer) for layer in self.shape.target_layer_ids], np.int64
            ),
            embedding=_embedding(embed_weight),
            token_ids=self.token_ids.numpy().astype(np.int64),
            places=places.numpy(),
        )

    def save(self, folder: Path) -> None:
        """Write HEAD_NAME into a drafter's folder, in bfloat16."""
        tensors = {name: value.detach().bfloat16() for name, value in self.state_dict().items()}
        tensors["token_ids"] = self.token_ids.int()
        shape = {
            "inner_size": self.shape.inner_size,
            "target_layer_ids": self.shape.target_layer_ids,
            "covered": self.shape.covered,
        }
        save_file(tensors, folder / HEAD_NAME, {_SHAPE: json.dumps(shape)})

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
            layer_ids = tuple(shape["target_layer_ids"])
            sizes = HeadShape(hidden_size, shape["inner_size"], layer_ids, float(shape["covered"]))
            head = cls(sizes, token_ids)
            head.load_state_dict({name: value.float() for name, value in tensors.items()})
            rises = bool((token_ids.diff() > 0).all())
            if not (len(token_ids) and rises and token_ids[0] >= 0 and token_ids[-1] < vocab_size):
                raise ValueError(f"its tokens are not rising ids below {vocab_size}")
            if not all(bool(value.isfinite().all()) for value in tensors.values()):
                raise ValueError("some weights are no finite numbers")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{path} is no Hydra head of a target with hidden size {hidden_size} "
                f"({' '.join(str(error).split())}); copy it again, or delete it to draft without"
            ) from error
        return head.eval()


Parts = HydraHead | HydraLayers


def read(parts: Parts, features: Tensor, embeddings: Tensor) -> Tensor:
    """Features [b, K * D] and embeddings [b, D] of the tokens behind them -> [b, D].

    The target's head reads that.
    """
    by_layer = _normed(features.view(-1, *parts.feature_norms.shape), parts.feature_norms)
    x = torch.cat((by_layer.flatten(-2), _normed(embeddings, parts.embedding_norm)), -1)
    x = parts.join(x)
    gates, values = parts.gate_up(_normed(x, parts.norm)).chunk(2, -1)
    return _normed(x + parts.down(F.silu(gates) * values), parts.last_norm)


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
