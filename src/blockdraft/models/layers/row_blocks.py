"""Linear layers that give a row other bits where there are many rows run in blocks of few.

Libraries choose a kernel by the sizes of a product. Each shape of a model is tried at the numbers
of rows that forwards can have, and gets the largest block whose rows all have the same bits.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.remembered import once
from blockdraft.kernels.interface import Linear, RowRule
from blockdraft.models.layers.fused import replaced_modules
from blockdraft.models.layers.fused_layer import FusedLayer
from blockdraft.models.layers.packed import PackedLinear, replace_forward
from blockdraft.models.supported import decoder_layers

MAX_TRIED_WORK = 2**34
"""Multiplications to spend on one shape: of a large one fewer numbers of rows are tried."""
MAX_DENSE_ROWS = 64
"""Up to so many rows every number is tried, then powers of two."""

Product = Callable[[Tensor], Tensor]


class RowBlocks:
    """Calls a product with at most `num_rows` rows at once."""

    def __init__(self, product: Product, num_rows: int) -> None:
        self._product = product
        self._num_rows = num_rows

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] <= self._num_rows:
            return self._product(x)
        output = torch.cat([self._product(block) for block in torch.split(rows, self._num_rows)])
        return output.view(*x.shape[:-1], -1)


class _Blocks:
    """Finds the block of each shape once."""

    def __init__(self, rule: RowRule) -> None:
        self._rule = rule
        self._found: dict[object, int] = {}

    def of(
        self, product: Product, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Product:
        """The product as it may be deployed; shape: outputs and inputs."""
        kind = type(product), shape, dtype, device
        if kind not in self._found:
            self._found[kind] = once(
                f"rows of {kind[0].__name__} {tuple(shape)}",
                lambda: largest_block(product, shape, dtype, self._rule, device),
            )
        num_rows = self._found[kind]
        return product if num_rows == self._rule.max_rows else RowBlocks(product, num_rows)

    def of_linear(self, linear: Linear, product: Product, device: torch.device) -> Product:
        """The same for what calls a backend's linear layer."""
        if linear.keeps_rows:
            return product
        return self.of(product, linear.shape, linear.dtype, device)


@torch.inference_mode()
def keep_rows_apart(model: PreTrainedModel, rule: RowRule) -> ExitStack:
    """Let linear layers of a model run in blocks where a row would depend on its company.

    To be called after `speed_up`, whose layers are tried as they are deployed, and closed before.

    Returns:
        what gives the model back as it was when closed.
    """
    undo, blocks = ExitStack(), _Blocks(rule)
    unused = replaced_modules(model)
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FusedLayer):
            layer = forward.layer
            parts = layer.parts
            device = next(module.parameters()).device
            layer.products = [
                blocks.of_linear(linear, linear, device)
                for linear in (parts.qkv, parts.o, parts.gate_up, parts.down)
            ]
        elif isinstance(forward, PackedLinear):
            device = module.weight.device
            replace_forward(module, blocks.of_linear(forward.linear, forward, device), undo)
        elif forward is None and type(module) is nn.Linear and module not in unused:
            weight = module.weight
            product = blocks.of(module.forward, weight.shape, weight.dtype, weight.device)
            replace_forward(module, product, undo)
    return undo


def keeps_any_rows(model: PreTrainedModel) -> bool:
    """True if no operation of a model that `speed_up` prepared asks for a multiple of rows.

    Its layers can run in one call, with the same bits as in parts, and its other weights are looked
    up or belong to products that keep their rows.
    """
    layers = [vars(layer).get("forward") for layer in decoder_layers(model)]
    if not all(isinstance(layer, FusedLayer) and layer.layer.whole is not None for layer in layers):
        return False
    unused = replaced_modules(model)
    return all(
        isinstance(module, nn.Embedding)
        or (isinstance(own := vars(module).get("forward"), PackedLinear) and own.linear.keeps_rows)
        for module in model.modules()
        if module not in unused and any(p.ndim > 1 for p in module.parameters(recurse=False))
    )


def largest_block(
    product: Product,
    shape: torch.Size,
    dtype: torch.dtype,
    rule: RowRule,
    device: torch.device | str = "cpu",
) -> int:
    """The most rows, of those tried, up to which a row has the bits of the fewest."""
    generator, fewest = torch.Generator().manual_seed(0), rule.row_multiple
    rows = torch.randn(fewest, shape[1], generator=generator).to(device, dtype)
    expected, largest = product(rows), fewest
    for num_rows in tried_rows(rule, shape.numel()):
        times = num_rows // fewest
        if not torch.equal(product(rows.repeat(times, 1)), expected.repeat(times, 1)):
            return largest
        largest = num_rows
    return rule.max_rows


def tried_rows(rule: RowRule, num_weights: int) -> list[int]:
    """The numbers of rows that a weight of this size is tried with."""
    dense = min(MAX_DENSE_ROWS, rule.max_rows)
    sparse = [rows for rows in (128, 256, 512) if dense < rows <= rule.max_rows]
    step = rule.row_multiple
    while True:
        tried = [*range(step, dense + 1, step), *sparse]
        if sum(tried) * num_weights <= MAX_TRIED_WORK or step >= dense:
            return tried
        step *= 2
