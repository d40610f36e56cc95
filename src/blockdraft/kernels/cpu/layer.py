"""A whole decoder layer in one call: norm, attention with rotated heads, norm, gated MLP.

The parts are those of `ops` and `products`, one after the other, with the same bits. Threads stay
together from the first to the last; between calls they would go to sleep and wake up.
"""

import ctypes

import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import Library, Weights
from blockdraft.kernels.cpu.ops import (
    IS_BFLOAT16,
    TiledAttention,
    check_alike,
    check_contiguous,
    check_sizes,
    layer_of,
)
from blockdraft.kernels.cpu.products import NativeProduct
from blockdraft.kernels.interface import Norm, Rotation, Scoring


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
        self._address = ctypes.addressof(self._weights)

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        attention: TiledAttention,
        keys: Tensor,
        values: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """[..., size] -> the same, for the rows of `attention`, which stores keys and values.

        rotation: cos and signed sin, [rows, head_dim] each; keys, values: [kv_heads, .., head_dim],
        the slots of a K/V head one behind another.

        Raises:
            RuntimeError: as for `TiledAttention.attend`.
        """
        hidden = hidden.contiguous()
        cos, signed_sin = rotation
        check_alike(self._like, hidden, cos, signed_sin, keys, values)
        check_contiguous(cos, signed_sin)
        kv_heads, head_dim = keys.shape[0], keys.shape[-1]
        heads = self._weights.o.inputs // head_dim
        check_sizes(heads % kv_heads == 0 and self._head_sizes <= {head_dim})
        check_sizes(self._weights.qkv.outputs == (heads + 2 * kv_heads) * head_dim)
        check_sizes(hidden.numel() == attention.num_rows * self._weights.qkv.inputs)
        check_sizes(cos.numel() == signed_sin.numel() == attention.num_rows * head_dim)
        layer, output = layer_of(heads, keys, values, scoring), torch.empty_like(hidden)
        self._kernels.layer(
            IS_BFLOAT16[hidden.dtype], self._address, attention.address,
            ctypes.addressof(layer), output.data_ptr(), hidden.data_ptr(),
            cos.data_ptr(), signed_sin.data_ptr(), keys.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        return output
