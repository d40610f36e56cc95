"""Whole decoder layers in one call: norm, attention with rotated heads, norm, gated MLP.

The parts are those of `ops` and `products`, one after the other, with the same bits. Threads stay
together from the first to the last; between calls they would go to sleep and wake up. A stack of
layers takes one call too, with the head behind it: a step of a small model would spend a quarter of
its time between them.
"""

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from blockdraft.kernels.checks import check_sizes
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import (
    IS_BFLOAT16,
    TiledAttention,
    check_alike,
    check_contiguous,
    layer_of,
    pools_of,
)
from blockdraft.kernels.cpu.products import NativeProduct
from blockdraft.kernels.cpu.structs import Head, Layer, Weights
from blockdraft.kernels.interface import Rotation, Scoring
from blockdraft.kernels.weights import Norm


class NativeLayer:
    """A pre-norm layer with silu as its gate.

    Args:
        kernels: what its products run on too.
        products: queries, keys and values side by side; output of the attention; gate and up side
            by side; down.
        norms: before the attention and before the MLP.
        head_norms: of queries and keys, if the layer has them.
    """

    def __init__(
        self,
        kernels: Library,
        products: tuple[NativeProduct, NativeProduct, NativeProduct, NativeProduct],
        norms: tuple[Norm, Norm],
        head_norms: tuple[Norm, Norm] | None,
    ) -> None:
        norm, mlp_norm = (own.weight.contiguous() for own in norms)
        query, key = (own.weight.contiguous() for own in head_norms) if head_norms else (None, None)
        held = [t for t in (norm, mlp_norm, query, key) if t is not None]
        check_alike(*held, *(product.like for product in products))
        qkv, o, gate_up, down = (product.struct for product in products)
        check_sizes(norm.numel() == mlp_norm.numel() == qkv.inputs == o.outputs == down.outputs)
        check_sizes(gate_up.inputs == qkv.inputs and gate_up.outputs == 2 * down.inputs)
        self._kernels = kernels
        self._held = (products, held)
        self._like = norm
        self._head_sizes = {weight.numel() for weight in held[2:]}
        self._weights = Weights(
            qkv, o, gate_up, down, norm.data_ptr(), mlp_norm.data_ptr(),
            None if query is None else query.data_ptr(), None if key is None else key.data_ptr(),
            norms[0].eps, norms[1].eps, head_norms[0].eps if head_norms else 0.0,
            norms[0].rounds_first,
        )  # fmt: skip
        self.address = ctypes.addressof(self._weights)

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        attention: TiledAttention,
        keys: Tensor,
        values: Tensor,
        scoring: Scoring,
        scales: Tensor | None = None,
    ) -> Tensor:
        """[..., size] -> the same, for the rows of `attention`, which stores keys and values.

        rotation: cos and signed sin, [rows, head_dim] each; keys, values: [kv_heads, .., head_dim],
        the slots of a K/V head one behind another; scales: see `pools_of`.

        Raises:
            RuntimeError: as for `TiledAttention.attend`.
        """
        hidden = hidden.contiguous()
        cos, signed_sin = rotation
        layer, output = self.over(keys, values, scoring), torch.empty_like(hidden)
        check_alike(self._like, hidden, cos, signed_sin)
        check_contiguous(cos, signed_sin)
        check_sizes(hidden.numel() == attention.num_rows * self.size)
        check_sizes(cos.numel() == signed_sin.numel() == attention.num_rows * layer.head_dim)
        pools = pools_of(hidden.dtype, keys, values, scales)
        self._kernels.layer(
            IS_BFLOAT16[hidden.dtype], self.address, attention.address,
            ctypes.addressof(layer), output.data_ptr(), hidden.data_ptr(),
            cos.data_ptr(), signed_sin.data_ptr(), ctypes.addressof(pools),
        )  # fmt: skip
        return output

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, and so of rows."""
        return self._like.dtype

    @property
    def size(self) -> int:
        """Values of a row."""
        inputs: int = self._weights.qkv.inputs
        return inputs

    def over(self, keys: Tensor, values: Tensor, scoring: Scoring) -> Layer:
        """What the kernels know of its attention over keys and values; see `__call__`.

        Raises:
            RuntimeError: they do not fit the layer.
        """
        kv_heads, head_dim = keys.shape[0], keys.shape[-1]
        heads = self._weights.o.inputs // head_dim
        check_sizes(heads % kv_heads == 0 and self._head_sizes <= {head_dim})
        check_sizes(self._weights.qkv.outputs == (heads + 2 * kv_heads) * head_dim)
        return layer_of(heads, keys, values, scoring)


class NativeHead:
    """A norm, and the product with which the head makes logits of it.

    Raises:
        RuntimeError: they do not fit each other.
    """

    def __init__(self, norm: Norm, product: NativeProduct) -> None:
        weight = norm.weight.contiguous()
        check_alike(weight, product.like)
        check_sizes(weight.numel() == product.struct.inputs)
        self._held = weight, product
        self.like = weight
        self.size, self.num_logits = product.struct.inputs, product.struct.outputs
        self._struct = Head(product.struct, weight.data_ptr(), norm.eps, norm.rounds_first)
        self.address = ctypes.addressof(self._struct)


class NativeStack:
    """Layers one behind another over pages, in one call; see LayerStack.

    Args:
        kernels: what their products run on too.
        layers: at least one, all of a size.
        pools: of each layer, [2, kv_heads, .., head_dim]; keys and values are read and written
            there in every call.
        scales: of each layer; see `pools_of`.
        scorings: of each layer.
        kinds: of each layer, the place of its attention among those that a call is given.
        kept: numbers of the layers whose outputs are wanted, rising.
        head: behind the last layer.

    Raises:
        RuntimeError: pools do not fit the layers, or layers and head each other.
    """

    def __init__(
        self,
        kernels: Library,
        layers: Sequence[NativeLayer],
        pools: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        scorings: Sequence[Scoring],
        kinds: Sequence[int],
        kept: Sequence[int],
        head: NativeHead | None = None,
    ) -> None:
        check_sizes(len(layers) == len(pools) == len(scales) == len(scorings) == len(kinds) > 0)
        first, *others = layers
        check_sizes(all(layer.size == first.size for layer in others))
        over = [
            layer.over(pool[0], pool[1], scoring)
            for layer, pool, scoring in zip(layers, pools, scorings, strict=True)
        ]
        check_sizes(len({layer.head_dim for layer in over}) == 1)
        self._kernels, self._head = kernels, head
        if head is not None:
            check_sizes(head.size == first.size and head.like.dtype == first.dtype)
        found = [
            pools_of(first.dtype, pool[0], pool[1], own)
            for pool, own in zip(pools, scales, strict=True)
        ]
        self._held = (layers, over, pools, scales, found)
        self._dtype = first.dtype
        self._num_layers, self._size, self._head_dim = len(layers), first.size, over[0].head_dim
        # What nobody wants is passed on in one place; each wanted output stays at its own.
        own = {index: place for place, index in enumerate(kept)}
        check_sizes(set(own) <= set(range(len(layers))) and list(own) == sorted(kept))
        self._num_kept, self._keeps_last = len(own), len(layers) - 1 in own
        places = [own.get(index, -1) for index in range(len(layers))]
        self._places = (ctypes.c_int64 * len(layers))(*places)
        self._kinds, self._num_kinds = list(kinds), 1 + max(kinds)
        self._weights = _addresses(layer.address for layer in layers)
        self._layers = _addresses(map(ctypes.addressof, over))
        self._pools = _addresses(map(ctypes.addressof, found))

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        attentions: Sequence[TiledAttention],
        wanted: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See LayerStack.__call__. attentions: of each kind.

        Raises:
            RuntimeError: as for `TiledAttention.attend`.
        """
        hidden = hidden.contiguous()
        cos, signed_sin = rotation
        num_rows = attentions[0].num_rows
        check_alike(hidden, cos, signed_sin)
        check_contiguous(cos, signed_sin)
        check_sizes(hidden.dtype == self._dtype)
        check_sizes(len(attentions) == self._num_kinds and hidden.numel() == num_rows * self._size)
        check_sizes(all(attention.num_rows == num_rows for attention in attentions))
        check_sizes(cos.numel() == signed_sin.numel() == num_rows * self._head_dim)
        kept = hidden.new_empty((num_rows, self._num_kept, self._size))
        passed = torch.empty_like(hidden)
        chosen = None if wanted is None else self._chosen(wanted, num_rows)
        given: Sequence[int] = range(num_rows) if chosen is None else chosen
        places: Sequence[int] = range(len(given))
        is_in_order = wanted is None or list(wanted) == list(given)
        if wanted is not None and not is_in_order:
            place_of = {row: place for place, row in enumerate(given)}
            places = [place_of[row] for row in wanted]
        head, logits = self._head, None
        if head is not None:
            logits = hidden.new_empty((1, len(places), head.num_logits))
        addresses = [attention.address for attention in attentions]
        self._kernels.layers(
            IS_BFLOAT16[hidden.dtype], self._num_layers, self._weights,
            _addresses(addresses[kind] for kind in self._kinds), self._layers,
            kept.data_ptr(), self._num_kept, self._places, passed.data_ptr(),
            None if chosen is None else _numbers(chosen), 0 if chosen is None else len(chosen),
            hidden.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(), self._pools,
            *_scored(head, places),
            None if logits is None else logits.data_ptr(),
        )  # fmt: skip
        if logits is not None:
            return kept, logits
        last = kept[:, -1].reshape(hidden.shape) if self._keeps_last else passed
        if chosen is not None:
            last = passed[:, : len(chosen)]
        return kept, last if is_in_order else last[:, torch.tensor(places, device=last.device)]

    def _chosen(self, wanted: Sequence[int], num_rows: int) -> list[int] | None:
        """The rows that go on behind the last keys and values, rising; None for all."""
        chosen = sorted({*wanted})
        check_sizes(len(chosen) > 0 and chosen[0] >= 0 and chosen[-1] < num_rows)
        return None if self._keeps_last or len(chosen) == num_rows else chosen


def _scored(
    head: NativeHead | None, rows: Sequence[int]
) -> tuple[int | None, "ctypes.Array[ctypes.c_int64] | None", int]:
    """A head and its rows, as the kernels take them."""
    return (None, None, 0) if head is None else (head.address, _numbers(rows), len(rows))


def _numbers(numbers: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _addresses(addresses: Iterable[int]) -> "ctypes.Array[ctypes.c_void_p]":
    found = list(addresses)
    return (ctypes.c_void_p * len(found))(*found)
