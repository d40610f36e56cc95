"""Layers with a gated delta rule, all tokens of a forward in one call of a kernel.

The kernel steps token by token, and a token has the same bits alone, in a prompt, in a block of
drafts and when it steps again. A mixer of a known kind is tried when a target is made, against the
model's own step; where that gives something else, or the backend has no kernel, it steps in torch
(`models.recurrent`). The choice holds as long as the target, so all its tokens step in one form.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.cache.states import Again, PackedStates, StateCache, StateLayer
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import (
    DeltaInputs,
    DeltaRule,
    DeltaSpan,
    DeltaState,
    DeltaStep,
    Norm,
)
from blockdraft.models.packed import is_plain

NUM_PROBE_TOKENS = 5
_SILU = ("silu", "swish")
MAX_ERROR = 64
"""Units in the last place of the largest value in a mixer's output, by which that of a kernel may
differ after a few tokens. A wrong formula differs by a thousand."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MixerKind:
    """How to read a kind of mixer: its rule, its products [rows, ..], and its last layer's name."""

    rule: Callable[[Any], DeltaRule]
    inputs: Callable[[Any, Tensor], DeltaInputs]
    output: str


def _rule(
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
        convolution=mixer.conv1d.weight.detach()[:, 0],
        convolution_bias=mixer.conv1d.bias,
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
    return _rule(
        mixer,
        getattr(mixer, norm),
        mixer,
        num_heads=(mixer.num_k_heads, mixer.num_v_heads),
        head_dims=(mixer.head_k_dim, mixer.head_v_dim),
        write_scale=write_scale,
    )


def _qwen3_next_inputs(mixer: Any, hidden: Tensor) -> DeltaInputs:
    qkvz, ba = mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
    query, key, value, gate, write, decay = mixer.fix_query_key_value_ordering(qkvz, ba)
    qkv = torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1)
    return DeltaInputs(qkv[0], decay[0], write[0], gate.flatten(2)[0])


def _qwen3_5_inputs(mixer: Any, hidden: Tensor) -> DeltaInputs:
    layers = mixer.in_proj_qkv, mixer.in_proj_a, mixer.in_proj_b, mixer.in_proj_z
    return DeltaInputs(*(layer(hidden)[0] for layer in layers))


def _side_by_side(hidden: Tensor, *layers: nn.Module) -> Tensor:
    return torch.cat([layer(hidden)[0] for layer in layers], dim=-1)


def _olmo_hybrid_inputs(mixer: Any, hidden: Tensor) -> DeltaInputs:
    qkv = _side_by_side(hidden, mixer.q_proj, mixer.k_proj, mixer.v_proj)
    layers = mixer.a_proj, mixer.b_proj, mixer.g_proj
    return DeltaInputs(qkv, *(layer(hidden)[0] for layer in layers))


def _olmo_hybrid_rule(mixer: Any) -> DeltaRule:
    return _qwen_rule(mixer, "o_norm", 2.0 if mixer.allow_neg_eigval else 1.0)


def _kimi_linear_rule(mixer: Any) -> DeltaRule:
    return _rule(
        mixer,
        mixer.o_norm,
        mixer.forget_gate,
        num_heads=(mixer.num_heads, mixer.num_heads),
        head_dims=(mixer.head_dim, mixer.head_dim),
        gates_in_float=True,
    )


def _kimi_linear_inputs(mixer: Any, hidden: Tensor) -> DeltaInputs:
    qkv = _side_by_side(hidden, mixer.q_proj, mixer.k_proj, mixer.v_proj)
    decay = mixer.forget_gate.f_b_proj(mixer.forget_gate.f_a_proj(hidden))[0]
    gate = mixer.g_b_proj(mixer.g_a_proj(hidden))[0]
    return DeltaInputs(qkv, decay, mixer.b_proj(hidden)[0], gate)


_QWEN3_5 = MixerKind(_qwen_rule, _qwen3_5_inputs, "out_proj")
DELTA_KINDS = {
    f"transformers.models.{module}.modeling_{module}.{name}": kind
    for module, name, kind in (
        (
            "qwen3_next",
            "Qwen3NextGatedDeltaNet",
            MixerKind(_qwen_rule, _qwen3_next_inputs, "out_proj"),
        ),
        ("qwen3_5", "Qwen3_5GatedDeltaNet", _QWEN3_5),
        ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", _QWEN3_5),
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
    )
}
"""The kinds that were read for this. A list, because equal numbers on a probe do not show what
another kind does to others."""


