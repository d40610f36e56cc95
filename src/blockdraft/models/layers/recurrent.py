"""Recurrent and convolution layers run token by token, whatever the number of rows.

A scan over many tokens has other bits than single steps. So every token, of prompts too, goes
through one form of a single step: a kernel's where there is one (`kernel_mixers`), else
transformers' own. The linear layers at both ends of such a mixer, which most of its weights are in,
see all rows at once: their rows are independent.
"""

import inspect
import logging
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionLayer,
)

from blockdraft.cache.kv import KVCache
from blockdraft.cache.state_layer import StateLayer
from blockdraft.cache.states import LayerKind, StateCache
from blockdraft.core.errors import ModelError
from blockdraft.core.remembered import once
from blockdraft.models.layers.kernel_mixers import KernelMixer, cache_among, kernel_mixer
from blockdraft.models.layers.packed import replace_forward
from blockdraft.models.layers.tensors import is_close
from blockdraft.models.supported import CACHES, GENERATE, decoder_layers

_KEYS_ONLY = ("full_attention", "sliding_attention", "chunked_attention")
_NO_MEMORY = ("moe", "mlp")
MAX_ERROR = 64
"""Units in the last place of the largest value in a mixer's output, by which that of a kernel may
differ after a few tokens. A wrong formula differs by a thousand."""
MAX_SHORT_ERROR = 4
"""The same in types of fewer digits than float32."""
MAX_STATE_ERROR = 1
"""The same of a state, in units of the type that the mixer computes in: states are in float32, but
torch's first step rounds what goes into them in other places than its next ones and a kernel.
"""

logger = logging.getLogger(__name__)


def layer_kinds(model: PreTrainedModel) -> list[LayerKind]:
    """What each layer of the cache remembers, by the one that transformers would give it.

    Raises:
        ModelError: a layer needs a cache of a kind that is not known here.
    """
    config = model.config.get_text_config()
    names = getattr(config, "layer_types", None)
    num_layers = len(decoder_layers(model))
    if names is None:
        # More than the layers where each attends twice (LongCat-Flash).
        return ["kv"] * max(num_layers, config.num_hidden_layers)
    return [_kind(model, name) for name in names[:num_layers]]


def _kind(model: PreTrainedModel, name: str) -> LayerKind:
    if name in _KEYS_ONLY or name in _NO_MEMORY:
        return "kv"
    cache = DYNAMIC_LAYER_TYPE_MAPPING.get(name, object)
    if not issubclass(cache, LinearAttentionLayer):
        raise ModelError(
            f"{type(model).__name__} is not supported: the state of its {name} layers cannot be "
            "rolled back yet; use a model with attention, recurrent or convolution layers, or "
            f"{GENERATE}"
        )
    return "both" if issubclass(cache, CacheLayerMixin) else "state"


def layers_without_keys(model: PreTrainedModel) -> set[int]:
    """Layers that have no attention: a state alone, or no memory at all.

    Raises:
        ModelError: see `layer_kinds`.
    """
    names = getattr(model.config.get_text_config(), "layer_types", None) or ()
    kinds = enumerate(zip(layer_kinds(model), names, strict=False))
    return {index for index, (kind, name) in kinds if kind == "state" or name in _NO_MEMORY}


def is_recurrent(model: PreTrainedModel) -> bool:
    """True if some layer has a state.

    Raises:
        ModelError: see `layer_kinds`.
    """
    return any(kind != "kv" for kind in layer_kinds(model))


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """The part of each layer with a state that changes it.

    Raises:
        ModelError: a layer has no such part, or one that is not known here.
    """
    kinds = layer_kinds(model)
    found = []
    for index, layer in enumerate(decoder_layers(model)):
        if kinds[index] != "kv":
            parts = [module for module in layer.modules() if _is_mixer(module)]
            if len(parts) != 1:
                raise ModelError(
                    f"{type(model).__name__} is not supported: how layer {index} updates its state "
                    "is unknown; use a model whose recurrent layers have a convolution, or "
                    f"{GENERATE}"
                )
            found += parts
    return found


def _is_mixer(module: nn.Module) -> bool:
    """It has a convolution and takes a cache, but no positions, as attention does."""
    if not hasattr(module, "layer_idx"):
        return False
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return False
    taken = inspect.signature(module.forward).parameters
    return any(name in taken for name in CACHES) and "position_embeddings" not in taken


def cache_argument(model: nn.Module) -> str:
    """How the forward of a model or mixer calls the cache.

    Raises:
        ModelError: it takes none.
    """
    taken = inspect.signature(model.forward).parameters
    for name in CACHES:
        if name in taken:
            return name
    raise ModelError(
        f"{type(model).__name__} is not supported: its forward takes no cache; use a model whose "
        f"forward takes {' or '.join(CACHES)}"
    )


def new_cache(model: PreTrainedModel) -> KVCache:
    """An empty cache for one sequence."""
    kinds = layer_kinds(model)
    if all(kind == "kv" for kind in kinds):
        return KVCache(len(kinds))
    return StateCache(kinds, getattr(model.config.get_text_config(), "number_of_conv_states", 1))


def run_step_by_step(model: PreTrainedModel) -> ExitStack:
    """Let the recurrent parts of a model take one token at a time.

    Returns:
        what gives the model back as it was when closed.

    Raises:
        ModelError: see `mixers`.
    """
    undo = ExitStack()
    is_right: dict[str, bool] = {}
    for mixer in mixers(model):
        by_kernel = kernel_mixer(mixer)
        if by_kernel is not None and _is_right(model, by_kernel, is_right):
            replace_forward(mixer, by_kernel, undo)
        else:
            replace_forward(mixer, StepByStep(mixer, undo), undo)
    return undo


