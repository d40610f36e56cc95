"""The DFlash drafter: a few decoder layers that fill a block of masked slots in one forward.

Architecture: DFlash (arXiv 2602.06036, appendix A.3), in the layout of the published
checkpoints: Qwen3-style layers without embedding and head of their own. Features of the target,
`hidden_norm(fc(features))`, enter every layer as extra keys and values through the layer's own
projections; the slots of the block see them and each other. The slot at absolute position p
predicts the token at p; slot 0 is the anchor, the last committed token, and predicts nothing.
DFlash 2 adds convolutions over the slots of a block (`convolution`), and a selector that
chooses a slot's token behind the one before it (`candidate_selector`). DSpark and Domino add heads
that correct a slot's logits by the tokens before it (`path_heads`). In theirs, and in others whose
config says `drafts_from_anchor`, every slot predicts the token behind its own position.

In DFlare and DFly (AngelSpec) each layer has a context of its own: a sum of the target's features,
weighted by a softmax over `layer_fusion_weights`. In DFlare it takes the place of `fc`, and layers
have projections of their own for keys and values of the context; in DFly it is added to `fc`'s
output. DFly also has a path head.

Shapes: b sequences, c context tokens, q block slots, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.kernels.interface import Rotation
from blockdraft.kernels.weights import GroupWeight
from blockdraft.models.draft.attention import ScoreMask
from blockdraft.models.draft.candidate_selector import CandidateSelector, lattice_of
from blockdraft.models.draft.checkpoint import (
    check_tensors,
    load_copies,
    read_config,
    read_tensors,
    write_checkpoint,
)
from blockdraft.models.draft.config import AttentionKind, DraftConfig
from blockdraft.models.draft.context import ContextKV, DraftContext, LayerKV
from blockdraft.models.draft.convolution import DynamicConvolution, Layer
from blockdraft.models.draft.masks import block_masks
from blockdraft.models.draft.modules import INIT_STD, DraftAttention, DraftMLP, RMSNorm, Rotary
from blockdraft.models.draft.own_ends import (
    read_mask_embedding,
    saved_ends,
    take_own_ends,
    write_mask_embedding,
)
from blockdraft.models.draft.path_heads import (
    CorrectionHead,
    DominoHead,
    HiddenCorrection,
    MarkovHead,
    PathHead,
    PathLogits,
    PrefixGRU,
    domino_projection,
)
from blockdraft.models.draft.vocabulary import read_draft_vocabulary, write_draft_vocabulary
from blockdraft.models.layers.quantized import look_up
from blockdraft.models.layers.tensors import with_fresh_strides

_FUSION, _FUSION_HERE = "layer_fusion_weights", "fc.weight"
"""What the checkpoint of a DFlare drafter calls the weights of its features, and its model."""


class DraftLayer(nn.Module):
    """One pre-norm decoder layer; only the block passes `input_layernorm`, never the context.

    The convolutions of DFlash 2 stand around attention and MLP, inside the residuals; DFlash has
    None there.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(
            config,
            config.hidden_size,
            has_bias=config.attention_bias,
            has_context_projections=config.dflare,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)
        self.attention_conv: DynamicConvolution | None = None
        self.mlp_conv: DynamicConvolution | None = None
        if config.dflash2 is not None:
            self.attention_conv = DynamicConvolution(config.hidden_size, config.dflash2)
            self.mlp_conv = DynamicConvolution(config.hidden_size, config.dflash2)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        context: ContextKV,
        layer: int,
        mask: ScoreMask,
        block_size: int,
    ) -> Tensor:
        """[b, q, D] -> [b, q, D], blocks of `block_size`; `mask` as in `DraftAttention.forward`."""

        def attention(normed: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(normed, rotation, context, layer, mask)
            return attended

        x = x + _between(self.attention_conv, attention, self.input_layernorm(x), block_size)
        normed = self.post_attention_layernorm(x)
        return x + _between(self.mlp_conv, self.mlp, normed, block_size)

    def context_keys_values(self, x: Tensor, rotation: Rotation) -> LayerKV:
        """`DraftAttention.context_keys_values`.

        A method of the layer, which is what processes share out and bring together as one.
        """
        return self.self_attn.context_keys_values(x, rotation)


def _between(
    convolution: DynamicConvolution | None, layer: Layer, x: Tensor, block_size: int
) -> Tensor:
    return layer(x) if convolution is None else convolution.around(layer, x, block_size)


class DraftModel(nn.Module):
    """A drafter that fills blocks, with random weights; `from_pretrained` loads trained ones.

    Its parameters carry the published names, so its state dict is the checkpoint. Set
    `draft_vocabulary` to guess from a part of the vocabulary only, see `models.draft.vocabulary`.
    Some checkpoints bring what others take from the target, see `models.draft.own_ends`:
    `own_embedding` [V, D], `own_head` [V or draft vocabulary, D] and `mask_embedding` [D].

    Of a DFlare drafter, `fc` gives the layers' contexts from the target's features, and holds what
    its checkpoint calls `layer_fusion_weights`.

    Raises:
        ModelError: the config's activation or RoPE is not usable.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.draft_vocabulary: list[int] | None = None
        # Buffers, so that they go where the weights go; in the state dict they would be trained.
        self.own_embedding: Tensor | None
        self.own_head: Tensor | None
        self.mask_embedding: Tensor | None
        for name in ("own_embedding", "own_head", "mask_embedding"):
            self.register_buffer(name, None, persistent=False)
        fusion = config.num_features, config.num_hidden_layers
        self.fc = nn.Linear(
            *(fusion if config.dflare else (config.context_width, config.hidden_size)), bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        sizes = config.hidden_size, config.vocab_size
        self.markov_head: MarkovHead | None = None
        if config.dspark is not None and config.dspark.markov_rank:
            self.markov_head = MarkovHead(*sizes, config.dspark)
        self.prefix_gru: PrefixGRU | None = None
        self.embed_proj: nn.Sequential | None = None
        if config.domino is not None:
            self.prefix_gru = PrefixGRU(config.hidden_size, config.domino.gru_hidden_dim)
            self.embed_proj = domino_projection(*sizes, config.domino)
        self.layer_fusion_weights: nn.Parameter | None = None
        self.hidden_correction: HiddenCorrection | None = None
        if config.dfly is not None:
            self.layer_fusion_weights = nn.Parameter(torch.zeros(*reversed(fusion)))
            if inner_size := config.dfly.hidden_correction_intermediate_size:
                self.hidden_correction = HiddenCorrection(config, inner_size)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.candidate_selector: CandidateSelector | None = None
        if config.dflash2 is not None:
            self.candidate_selector = CandidateSelector(*sizes, config.dflash2)
            for layer in self.draft_layers():
                for convolution in (layer.attention_conv, layer.mlp_conv):
                    assert convolution is not None
                    convolution.reset_parameters()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load a drafter from a folder in the published layout, in evaluation mode.

        Args:
            folder: holds `config.json` and `model.safetensors`.
            dtype: of the weights; None keeps that of the checkpoint.
            device: where the weights go.

        Raises:
            ModelError: the folder is incomplete, holds another kind of drafter, or its tensors
                are not those of its config.
        """
        config = DraftConfig.from_dict(read_config(Path(folder)))
        with torch.device("meta"):
            model = cls(config)
        tensors = read_tensors(Path(folder))
        ends = take_own_ends(tensors, config, Path(folder))
        if config.dflare and _FUSION in tensors:
            tensors[_FUSION_HERE] = tensors.pop(_FUSION)
        check_tensors(tensors, model.state_dict(), Path(folder))
        placed = load_copies(model, tensors, dtype, device)
        model.own_embedding, model.own_head = placed(ends.embedding), placed(ends.head)
        model.mask_embedding = placed(read_mask_embedding(Path(folder), config))
        model.draft_vocabulary = ends.token_ids
        if ends.token_ids is None:
            model.draft_vocabulary = read_draft_vocabulary(Path(folder), config.vocab_size)
        return model.eval()

    def save_pretrained(
        self, folder: str | Path, provenance: Mapping[str, Any] | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors` in the published layout.

        Every file appears whole or not at all. `provenance` (how it was made) goes to
        `provenance.json` beside them.
        """
        config = self.config.to_dict()
        config["dtype"] = str(self.fc.weight.dtype).removeprefix("torch.")
        ends = saved_ends(self.own_embedding, self.own_head, self.draft_vocabulary)
        if "d2t" in ends:
            config["draft_vocab_size"] = len(ends["d2t"])
        tensors: dict[str, Tensor] = self.state_dict() | ends
        if self.config.dflare:
            tensors[_FUSION] = tensors.pop(_FUSION_HERE)
        write_checkpoint(Path(folder), config, tensors, provenance)
        write_mask_embedding(Path(folder), self.mask_embedding, self.config.mask_token_id)
        write_draft_vocabulary(Path(folder), self.draft_vocabulary)

    def new_context(self, capacity: int = 512) -> DraftContext:
        """An empty context for one sequence, fit for this model."""
        config, weight = self.config, self.fc.weight
        shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        return DraftContext(*shape, dtype=weight.dtype, device=weight.device, capacity=capacity)

    def embed(self, token_ids: Tensor, embed_weight: Tensor | GroupWeight) -> Tensor:
        """Token ids [b, q] -> [b, q, D]: rows of the target's embedding matrix [V, D], scaled.

        The raw matrix, because some targets' embedding modules scale by a factor of their own.
        """
        rows = look_up(token_ids, embed_weight)
        if self.mask_embedding is not None:
            is_mask = (token_ids == self.config.mask_token_id)[..., None]
            rows = torch.where(is_mask, self.mask_embedding, rows)
        scale = self.config.input_embedding_scale
        return rows if scale == 1.0 else rows * scale

    def project_context(self, features: Tensor, positions: Tensor) -> list[LayerKV]:
        """Turn target features into each layer's keys and values.

        Args:
            features: [b, c, context_width], the outputs of the target's layers
                `target_layer_ids`, concatenated in that order; of a drafter without features, the
                tokens' embeddings from `embed`.
            positions: [b, c], absolute.

        Returns:
            per layer (k, v), each [b, kv_heads, c, head_dim].
        """
        hidden, rotation = self.context_inputs(features, positions)
        layers = [*self.draft_layers()]
        contexts = hidden if self.config.fuses_by_layer else [hidden] * len(layers)
        return [
            layer.context_keys_values(own, rotation)
            for layer, own in zip(layers, contexts, strict=True)
        ]

    def context_inputs(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """What layers project: fused features, and the rotation of the positions.

        Features are [b, c, D] for all layers, or [layers, b, c, D] if the config `fuses_by_layer`.
        """
        features = with_fresh_strides(features)
        if self.config.dflare:
            hidden = self.hidden_norm(self._fused(features, self.fc.weight))
        elif self.layer_fusion_weights is not None:
            base = self.fc(features)
            hidden = self.hidden_norm(base + self._fused(features, self.layer_fusion_weights))
        else:
            hidden = self.hidden_norm(self.fc(features))
        return hidden, self.rotary(positions, hidden.dtype)

    def _fused(self, features: Tensor, weights: Tensor) -> Tensor:
        """[b, c, context_width], weights [layers, num_features] -> sums [layers, b, c, D]."""
        apart = features.view(*features.shape[:-1], self.config.num_features, -1)
        return torch.einsum("lf,bcfd->lbcd", F.softmax(weights, dim=-1), apart)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: ContextKV,
        masks: Mapping[AttentionKind, ScoreMask],
        block_size: int | None = None,
    ) -> Tensor:
        """Hidden states of the block's slots.

        Args:
            embeddings: [b, q, D], from `embed`.
            positions: [b, q], absolute.
            context: keys and values of the tokens before the block.
            masks: for each kind of layer in the config, True where a slot may attend, [b or 1, 1,
                q, num_context + q], or None for everything. No row may be False throughout. In
                training also tiles, see `models.draft.attention`.
            block_size: slots of each of several blocks that the forward holds of a sequence, one
                behind another; None if there is one of q slots.

        Returns:
            [b, q, D], after the final norm; slot 0 of a block predicts nothing.
        """
        rotation = self.rotary(positions, embeddings.dtype)
        scored = {kind: _score_mask(mask, embeddings.dtype) for kind, mask in masks.items()}
        x, block_size = with_fresh_strides(embeddings), block_size or embeddings.shape[1]
        for index, layer in enumerate(self.draft_layers()):
            mask = scored[self.config.layer_types[index]]
            x = layer(x, rotation, context, index, mask, block_size)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor, lm_head_weight: Tensor) -> Tensor:
        """Hidden states [..., D] through the target's head [V, D] -> logits [..., V]."""
        return self.scaled_logits(F.linear(with_fresh_strides(hidden), lm_head_weight))

    def scaled_logits(self, logits: Tensor) -> Tensor:
        """The head's output [..., n] -> logits [..., n], with the config's multiplier and cap."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def path_head(self, embed_weight: Tensor | GroupWeight | None) -> PathHead | None:
        """What corrects logits by the tokens before them; None where nothing does.

        embed_weight: see `embed`; Domino and DFly read it.
        """
        if self.hidden_correction is not None:
            assert embed_weight is not None
            return CorrectionHead(
                self.hidden_correction, partial(self.embed, embed_weight=embed_weight)
            )
        if self.prefix_gru is None or self.embed_proj is None:
            return self.markov_head
        assert self.config.domino is not None
        assert embed_weight is not None
        num_uncorrected = self.config.domino.pure_draft_prefix_len
        embed = partial(self.embed, embed_weight=embed_weight)
        return DominoHead(self.prefix_gru, self.embed_proj, num_uncorrected, embed)

    def greedy_guesses(
        self,
        hidden: Tensor,
        logits: Tensor,
        anchors: Tensor,
        vocabulary_ids: Tensor | None = None,
        embed_weight: Tensor | GroupWeight | None = None,
        lm_head: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """What the drafter guesses at temperature 0: token ids [b, s].

        Args:
            hidden: [b, s, D] of the slots that draft.
            logits: [b, s, n] of these.
            anchors: [b] token ids.
            vocabulary_ids: [n], of the tokens that have logits; None if all have.
            embed_weight: see `path_head`.
            lm_head: gave the logits: [.., D] -> [.., n]; DFly asks it again.
        """
        head = self.path_head(embed_weight)
        if head is not None:
            weigh = lm_head
            if (weights := head.successors) is not None:
                weights = weights if vocabulary_ids is None else weights[vocabulary_ids]
                weigh = partial(F.linear, weight=weights)
            assert weigh is not None
            behind = PathLogits(head, weigh, hidden, logits)
            return behind.greedy_path(anchors, vocabulary_ids)
        if self.candidate_selector is None:
            found = logits.argmax(dim=-1)
            return found if vocabulary_ids is None else vocabulary_ids[found]
        lattice = lattice_of(self.candidate_selector, hidden, logits, anchors, vocabulary_ids)
        return lattice.greedy_path()

    def block_masks(
        self, num_context: int, block_size: int, device: torch.device | str = "cpu"
    ) -> dict[AttentionKind, Tensor | None]:
        """Masks for one block right after a context that holds every earlier token.

        Returns:
            for each kind of layer in the config, [1, 1, block_size, num_context + block_size],
            True where a slot may attend, or None where all slots see everything.
        """
        num_keys, window = num_context + block_size, self.config.sliding_window
        kinds = set(self.config.layer_types)
        narrow = window is not None and window < num_keys and "sliding_attention" in kinds
        if not narrow and not any(self.config.is_causal(kind) for kind in kinds):
            return dict.fromkeys(kinds)
        anchors = torch.tensor([[num_context]], device=device)
        return block_masks(self.config, anchors, block_size, num_context)

    def draft_layers(self) -> Iterator[DraftLayer]:
        """The layers with their type."""
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            yield layer


def _score_mask(mask: ScoreMask, dtype: torch.dtype) -> ScoreMask:
    """A mask of truth values as numbers, made once a forward instead of once a layer."""
    if not isinstance(mask, Tensor):
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )
