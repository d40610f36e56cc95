"""What the layers of DFlash and EAGLE-3 drafters are made of.

Shapes: b sequences, t tokens, D hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blockdraft.core.errors import ModelError, reason_of
from blockdraft.kernels.interface import LayerParts, Rotation
from blockdraft.kernels.weights import Norm
from blockdraft.models.draft.attention import ScoreMask, attend
from blockdraft.models.draft.context import ContextKV, LayerKV
from blockdraft.models.draft.eagle3_config import AnyDraftConfig
from blockdraft.models.layers.packed import side_by_side

INIT_STD = 0.02
"""Standard deviation of freshly initialized projections, as in every published recipe."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32.

    In bfloat16 it rounds once, after the weight; the published module also rounds before it.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    @property
    def parts(self) -> Norm:
        """What a backend takes for it, from its weight of this moment."""
        return Norm(self.weight.detach().contiguous(), self.eps, rounds_first=False)


class Rotary:
    """Rotary position embedding of whole heads, halves paired as in Llama and Qwen.

    Not a module: its frequencies must stay float32 when the model is cast.

    Raises:
        ModelError: transformers rejects the RoPE parameters.
    """

    def __init__(self, config: AnyDraftConfig) -> None:
        # Real values even while the model around it is built on the meta device.
        with torch.device("cpu"):
            self._frequencies, self._scale = _rope_frequencies(config)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Absolute positions [b, t] -> cos and signed sin [b, t, 1, head_dim] in `dtype`."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        # The sign of the rotated first half sits in the sine, which saves a negation per use.
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rope_frequencies(config: AnyDraftConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32, and the factor on cos and sin."""
    if config.rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope["rope_theta"] ** exponents), 1.0
    try:
        # transformers completes and checks the parameters of each kind against a model's config.
        model_config = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope),
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](model_config)
    # transformers raises any type for broken parameters.
    except Exception as error:
        raise ModelError(
            f"the drafter's RoPE parameters {dict(config.rope)} are not usable: "
            f"{reason_of(error)}; correct rope_scaling in its config.json"
        ) from error
    return frequencies.float(), float(scale)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads [b, t, heads, head_dim] by their positions."""
    cos, signed_sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * signed_sin


class DraftAttention(nn.Module):
    """Grouped-query attention of new tokens over a context and themselves.

    input_size: width of its input; its output is as wide as the drafter's hidden states.
    has_context_projections: keys and values of the context have projections of their own (DFlare).
    """

    def __init__(
        self,
        config: AnyDraftConfig,
        input_size: int,
        *,
        has_bias: bool = False,
        has_head_norms: bool = True,
        has_context_projections: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (
            num_heads * config.head_dim
            for num_heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(input_size, queries, bias=has_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=has_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=has_bias)
        self.k_proj_target: nn.Linear | None = None
        self.v_proj_target: nn.Linear | None = None
        if has_context_projections:
            self.k_proj_target = nn.Linear(input_size, keys, bias=has_bias)
            self.v_proj_target = nn.Linear(input_size, keys, bias=has_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=has_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if has_head_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    @property
    def head_norms(self) -> tuple[Norm, Norm] | None:
        """What a backend takes for the norms of queries and keys; None without them."""
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            return self.q_norm.parts, self.k_norm.parts
        return None

    @property
    def context_projections(self) -> tuple[nn.Linear, nn.Linear]:
        """To keys and to values of the context; mostly those of the new tokens."""
        if self.k_proj_target is not None and self.v_proj_target is not None:
            return self.k_proj_target, self.v_proj_target
        return self.k_proj, self.v_proj

    def keys_values(self, x: Tensor, rotation: Rotation) -> LayerKV:
        """[b, t, input_size] of t tokens -> keys and values, each [b, kv_heads, t, head_dim]."""
        return self._projected(x, rotation, self.k_proj, self.v_proj)

    def context_keys_values(self, x: Tensor, rotation: Rotation) -> LayerKV:
        """The same of tokens of the context."""
        return self._projected(x, rotation, *self.context_projections)

    def _projected(
        self, x: Tensor, rotation: Rotation, k_proj: nn.Linear, v_proj: nn.Linear
    ) -> LayerKV:
        heads = (*x.shape[:2], -1, self.head_dim)
        k = rotate(self.k_norm(k_proj(x).view(heads)), rotation)
        return k.transpose(1, 2), v_proj(x).view(heads).transpose(1, 2)

    def forward(
        self, x: Tensor, rotation: Rotation, context: ContextKV, layer: int, mask: ScoreMask
    ) -> Tensor:
        """Normed [b, t, input_size] -> [b, t, D]; the mask is over all keys of `context.extend`."""
        q = rotate(self.q_norm(self.q_proj(x).view(*x.shape[:2], -1, self.head_dim)), rotation)
        k, v = context.extend(layer, *self.keys_values(x, rotation))
        out = attend(q.transpose(1, 2), k, v, mask)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class DraftMLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: AnyDraftConfig) -> None:
        super().__init__()
        if config.hidden_act not in ACT2FN:
            raise ModelError(
                f"hidden_act {config.hidden_act!r} is unknown; give one that transformers knows, "
                f"for example 'silu'"
            )
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, D] -> [b, t, D]."""
        result: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return result


def layer_parts(
    attention: DraftAttention, mlp: DraftMLP, norm: RMSNorm, mlp_norm: RMSNorm, *, in_int8: bool
) -> LayerParts:
    """What a backend takes for a layer, from its weights of this moment, or the closest in int8."""
    q_proj, k_proj, v_proj = attention.q_proj, attention.k_proj, attention.v_proj
    num_queries, num_keys = (
        projection.out_features // attention.head_dim for projection in (q_proj, k_proj)
    )
    return LayerParts(
        qkv=side_by_side(q_proj, k_proj, v_proj, in_int8=in_int8),
        o=side_by_side(attention.o_proj, in_int8=in_int8),
        gate_up=side_by_side(mlp.gate_proj, mlp.up_proj, in_int8=in_int8),
        down=side_by_side(mlp.down_proj, in_int8=in_int8),
        norm=norm.parts,
        mlp_norm=mlp_norm.parts,
        head_norms=attention.head_norms,
        num_heads=(num_queries, num_keys, num_keys),
        head_dim=attention.head_dim,
        activation=mlp.activation,
    )
