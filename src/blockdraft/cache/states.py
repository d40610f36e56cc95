"""The cache of models in which some layers keep a state, see `state_layer`, and some keys."""

from collections.abc import Callable, Container, Sequence
from typing import Any, Literal

from torch import Tensor
from transformers.cache_utils import Cache

from blockdraft.cache.kv import Capacity, KVCache, KVLayer
from blockdraft.cache.state_layer import LayerState, StateAndKVLayer, StateLayer

LayerKind = Literal["kv", "state", "both"]
"""What a layer remembers; one without a memory is "kv" and stays empty."""


class StateCache(KVCache):
    """The K/V and states of one sequence, of a model with a state in some layer at least."""

    layers: list[Any]

    def __init__(self, kinds: Sequence[LayerKind], num_states: int = 1) -> None:
        self._capacity = Capacity()
        self.num_rows = 0
        """Rows of the forward that runs, without those that only fill it up."""
        make: dict[LayerKind, Callable[[], Any]] = {
            "kv": lambda: KVLayer(self._capacity),
            "state": lambda: StateLayer(number_of_states=num_states),
            "both": lambda: StateAndKVLayer(self._capacity, number_of_states=num_states),
        }
        Cache.__init__(self, layers=[make[kind]() for kind in kinds])

    @property
    def spans(self) -> "list[Span]":
        """See PackedStates.spans: one sequence."""
        return [(self, self.num_rows)]

    @property
    def _states(self) -> list[StateLayer]:
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    @property
    def _held(self) -> list[KVLayer]:
        kv = [layer for layer in self.layers if isinstance(layer, KVLayer)]
        return [layer for layer in kv if layer.is_initialized]

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self._states[0].num_steps

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The same for all layers, also for those that remember nothing."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See KVLayer.get_mask_sizes; one mask serves all layers."""
        layer = KVLayer(self._capacity)
        layer.length = self.length
        return layer.get_mask_sizes(query_length)

    def may_return(self, sure: int, also: Container[int] = ()) -> None:
        """See KVCache.may_return and StateLayer.may_return."""
        for layer in self._states:
            layer.may_return(sure, also)

    def states_after(self, length: int) -> list[LayerState]:
        """Of all layers with a state; see StateLayer.state_after."""
        return [layer.state_after(length) for layer in self._states]

    def resume(self, states: Sequence[LayerState], length: int) -> None:
        """See StateLayer.resume; keys and values lie elsewhere."""
        for layer, state in zip(self._states, states, strict=True):
            layer.resume(state, length)

    def expect(self, num_rows: int) -> None:
        """See KVCache.expect."""
        self.num_rows = num_rows

    def truncate(self, length: int) -> None:
        """See KVCache.truncate."""
        super().truncate(length)
        for layer in self._states:
            layer.go_back(length)

    def repeat(self, length: int) -> None:
        """See KVCache.repeat; a state stays as it is."""
        super().repeat(length)
        for layer in self._states:
            layer.num_steps = length

    @property
    def num_state_bytes(self) -> int:
        """Of the states of all layers, once."""
        return sum(layer.num_bytes for layer in self._states)


Span = tuple[StateCache, int]
"""The states of a sequence, and how many rows of a forward are its next tokens."""


class PackedStates(Cache):  # type: ignore[misc]
    """What a model takes for its cache where rows of many sequences are packed in one forward.

    spans: they follow each other from row 0 on. Keys and values go into pages, past this cache.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        Cache.__init__(self, layers=[])
        self.spans = list(spans)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values alone; the attention over pages knows the others."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """None that the model should count: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of the new rows; no mask is made of it."""
        return query_length, 0
