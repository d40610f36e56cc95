"""The EAGLE-3 drafter: one decoder layer that extrapolates the target's features, token by token.

Architecture: EAGLE-3 (arXiv 2503.01840), in the layout of the published checkpoints. Features of
three layers of the target, fused by `fc`, are the hidden state of a committed token. An input of
the layer is a pair: the hidden state of a position and the token at the next one. Attention reads
both, normed and side by side; the residual is the hidden state. The output predicts the token
behind that of the pair, and is the hidden state of the next pair, as the target has no features of
drafted tokens. So training runs several steps over its own outputs (training-time test).

EAGLE-3.1, the name that vLLM and speculators give to it, adds norms that keep the sizes of inputs
the same at all depths: of the features before `fc`, one for all (`norm_before_fc`) or one for each
(`fc_norm`); and of the output before it enters the next pair (`norm_output`).

The head knows a part of the vocabulary: `d2t` adds to each of its rows what makes the token's id.

A pair stands at the position of its token, where its key and value lie. Rotary embeddings only see
differences of positions, so this equals the authors' count, which is one less throughout.

Shapes: b sequences, t pairs, D hidden size, V vocabulary, n draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from blockdraft.core.errors import ModelError
from blockdraft.kernels.interface import Rotation
from blockdraft.kernels.weights import GroupWeight
from blockdraft.models.draft.attention import ScoreMask
from blockdraft.models.draft.checkpoint import (
    check_tensors,
    load_copies,
    read_config,
    read_tensors,
    write_checkpoint,
)
from blockdraft.models.draft.context import ContextKV, DraftContext, LayerKV
from blockdraft.models.draft.eagle3_config import Eagle3Config
from blockdraft.models.draft.modules import INIT_STD, DraftAttention, DraftMLP, RMSNorm, Rotary
from blockdraft.models.draft.own_ends import EMBEDDING_NAME, check_shape
from blockdraft.models.draft.speculators_layout import (
    OF_THE_VERIFIER,
    d2t_of,
    draft_vocabulary_of,
)
from blockdraft.models.layers.quantized import look_up

_LAYER = "midlayer."
_LAYER_ELSEWHERE = "layers.0."


class GrowingKV:
    """Keys and values of the steps of one training pass, safe for autograd."""

    num_context = 0

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def extend(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """Those of all steps so far and of this one, each [b, kv_heads, steps * t, head_dim]."""
        self._keys.append(k)
        self._values.append(v)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


class Eagle3Layer(nn.Module):
    """The decoder layer; tokens and hidden states are normed each with a norm of their own."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(
            config, 2 * config.hidden_size, has_head_norms=config.head_norms
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def keys_values(self, embeddings: Tensor, hidden: Tensor, rotation: Rotation) -> LayerKV:
        """Of pairs: token embeddings and hidden states, each [b, t, D]."""
        x = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(hidden)), dim=-1)
        return self.self_attn.keys_values(x, rotation)

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        context: ContextKV,
        mask: ScoreMask,
    ) -> Tensor:
        """Pairs as in `keys_values` -> [b, t, D]."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        residual = normed if self._norm_before_residual else hidden
        x = residual + self.self_attn(x, rotation, context, 0, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Model(nn.Module):
    """An EAGLE-3 drafter with random weights; `from_pretrained` loads trained ones.

    Its parameters carry the authors' names, so its state dict is the checkpoint. `draft_vocabulary`
    are the token ids [n] that its head knows, ascending; None means all of them, and is possible
    only if the config says so. `own_embedding` [V, D]: None if it takes the target's.

    Raises:
        ModelError: the config's activation or RoPE is not usable.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.draft_vocabulary: list[int] | None = None
        if config.draft_vocab_size < config.vocab_size:
            self.draft_vocabulary = list(range(config.draft_vocab_size))
        # A buffer, so that it goes where the weights go; in the state dict it would be trained.
        self.own_embedding: Tensor | None
        self.register_buffer("own_embedding", None, persistent=False)
        num_inputs = config.num_features * config.target_hidden_size
        self.input_norm: RMSNorm | None = None
        self.fc_norm: nn.ModuleList | None = None
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_inputs, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_features)
            )
        self.fc = nn.Linear(num_inputs, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load a drafter from a folder in either published layout, in evaluation mode.

        Args:
            folder: holds `config.json` and `model.safetensors`.
            dtype: of the weights; None keeps that of the checkpoint.
            device: where the weights go.

        Raises:
            ModelError: the folder is incomplete, holds another kind of drafter, or its tensors
                are not those of its config.
        """
        folder = Path(folder)
        config = Eagle3Config.from_dict(read_config(folder))
        tensors = _authors_names(read_tensors(folder))
        # Qwen3's norms show in the tensors; model_type is not always that of the layer.
        has_head_norms = f"{_LAYER}self_attn.q_norm.weight" in tensors
        config = replace(config, head_norms=has_head_norms)
        token_ids = _take_vocabulary(tensors, config, folder)
        embedding = tensors.pop(EMBEDDING_NAME, None)
        check_shape(embedding, EMBEDDING_NAME, [config.vocab_size], config, folder)
        with torch.device("meta"):
            model = cls(config)
        check_tensors(tensors, model.state_dict(), folder)
        model.own_embedding = load_copies(model, tensors, dtype, device)(embedding)
        model.draft_vocabulary = token_ids
        return model.eval()

    def save_pretrained(
        self, folder: str | Path, provenance: Mapping[str, Any] | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors` in the authors' layout.

        Every file appears whole or not at all. `provenance` (how it was made) goes to
        `provenance.json` beside them.
        """
        config, tensors = self.config.to_dict(), dict(self.state_dict())
        config["dtype"] = str(self.fc.weight.dtype).removeprefix("torch.")
        if self.own_embedding is not None:
            tensors[EMBEDDING_NAME] = self.own_embedding
        if self.draft_vocabulary is not None:
            tensors["d2t"] = d2t_of(self.draft_vocabulary)
            tensors["t2d"] = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            tensors["t2d"][self.draft_vocabulary] = True
        write_checkpoint(Path(folder), config, tensors, provenance)

    def draft_layers(self) -> list[Eagle3Layer]:
        """The one layer, as a DraftModel gives its layers."""
        return [self.midlayer]

    def new_context(self, capacity: int = 512) -> DraftContext:
        """An empty context for one sequence, fit for this model."""
        config, weight = self.config, self.fc.weight
        shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        return DraftContext(*shape, dtype=weight.dtype, device=weight.device, capacity=capacity)

    def embed(self, token_ids: Tensor, embed_weight: Tensor | GroupWeight) -> Tensor:
        """Token ids [b, t] -> [b, t, D]: rows of an embedding matrix [V, D]."""
        return look_up(token_ids, embed_weight).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Features [b, t, num_features * target_hidden_size] -> hidden states [b, t, D]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(self.config.num_features, dim=-1)
            normed = (norm(own) for norm, own in zip(self.feature_norms(), parts, strict=True))
            features = torch.cat([*normed], dim=-1)
        hidden: Tensor = self.fc(features)
        return hidden

    def keys_values(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> LayerKV:
        """Keys and values of pairs, each [b, kv_heads, t, head_dim]; see `forward`.

        There is one layer, so those of a context need nothing of the pairs before them.
        """
        return self.midlayer.keys_values(
            embeddings, hidden, self.rotary(positions, embeddings.dtype)
        )

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: ContextKV,
        mask: ScoreMask = None,
    ) -> Tensor:
        """One step: the hidden states that the target would have behind each pair's token.

        Args:
            embeddings: [b, t, D] of the pairs' tokens, from `embed`.
            hidden: [b, t, D] of the position before each token: from `fuse`, or what an earlier
                step returned.
            positions: [b, t] of the tokens, absolute.
            context: keys and values of earlier pairs; gets those of these. In training a
                `GrowingKV` for all steps.
            mask: where a pair may look, [b or 1, 1, t, keys], truth values or numbers that are
                added to the scores; None for everything. In training see `train/kinds/eagle3.py`.

        Returns:
            [b, t, D], normed if the config has `norm_output`: `logits` are of it, and it is the
            next step's `hidden`.
        """
        rotation = self.rotary(positions, embeddings.dtype)
        out: Tensor = self.midlayer(embeddings, hidden, rotation, context, mask)
        return self.norm(out) if self.config.norm_output else out

    def feature_norms(self) -> list[RMSNorm]:
        """Those of `fc_norm`, with their type; none if features have none of their own."""
        return [norm for norm in self.fc_norm or () if isinstance(norm, RMSNorm)]

    def head_input(self, hidden: Tensor) -> Tensor:
        """What `forward` returned, [..., D] -> the same as `lm_head` reads it, normed once."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned, [..., D] -> logits [..., n] of the next token."""
        found: Tensor = self.lm_head(self.head_input(hidden))
        return found


def _authors_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what training alone needs, and the layer by the name that it has in both layouts."""
    return {
        _LAYER + name.removeprefix(_LAYER_ELSEWHERE)
        if name.startswith(_LAYER_ELSEWHERE)
        else name: value
        for name, value in tensors.items()
        if name not in OF_THE_VERIFIER
    }


def _take_vocabulary(
    tensors: dict[str, Tensor], config: Eagle3Config, folder: Path
) -> list[int] | None:
    """Take `d2t` and `t2d` out of the tensors: the token ids that the head knows, None for all."""
    if config.draft_vocab_size == config.vocab_size:
        # The authors' code writes them here too, and reads neither.
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return None
    token_ids = draft_vocabulary_of(tensors, config.vocab_size, folder)
    found = 0 if token_ids is None else len(token_ids)
    if token_ids is None or found != config.draft_vocab_size:
        raise ModelError(
            f"{folder} has a head for {config.draft_vocab_size} of {config.vocab_size} tokens, and "
            f"its d2t names {found}; use the files of one checkpoint"
        )
    return token_ids.tolist()
