"""How known kinds of recurrent mixers are read: what they compute, and what their products give it.

Each was read for this. A list, because equal numbers in a check do not show what another kind does
to other numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.kernels.recurrence_interface import (
    Convolution,
    DeltaRule,
    Recurrence,
    RecurrentInputs,
    SelectiveScan,
    ShortConvolution,
)
from blockdraft.kernels.weights import Norm

_SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class MixerKind:
    """A kind of mixer: its recurrence, what it gives it of [1, rows, D], and its last layer's name.

    Both raise AttributeError, RuntimeError or TypeError for a mixer that is built differently.
    """

    rule: Callable[[Any], Recurrence]
    inputs: Callable[[Any, Tensor], RecurrentInputs]
    output: str = "out_proj"


def _convolution(layer: nn.Conv1d) -> Convolution:
    return Convolution(layer.weight.detach()[:, 0], layer.bias)


def _silu_convolution(mixer: Any) -> Convolution:
    """Raises TypeError where another activation follows it."""
    if mixer.activation not in _SILU:
        raise TypeError(f"its convolution has the activation {mixer.activation}")
    return _convolution(mixer.conv1d)


def _delta_rule(
    mixer: Any,
    norm: Any,
    decay: Any,
    *,
    num_heads: tuple[int, int],
    head_dims: tuple[int, int],
    write_scale: float = 1.0,
    gates_in_float: bool = False,
) -> DeltaRule:
    """decay: the module that has `A_log` and `dt_bias`."""
    rates = decay.A_log.detach().float().flatten().exp()
    return DeltaRule(
        convolution=_silu_convolution(mixer),
        num_heads=num_heads,
        key_dim=head_dims[0],
        value_dim=head_dims[1],
        decay_rates=rates,
        decay_biases=decay.dt_bias.detach().view(rates.shape[0], -1).squeeze(1),
        write_scale=write_scale,
        norm=Norm(norm.weight.detach(), norm.variance_epsilon, rounds_first=not gates_in_float),
        gate_is_sigmoid=norm.activation == "sigmoid",
    )


def _qwen_rule(mixer: Any, norm: str = "norm", write_scale: float = 1.0) -> DeltaRule:
    return _delta_rule(
        mixer,
        getattr(mixer, norm),
        mixer,
        num_heads=(mixer.num_k_heads, mixer.num_v_heads),
        head_dims=(mixer.head_k_dim, mixer.head_v_dim),
        write_scale=write_scale,
    )


def _qwen3_next_inputs(mixer: Any, hidden: Tensor) -> RecurrentInputs:
    qkvz, ba = mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
    query, key, value, gate, write, decay = mixer.fix_query_key_value_ordering(qkvz, ba)
    qkv = torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1)
    return RecurrentInputs(qkv[0], gate.flatten(2)[0], decay[0], write[0])


def _qwen3_5_inputs(mixer: Any, hidden: Tensor) -> RecurrentInputs:
    layers = mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_a, mixer.in_proj_b
    return RecurrentInputs(*(layer(hidden)[0] for layer in layers))


def _side_by_side(hidden: Tensor, *layers: nn.Module) -> Tensor:
    return torch.cat([layer(hidden)[0] for layer in layers], dim=-1)


def _olmo_hybrid_inputs(mixer: Any, hidden: Tensor) -> RecurrentInputs:
    qkv = _side_by_side(hidden, mixer.q_proj, mixer.k_proj, mixer.v_proj)
    layers = mixer.g_proj, mixer.a_proj, mixer.b_proj
    return RecurrentInputs(qkv, *(layer(hidden)[0] for layer in layers))


def _olmo_hybrid_rule(mixer: Any) -> DeltaRule:
    return _qwen_rule(mixer, "o_norm", 2.0 if mixer.allow_neg_eigval else 1.0)


def _kimi_linear_rule(mixer: Any) -> DeltaRule:
    return _delta_rule(
        mixer,
        mixer.o_norm,
        mixer.forget_gate,
        num_heads=(mixer.num_heads, mixer.num_heads),
        head_dims=(mixer.head_dim, mixer.head_dim),
        gates_in_float=True,
    )


def _kimi_linear_inputs(mixer: Any, hidden: Tensor) -> RecurrentInputs:
    qkv = _side_by_side(hidden, mixer.q_proj, mixer.k_proj, mixer.v_proj)
    decay = mixer.forget_gate.f_b_proj(mixer.forget_gate.f_a_proj(hidden))[0]
    gate = mixer.g_b_proj(mixer.g_a_proj(hidden))[0]
    return RecurrentInputs(qkv, gate, decay, mixer.b_proj(hidden)[0])


def _scan(
    mixer: Any, norm: Norm | None, *, norm_groups: int = 1, gates_first: bool = True
) -> SelectiveScan:
    return SelectiveScan(
        convolution=_silu_convolution(mixer),
        num_heads=(mixer.n_groups, mixer.num_heads),
        state_size=mixer.ssm_state_size,
        head_dim=mixer.head_dim,
        decay_rates=mixer.A_log.detach().float().exp(),
        step_biases=mixer.dt_bias.detach(),
        skips=mixer.D.detach(),
        start_limits=mixer.time_step_limit,
        norm=norm,
        norm_groups=norm_groups,
        gates_first=gates_first,
    )


def _mamba2_rule(mixer: Any) -> SelectiveScan:
    own = mixer.norm
    norm = Norm(own.weight.detach(), own.variance_epsilon, rounds_first=True)
    return _scan(mixer, norm, norm_groups=mixer.intermediate_size // own.group_size)


def _falcon_h1_rule(mixer: Any) -> SelectiveScan:
    if not mixer.mamba_rms_norm:
        return _scan(mixer, None)
    own = mixer.norm
    norm = Norm(own.weight.detach(), own.variance_epsilon, rounds_first=False)
    return _scan(mixer, norm, norm_groups=own.n_groups, gates_first=not own.norm_before_gate)


def _split(mixer: Any, projected: Tensor) -> RecurrentInputs:
    """projected: gates, channels of the convolution, and steps, [1, rows, ..]."""
    sizes = mixer.intermediate_size, mixer.conv_dim, mixer.num_heads
    gate, channels, steps = projected[0].split_with_sizes(sizes, dim=-1)
    return RecurrentInputs(channels, gate, steps)


def _mamba2_inputs(mixer: Any, hidden: Tensor) -> RecurrentInputs:
    return _split(mixer, mixer.in_proj(hidden))


def _falcon_h1_inputs(mixer: Any, hidden: Tensor) -> RecurrentInputs:
    return _split(mixer, mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector)


def _short_convolution_rule(mixer: Any) -> ShortConvolution:
    return ShortConvolution(_convolution(mixer.conv))


def _short_convolution_inputs(mixer: Any, hidden: Tensor) -> RecurrentInputs:
    opened, gate, x = mixer.in_proj(hidden)[0].chunk(3, dim=-1)
    return RecurrentInputs(opened * x, gate)


_QWEN3_5 = MixerKind(_qwen_rule, _qwen3_5_inputs)
_MAMBA2 = MixerKind(_mamba2_rule, _mamba2_inputs)
_SHORT_CONVOLUTION = MixerKind(_short_convolution_rule, _short_convolution_inputs)
MIXER_KINDS = {
    f"transformers.models.{module}.modeling_{module}.{name}": kind
    for module, name, kind in (
        ("qwen3_next", "Qwen3NextGatedDeltaNet", MixerKind(_qwen_rule, _qwen3_next_inputs)),
        ("qwen3_5", "Qwen3_5GatedDeltaNet", _QWEN3_5),
        ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", _QWEN3_5),
        ("lara_mini", "LaraMiniGatedDeltaNet", _QWEN3_5),
        (
            "olmo_hybrid",
            "OlmoHybridGatedDeltaNet",
            MixerKind(_olmo_hybrid_rule, _olmo_hybrid_inputs, "o_proj"),
        ),
        (
            "kimi_linear",
            "KimiLinearDeltaAttention",
            MixerKind(_kimi_linear_rule, _kimi_linear_inputs, "o_proj"),
        ),
        ("mamba2", "Mamba2Mixer", _MAMBA2),
        ("bamba", "BambaMixer", _MAMBA2),
        ("granitemoehybrid", "GraniteMoeHybridMambaLayer", _MAMBA2),
        ("nemotron_h", "NemotronHMamba2Mixer", _MAMBA2),
        ("zamba2", "Zamba2MambaMixer", _MAMBA2),
        ("falcon_h1", "FalconH1Mixer", MixerKind(_falcon_h1_rule, _falcon_h1_inputs)),
        ("lfm2", "Lfm2ShortConv", _SHORT_CONVOLUTION),
        ("lfm2_moe", "Lfm2MoeShortConv", _SHORT_CONVOLUTION),
        ("lfm3", "Lfm3ShortConv", _SHORT_CONVOLUTION),
    )
}
"""By the class of the mixer."""
