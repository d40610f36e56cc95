"""Recurrent mixers by a kernel, all tokens of a forward in one call.

The kernel steps token by token, and a token has the same bits alone, in a prompt, in a block of
drafts and when it steps again. A mixer of a known kind (`mixer_kinds`) is tried when a
target is made, against the model's own step; where that gives something else, or the backend has no
kernel, it steps in torch (`recurrent`). The choice holds as long as the target, so all its
tokens step in one form.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from blockdraft.cache.state_layer import Again, StateLayer
from blockdraft.cache.states import PackedStates, StateCache
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.recurrence_interface import (
    RecurrentInputs,
    RecurrentSpan,
    RecurrentState,
    RecurrentStep,
)
from blockdraft.models.layers.common_kinds import kind_of
from blockdraft.models.layers.mixer_kinds import MIXER_KINDS, MixerKind
from blockdraft.models.layers.packed import is_plain

NUM_CHECK_TOKENS = 5

logger = logging.getLogger(__name__)


class KernelMixer:
    """Calls like a mixer of a known kind, and steps through all rows of a forward in one call."""

    def __init__(self, mixer: Any, kind: MixerKind, weight: Tensor, step: RecurrentStep) -> None:
        """weight: of the convolution."""
        self.mixer, self._kind, self._weight, self.step = mixer, kind, weight, step
        self._own = mixer.forward

    @property
    def described(self) -> str:
        """What mixers of a model that compute alike have in common."""
        num_channels, dtype = self._weight.shape[0], self._weight.dtype
        return f"{type(self.mixer).__name__} of {num_channels} channels in {dtype}"

    @property
    def _last_layer(self) -> Any:
        return getattr(self.mixer, self._kind.output)

    def check_input(self) -> Tensor:
        """Rows [1, rows, D] to try the mixer with: any numbers will do."""
        width = self._last_layer.out_features
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, NUM_CHECK_TOKENS, width, generator=generator)
        return hidden.to(self._weight.device, self._weight.dtype)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states: [1, rows, D], rows that only fill up behind the others."""
        cache = cache_among(*args, *kwargs.values())
        if cache is None:
            whole: Tensor = self._own(hidden_states, *args, **kwargs)
            return whole
        inputs = self._kind.inputs(self.mixer, hidden_states)
        steps = _Steps(self.step, inputs)
        for sequence, num_rows in cache.spans:
            steps.add(sequence.layers[self.mixer.layer_idx], num_rows)
        output: Tensor = self._last_layer(steps.run()[None])
        return output


class _Steps:
    """The rows of a forward, cut where a state is wanted. Layers move on when all have stepped."""

    def __init__(self, step: RecurrentStep, inputs: RecurrentInputs) -> None:
        self._step, self._inputs = step, inputs
        self._spans: list[RecurrentSpan] = []
        self._reached: list[tuple[StateLayer, int]] = []

    def add(self, layer: StateLayer, num_rows: int) -> None:
        """The next rows are of a layer's sequence. It may come again."""
        start, before = layer.num_steps, layer.value()
        for (earlier, length), span in zip(self._reached, self._spans, strict=True):
            if earlier is layer:
                start, before = length, span.after
        for stop in layer.stops(start, num_rows):
            self._spans.append(RecurrentSpan(stop - start, before, self._step.new_state()))
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


def _again(step: RecurrentStep, inputs: RecurrentInputs) -> Again:
    def again(state: RecurrentState, num_rows: int) -> RecurrentState:
        after = step.new_state()
        step(inputs, [RecurrentSpan(num_rows, state, after)], reads=False)
        return after

    return again


def cache_among(*arguments: Any) -> StateCache | PackedStates | None:
    """The cache among the arguments of a mixer's call; None for a text that nobody goes on with."""
    return next((one for one in arguments if isinstance(one, StateCache | PackedStates)), None)


def kernel_mixer(mixer: Any) -> KernelMixer | None:
    """A mixer's form by a kernel; None if its kind is not known, or the backend has none."""
    kind = MIXER_KINDS.get(kind_of(mixer))
    if kind is None or not is_plain(mixer):
        return None
    try:
        rule = kind.rule(mixer)
        weight = rule.convolution.weight
        step = backend_for(weight.dtype, weight.device).recurrent_step(rule)
    # What a mixer raises that another version of transformers builds differently.
    except (AttributeError, RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        logger.info("no kernel for %s: %s", type(mixer).__name__, error)
        return None
    return None if step is None else KernelMixer(mixer, kind, weight, step)
