"""K/V of all sequences of one model, in pages."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.kernels.interface import TILE
from blockdraft.kernels.weights import MAX_INT8

LayerShape = tuple[int, int]
"""kv_heads and head_dim of one layer; zeros if it has no attention."""


class PagedKV:
    """Keys and values of `num_pages` pages.

    Each layer has a pool [2, kv_heads, num_pages, PAGE_SIZE, head_dim], all on one device, or each
    on its own.

    The memory is reserved at once and used as pages are written. What a sequence has not written is
    zero, or what another one has left, which may be no number; attention must not be misled by it.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | Sequence[torch.device],
    ) -> None:
        assert PAGE_SIZE == TILE
        self.num_pages = num_pages
        if isinstance(device, torch.device | str):
            device = [torch.device(device)] * len(shapes)
        pools = [
            ((2, heads, num_pages, PAGE_SIZE, head_dim), own)
            for (heads, head_dim), own in zip(shapes, device, strict=True)
        ]
        self.pools, self._stacks = _stacked(pools, dtype)
        self.scales: Sequence[Tensor | None] = [None] * len(self.pools)
        """Of numbers in int8 only; see Int8KV."""
        self._workspaces: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def token_bytes(self) -> int:
        """Memory of one token over all layers, its scales included."""
        held = [*self.pools, *(scale for scale in self.scales if scale is not None)]
        return sum(tensor.nbytes for tensor in held) // (self.num_pages * PAGE_SIZE)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values, each [kv_heads, n, head_dim], at slots [n], see Pages.slots."""
        buffer = self.pools[layer].flatten(2, 3)
        buffer[0].index_copy_(1, slots, k)
        buffer[1].index_copy_(1, slots, v)

    def gather(
        self, layer: int, page_ids: Tensor, moves: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """[2, kv_heads, n * PAGE_SIZE, head_dim] of pages [n], side by side.

        moves: slots [m], and the places in what is returned where their keys and values go.
        Valid until the next gather: copies go into memory that is reused, as large as the largest
        one so far, because fresh memory of this size costs more than the copy.
        """
        return self._gathered("pool", self.pools[layer], page_ids, moves)

    def _gathered(
        self, name: str, pool: Tensor, page_ids: Tensor, moves: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        shape = (*pool.shape[:2], page_ids.shape[0], *pool.shape[3:])
        workspace = self._workspace(name, shape, pool.dtype, pool.device)
        gathered = torch.index_select(pool, 2, page_ids, out=workspace).flatten(2, 3)
        if moves is not None:
            slots, places = moves
            gathered.index_copy_(2, places, pool.flatten(2, 3).index_select(2, slots))
        return gathered

    def _workspace(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        key, size = (name, device), math.prod(shape)
        found = self._workspaces.get(key)
        if found is None or found.numel() < size:
            found = self._workspaces[key] = torch.empty(size, dtype=dtype, device=device)
        return found[:size].view(shape)

    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        """Copy keys and values of all layers from slots to others, as if all at once."""
        sent: dict[torch.device, Tensor] = {}
        for stack in self._stacks:
            if stack.device not in sent:
                sent[stack.device] = torch.tensor([slots, to], device=stack.device)
            sources, targets = sent[stack.device]
            buffer = stack.flatten(3, 4)
            buffer.index_copy_(3, targets, buffer.index_select(3, sources))

    def clear_begun(self, slots: Sequence[int]) -> None:
        """Set the pages whose first slot is among these to zero.

        What an earlier sequence left there may be no number, or by chance what belongs there. For
        readers that mask it, and do not look whether it is a number, and for tests.
        """
        begun = [slot // PAGE_SIZE for slot in slots if slot % PAGE_SIZE == 0]
        if begun:
            for stack in self._stacks:
                stack.index_fill_(3, torch.tensor(begun, device=stack.device), 0)

    def repeat_first(self, page_ids: Sequence[int]) -> None:
        """Fill pages with copies of the first of them."""
        for stack in self._stacks:
            stack[:, :, :, list(page_ids)] = stack[:, :, :, page_ids[:1]]


class Int8KV(PagedKV):
    """The same in whole numbers of 8 bits, those of a token's head with a scale of their own.

    A key or value is rounded once, when it is written, by its own numbers alone; what is gathered
    is of the type `dtype` again. So it does not matter who else is written in the same forward.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str | Sequence[torch.device],
    ) -> None:
        super().__init__(shapes, num_pages, dtype=torch.int8, device=device)
        self.dtype = dtype
        shapes_of_scales = [((*pool.shape[:-1], 1), pool.device) for pool in self.pools]
        scales, stacks = _stacked(shapes_of_scales, torch.float32)
        self.scales: list[Tensor] = scales
        self._stacks += stacks

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See PagedKV.write."""
        values = torch.stack((k, v)).float()
        scales = values.abs().amax(-1, keepdim=True) / MAX_INT8
        numbers = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_()
        # What is no number stays none by its scale.
        numbers = numbers.nan_to_num_(0.0).clamp_(-MAX_INT8, MAX_INT8).to(torch.int8)
        for part, new in ((self.pools[layer], numbers), (self.scales[layer], scales)):
            part.flatten(2, 3).index_copy_(2, slots, new)

    def gather(
        self, layer: int, page_ids: Tensor, moves: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See PagedKV.gather."""
        numbers = self._gathered("pool", self.pools[layer], page_ids, moves)
        scales = self._gathered("scales", self.scales[layer], page_ids, moves)
        shape = tuple(numbers.shape)
        found = self._workspace("values", shape, self.dtype, numbers.device)
        return torch.mul(numbers, scales, out=found)


def page_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Memory of one page over all layers."""
    return sum(2 * heads * head_dim for heads, head_dim in shapes) * PAGE_SIZE * dtype.itemsize


def int8_page_bytes(shapes: Sequence[LayerShape]) -> int:
    """The same for Int8KV."""
    num_scales = sum(2 * heads for heads, head_dim in shapes if head_dim) * PAGE_SIZE
    return page_bytes(shapes, torch.int8) + num_scales * torch.float32.itemsize


def _stacked(
    shapes: Sequence[tuple[tuple[int, ...], torch.device]], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Zeros of each shape on its device, and stacks of them: all that are alike are one tensor.

    What is done to the same slots of all layers then takes one call, and not one a layer.
    """
    alike: dict[tuple[tuple[int, ...], torch.device], list[int]] = {}
    for index, own in enumerate(shapes):
        alike.setdefault(own, []).append(index)
    found, stacks = dict[int, Tensor](), list[Tensor]()
    for (shape, device), indices in alike.items():
        stack = _lazy_zeros((len(indices), *shape), dtype, device)
        found.update(zip(indices, stack.unbind(), strict=True))
        stacks += [stack] if stack.numel() else []
    return [found[index] for index in range(len(shapes))], stacks


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that the operating system provides page by page, when they are first written."""
    if torch.device(device).type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes its zeros, and so takes all the memory at once. numpy asks for huge pages:
    # the first token would take 2 MiB for every head of every layer.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