def _is_right(model: PreTrainedModel, by_kernel: KernelMixer, known: dict[str, bool]) -> bool:
    """Whether a kernel computes what the mixers of its kind do; tried once for each kind."""
    kind = by_kernel.described
    if kind not in known:
        known[kind] = once(f"steps of {kind}", lambda: _gives_the_same(model, by_kernel))
        if not known[kind]:
            logger.warning("%s gives different numbers by kernels: it keeps torch's steps", kind)
    return known[kind]


@torch.inference_mode()
def _gives_the_same(model: PreTrainedModel, by_kernel: KernelMixer) -> bool:
    """Whether a kernel gives what the mixer's own steps give, but for the last bits."""
    mixer, hidden = by_kernel.mixer, by_kernel.check_input()
    found: list[tuple[Tensor, StateLayer]] = []
    with ExitStack() as undo:
        for form in (StepByStep(mixer, undo), by_kernel):
            cache = new_cache(model)
            cache.expect(hidden.shape[1])
            output = form(hidden, **{cache_argument(mixer): cache})
            found.append((output, cache.layers[mixer.layer_idx]))
    (expected, torch_layer), (output, layer) = found
    state = layer.value()
    assert state is not None
    matrices, dtype = by_kernel.step.matrices(state), expected.dtype
    is_same = is_close(output, expected, MAX_ERROR if dtype == torch.float32 else MAX_SHORT_ERROR)
    if matrices is None or not is_same:
        return is_same
    torch_matrices = torch_layer.recurrent_states[0][0]
    return is_close(matrices, torch_matrices, MAX_ERROR) or is_close(
        matrices, torch_matrices, MAX_STATE_ERROR, dtype
    )


def copies_states(model: PreTrainedModel) -> bool:
    """True if each candidate of a step takes a copy of some state, false if candidates step again.

    Of a model that `run_step_by_step` prepared.
    """
    return any(isinstance(vars(part).get("forward"), StepByStep) for part in model.modules())


class StepByStep:
    """Calls like a mixer of transformers, and runs it row by row.

    Its linear layers that read the mixer's input, and the one whose output it returns, run on all
    rows at once, those of other sequences included.
    """

    def __init__(self, mixer: nn.Module, undo: ExitStack) -> None:
        self._mixer: Any = mixer
        self._own = mixer.forward
        self._linears: list[_Linear] = []
        for child in mixer.children():
            if isinstance(child, nn.Linear):
                self._linears.append(_Linear(child))
                replace_forward(child, self._linears[-1], undo)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states: [1, rows, D], rows that only fill up behind the others."""
        cache = cache_among(*args, *kwargs.values())
        if cache is None:
            whole: Tensor = self._own(hidden_states, *args, **kwargs)
            return whole
        sequences = [own for own, num_rows in cache.spans for _ in range(num_rows)]
        num_fill = hidden_states.shape[1] - len(sequences)
        outputs: list[Tensor] = []
        try:
            for row, sequence in enumerate(sequences):
                # A copy: kernels look at where in memory a row begins.
                own = hidden_states[:, row : row + 1].clone()
                for linear in self._linears:
                    linear.begin(hidden_states, own, row)
                layer = sequence.layers[self._mixer.layer_idx]
                layer.before_step()
                own_args = [sequence if v is cache else v for v in args]
                own_kwargs = {k: sequence if v is cache else v for k, v in kwargs.items()}
                outputs.append(self._own(own, *own_args, **own_kwargs))
                if not isinstance(outputs[-1], Tensor):
                    raise TypeError("its recurrent layers return more than their output")
                layer.num_steps += 1
                for linear in self._linears:
                    linear.is_last = outputs[-1] is linear.output
            for linear in self._linears:
                if linear.is_last:
                    return linear.of_all(num_fill)
            return torch.cat(outputs + outputs[-1:] * num_fill, dim=1)
        finally:
            for linear in self._linears:
                linear.clear()


class _Linear:
    """A linear layer of a mixer that runs row by row."""

    def __init__(self, module: nn.Linear) -> None:
        self._own = module.forward
        self._num_outputs = module.out_features
        self.is_last = False
        """The mixer returns its output as it is; found out by the first row that ever runs."""
        self.clear()

    def clear(self) -> None:
        """Forget the rows of a call."""
        self._hidden: Tensor | None = None
        self._row_input: Tensor | None = None
        self._products: Tensor | None = None
        self.output: Tensor | None = None
        self._row = 0
        self._inputs: list[Tensor] = []

    def begin(self, hidden_states: Tensor, row_input: Tensor, row: int) -> None:
        """The mixer's next row: all rows, its own, and its number."""
        self._hidden, self._row_input, self._row = hidden_states, row_input, row

    def __call__(self, x: Tensor) -> Tensor:
        """[1, 1, inputs] -> [1, 1, outputs]; of the last layer not before `of_all`."""
        if self._hidden is None:
            return self._own(x)
        if x is self._row_input:
            if self._products is None:
                self._products = self._own(self._hidden)
            return self._products[:, self._row : self._row + 1].clone()
        self._inputs.append(x)
        if self.is_last:
            self.output = x.new_empty(1, 1, self._num_outputs)
        else:
            self.output = self._own(x)
        return self.output

    def of_all(self, num_fill: int) -> Tensor:
        """The outputs of all rows that were asked for, filled up with the last."""
        return self._own(torch.cat(self._inputs + self._inputs[-1:] * num_fill, dim=1))
