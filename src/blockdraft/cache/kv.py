"""The target's K/V of one sequence, in buffers that grow by whole multiples of `KEY_MULTIPLE`.

Two properties serve exactness. A key's slot is its absolute position, whatever was rolled back
before. And the buffers are handed out whole, so the attention always reduces over a multiple of
`KEY_MULTIPLE` keys, those past the end masked: the number of keys of a position then depends on
little more than the position. They also serve speed: appending copies new rows only, and a whole
buffer is contiguous, which the matrix products want.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

KEY_MULTIPLE = 64

SlotKV = list[tuple[Tensor, Tensor]]
"""Keys and values of one token in each layer that has its own, each [1, kv_heads, 1, head_dim]."""


@dataclass(slots=True)
class Capacity:
    """Slots that every layer of a cache hands out, the layers that lag behind once they grow.

    One mask serves all layers, so they must agree; a forward that failed has grown the first only.
    """

    slots: int = 0


class KVLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """K/V of one layer: [1, kv_heads, capacity, head_dim], of which `length` slots are valid.

    Sliding-window layers keep all keys too, and the model's mask hides the old ones: a ring buffer
    could not be rolled back, and would move keys to other slots.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: Capacity | None = None) -> None:
        super().__init__()
        self.length = 0
        self._capacity = capacity or Capacity()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shape, type and device from the first keys and values [1, kv_heads, q, head_dim]."""
        self.keys = key_states.new_zeros((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [1, kv_heads, q, head_dim]; returns both buffers whole."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        end = self.length + key_states.shape[2]
        slots = max(self._capacity.slots, _padded(end))
        if slots > keys.shape[2]:
            # Both or none: a failure in between must leave buffers of one size.
            keys, values = _grown(keys, slots), _grown(values, slots)
            self.keys, self.values = keys, values
            self._capacity.slots = slots
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self.length = end
        return keys, values

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has some, whole."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` slots; the rest stays masked."""
        assert length <= self.length
        self.length = length

    def get_seq_length(self) -> int:
        """Number of valid slots."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that the next update hands out, position of the first)."""
        return max(self._capacity.slots, _padded(self.length + query_length)), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class KVCache(Cache):  # type: ignore[misc]
    """The K/V of one sequence, all layers."""

    layers: list[KVLayer]

    def __init__(self, num_layers: int) -> None:
        capacity = Capacity()
        super().__init__(layers=[KVLayer(capacity) for _ in range(num_layers)])

    def may_return(self, sure: int) -> None:
        """From here on `truncate` gets the present length, or one from `sure` on.

        Keys and values can be cut anywhere; states cannot, see `blockdraft.cache.state_layer`.
        """

    def expect(self, num_rows: int) -> None:
        """The next forward has so many rows of tokens; others only fill it up."""

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.layers[0].length

    @property
    def _held(self) -> list[KVLayer]:
        """Layers with keys and values of their own; in some models others share them."""
        return [layer for layer in self.layers if layer.is_initialized]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        The layers may differ in length: a forward that failed has appended to the first ones only.
        """
        for layer in self._held:
            layer.truncate(length)

    def copied(self, position: int) -> SlotKV:
        """Copies of the keys and values at a position, for `append`."""
        slot = slice(position, position + 1)
        copies = []
        for layer in self._held:
            keys, values = layer.buffers
            copies.append((keys[:, :, slot].clone(), values[:, :, slot].clone()))
        return copies

    def append(self, slot: SlotKV) -> None:
        """Put the keys and values of one token behind those held."""
        for layer, (keys, values) in zip(self._held, slot, strict=True):
            layer.update(keys, values)

    def repeat(self, length: int) -> None:
        """Fill up to `length` tokens with copies of those held."""
        for layer in self._held:
            keys, values = layer.buffers
            slots = torch.arange(layer.length, length) % layer.length
            layer.update(keys[:, :, slots], values[:, :, slots])


def _padded(length: int) -> int:
    return -(-length // KEY_MULTIPLE) * KEY_MULTIPLE


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    grown = buffer.new_zeros((*buffer.shape[:2], capacity, buffer.shape[3]))
    grown[:, :, : buffer.shape[2]] = buffer
    return grown
