"""The context of a draft forward: keys and values of committed tokens, layer by layer.

A drafter's layers read the target's features as extra keys and values, and never query from them.
The block's own keys and values are needed for one forward only, so nothing is ever rolled back
(DFlash, arXiv 2602.06036).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.models.draft.waiting_features import Waiting, WaitingFeatures

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [b, kv_heads, tokens, head_dim]."""

MAX_WAITING = 4096
"""Tokens whose features may wait where no memory was planned for them."""


@dataclass(frozen=True, slots=True)
class ContextSpan:
    """Tokens of one sequence, from position `start` up to `end`."""

    key: int
    start: int
    end: int


class ContextKV(Protocol):
    """What a draft forward needs of the context."""

    @property
    def num_context(self) -> int:
        """Tokens in the context."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """Keys and values of the context followed by those of the block.

        Args:
            layer: which layer of the drafter.
            k, v: [b, kv_heads, q, head_dim] of the block's q slots.

        Returns:
            two tensors [b, kv_heads, num_context + q, head_dim], valid until the next call for
            this layer.
        """


class DraftContexts(Protocol):
    """The contexts of all sequences, addressed by their keys, and the features that wait for them.

    `together`: several sequences may share a draft forward.
    """

    together: bool
    waiting: WaitingFeatures

    def parts(self, key: int, start: int, features: Tensor) -> list[Waiting]:
        """Features [new, width] of the tokens from `start` on, by what will hold their keys."""

    def keep(self, key: int, start: int, features: Tensor, *, is_needed: bool = True) -> None:
        """Let features [new, width] wait, of the tokens from `start` on.

        But for those that share a page with tokens that were given up. Those that are not needed
        are given up where a sequence can go on without.
        """

    def may_draft(self, key: int, length: int) -> bool:
        """True if a block behind the first `length` tokens has a place, and a context."""

    def needed(self, span: ContextSpan) -> list[Waiting]:
        """What must be written before someone drafts from these tokens."""

    def excess(self) -> list[Waiting]:
        """What must be written, or else more would wait than may.

        What nobody is likely to draft from is given up instead, and waits no longer.
        """

    def reused(self, key: int, num_tokens: int) -> None:
        """A sequence has taken over the context of so many tokens from others."""

    def positions(self, key: int, length: int) -> Sequence[int]:
        """Of the first `length` tokens of a sequence those whose context was not given up."""

    def write(self, needed: Sequence[Waiting], context_kv: Sequence[LayerKV]) -> None:
        """Write per layer (k, v), each [1, kv_heads, tokens, head_dim]; they wait no longer."""

    def view(self, keys: Sequence[int], lengths: Sequence[int]) -> ContextKV:
        """The first `lengths` tokens of each sequence, for one draft forward."""

    def close(self, key: int) -> None:
        """Forget a sequence."""


class ConcatContext:
    """A context held as given and concatenated anew: simple, and safe for autograd.

    Args:
        context_kv: per layer (k, v), each [b, kv_heads, c, head_dim], from `project_context`.
    """

    def __init__(self, context_kv: Sequence[LayerKV]) -> None:
        self._context_kv = context_kv

    @property
    def num_context(self) -> int:
        """Tokens in the context."""
        return self._context_kv[0][0].shape[2]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """See `ContextKV.extend`."""
        context_k, context_v = self._context_kv[layer]
        return torch.cat((context_k, k), dim=2), torch.cat((context_v, v), dim=2)


class DraftContext:
    """The committed context of one sequence, in buffers that grow by doubling; inference only.

    The block of a forward is written after the context, into slots that the next `append`
    overwrites: the context is never copied and there is nothing to undo.

    Args:
        num_layers, num_key_value_heads, head_dim: of the drafter.
        dtype, device: of its keys and values.
        capacity: tokens to hold before the first growth, block included.
    """

    def __init__(
        self,
        num_layers: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int = 512,
    ) -> None:
        shape = (num_layers, 2, 1, num_key_value_heads, capacity, head_dim)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)
        self._length = 0

    @property
    def num_context(self) -> int:
        """Tokens in the context."""
        return self._length

    def __len__(self) -> int:
        return self._length

    def append(self, context_kv: Sequence[LayerKV]) -> None:
        """Add newly committed tokens: per layer (k, v), each [1, kv_heads, c, head_dim]."""
        num_new = context_kv[0][0].shape[2]
        end = self._length + num_new
        self._reserve(end)
        for layer, (k, v) in enumerate(context_kv):
            self._buffer[layer, 0, :, :, self._length : end] = k
            self._buffer[layer, 1, :, :, self._length : end] = v
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert length <= self._length
        self._length = length

    def extend(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """See `ContextKV.extend`; the result is a view of the buffers."""
        end = self._length + k.shape[2]
        self._reserve(end)
        keys, values = self._buffer[layer, 0], self._buffer[layer, 1]
        keys[:, :, self._length : end] = k
        values[:, :, self._length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def _reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens, block included."""
        capacity = self._buffer.shape[4]
        if num_tokens <= capacity:
            return
        shape = list(self._buffer.shape)
        shape[4] = max(2 * capacity, num_tokens)
        grown = self._buffer.new_empty(shape)
        grown[:, :, :, :, : self._length] = self._buffer[:, :, :, :, : self._length]
        self._buffer = grown


class SeparateContexts:
    """A context of its own for every sequence, one sequence a draft forward."""

    together = False

    def __init__(self, new_context: Callable[[], DraftContext]) -> None:
        self.waiting = WaitingFeatures(MAX_WAITING)
        self._new_context = new_context
        self._contexts: dict[int, DraftContext] = {}

    def parts(self, key: int, start: int, features: Tensor) -> list[Waiting]:
        """See `DraftContexts.parts`."""
        return [Waiting(key, start, start + len(features), [features])]

    def keep(self, key: int, start: int, features: Tensor, *, is_needed: bool = True) -> None:
        """See `DraftContexts.keep`. No sequence can go on without."""
        self.waiting.keep(key, start, features)

    def may_draft(self, key: int, length: int) -> bool:
        """See `DraftContexts.may_draft`."""
        return True

    def needed(self, span: ContextSpan) -> list[Waiting]:
        """See `DraftContexts.needed`."""
        return self.waiting.of([span.key])

    def excess(self) -> list[Waiting]:
        """See `DraftContexts.excess`. Their sequences run, so nothing is given up."""
        return self.waiting.excess()

    def reused(self, key: int, num_tokens: int) -> None:
        """See `DraftContexts.reused`. Nobody takes over what belongs to a sequence."""

    def positions(self, key: int, length: int) -> Sequence[int]:
        """See `DraftContexts.positions`: all of them."""
        return range(length)

    def write(self, needed: Sequence[Waiting], context_kv: Sequence[LayerKV]) -> None:
        """See `DraftContexts.write`."""
        done = 0
        for waiting in needed:
            key, end = waiting.holder, done + len(waiting)
            if key not in self._contexts:
                self._contexts[key] = self._new_context()
            # A write that failed is made again.
            self._contexts[key].truncate(waiting.start)
            self._contexts[key].append(
                [(k[:, :, done:end], v[:, :, done:end]) for k, v in context_kv]
            )
            done = end
        for waiting in needed:
            self.waiting.drop(waiting.holder)

    def view(self, keys: Sequence[int], lengths: Sequence[int]) -> ContextKV:
        """See `DraftContexts.view`."""
        context = self._contexts[keys[0]]
        assert [len(context)] == list(lengths)
        return context

    def close(self, key: int) -> None:
        """See `DraftContexts.close`."""
        self.waiting.drop(key)
        self._contexts.pop(key, None)