class DeltaMixer:
    """Calls like a mixer of a known kind, and steps through all rows of a forward in one call."""

    def __init__(self, mixer: Any, kind: MixerKind, step: DeltaStep) -> None:
        self.mixer, self._kind, self.step = mixer, kind, step
        self._own = mixer.forward

    @property
    def described(self) -> str:
        """What mixers of a model that compute alike have in common."""
        weight: Tensor = self.mixer.conv1d.weight
        return f"{type(self.mixer).__name__} of {weight.shape[0]} channels in {weight.dtype}"

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states: [1, rows, D], rows that only fill up behind the others."""
        given = (*args, *kwargs.values())
        cache = next((v for v in given if isinstance(v, StateCache | PackedStates)), None)
        if cache is None:  # a whole text that nobody goes on with
            whole: Tensor = self._own(hidden_states, *args, **kwargs)
            return whole
        inputs = self._kind.inputs(self.mixer, hidden_states)
        steps = _Steps(self.step, inputs)
        for sequence, num_rows in cache.spans:
            steps.add(sequence.layers[self.mixer.layer_idx], num_rows)
        output: Tensor = getattr(self.mixer, self._kind.output)(steps.run()[None])
        return output


class _Steps:
    """The rows of a forward, cut where a state is wanted. Layers move on when all have stepped."""

    def __init__(self, step: DeltaStep, inputs: DeltaInputs) -> None:
        self._step, self._inputs = step, inputs
        self._spans: list[DeltaSpan] = []
        self._reached: list[tuple[StateLayer, int]] = []
        self._num_rows = 0

    def add(self, layer: StateLayer, num_rows: int) -> None:
        """The next rows are of a layer's sequence. It may come again."""
        start, before = layer.num_steps, layer.value()
        for (earlier, length), span in zip(self._reached, self._spans, strict=True):
            if earlier is layer:
                start, before = length, span.after
        for stop in layer.stops(start, num_rows):
            self._spans.append(DeltaSpan(stop - start, before, self._step.new_state()))
            self._reached.append((layer, stop))
            start, before = stop, self._spans[-1].after

    def run(self) -> Tensor:
        """What the rows read."""
        read = self._step(self._inputs, self._spans)
        assert read is not None
        first = 0
        for (layer, length), span in zip(self._reached, self._spans, strict=True):
            end = first + span.num_rows
            # Of these few rows alone: those of a whole prompt would stay in memory with them.
            again = (
                _again(self._step, self._inputs.copied(first, end))
                if layer.may_take_back(layer.num_steps)
                else None
            )
            layer.stepped(self._step, length, span.after, again)
            first = end
        return read


def _again(step: DeltaStep, inputs: DeltaInputs) -> Again:
    def again(state: DeltaState, num_rows: int) -> DeltaState:
        after = step.new_state()
        step(inputs, [DeltaSpan(num_rows, state, after)], reads=False)
        return after

    return again


def delta_mixer(mixer: Any) -> DeltaMixer | None:
    """A mixer's form by a kernel; None if its kind is not known, or the backend has none."""
    kind = DELTA_KINDS.get(f"{type(mixer).__module__}.{type(mixer).__qualname__}")
    if kind is None or not is_plain(mixer):
        return None
    if mixer.activation not in _SILU:
        return None
    weight: Tensor = mixer.conv1d.weight
    try:
        step = backend_for(weight.dtype, weight.device).delta_step(kind.rule(mixer))
    # What a mixer raises that another version of transformers builds differently.
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("no kernel for %s: %s", type(mixer).__name__, error)
        return None
    return None if step is None else DeltaMixer(mixer, kind, step)


def probe_input(mixer: Any) -> Tensor:
    """Rows [1, rows, D] to try a mixer with: any numbers will do."""
    weight: Tensor = mixer.conv1d.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, NUM_PROBE_TOKENS, mixer.hidden_size, generator=generator)
    return hidden.to(weight.device, weight.dtype)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether numbers differ by their last bits at most."""
    error = (found.float() - expected.float()).abs().max()
    return bool(error <= MAX_ERROR * torch.finfo(expected.dtype).eps * expected.abs().max())
