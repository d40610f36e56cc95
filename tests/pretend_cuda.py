"""A CUDA device that is none: tensors lie on the CPU, held to what a real card would refuse.

A tensor on the wrong device stops the first run on a card, and no CPU notices it. Within
`PretendCuda` tensors that were asked for on "cuda" say that they are there; an operation on
tensors of both devices is refused, and so is numpy on what was not copied to the CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_MARK = "_is_on_pretended_cuda"
_MAY_MIX = {
    *(Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_),
    *(Tensor.data.__set__, torch._has_compatible_shallow_copy_type),
}
"""Copies between devices, and indices, which may lie on the CPU."""
_HOST_ONLY = {Tensor.numpy, Tensor.__array__}
_TO_HOST = {Tensor.cpu, Tensor.tolist, Tensor.item}


DEVICES = ("cpu", "cuda", "cuda:0")


class WrongDevice(RuntimeError):
    """What a card would refuse."""


class PretendCuda(TorchFunctionMode):
    """See the module."""

    def __enter__(self) -> "PretendCuda":
        # A parameter is made of a tensor without being an operation.
        made = torch.Tensor._make_subclass

        def make(cls: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
            return _marked(made(cls, data, *args, **kwargs), is_marked(data), ())

        torch.Tensor._make_subclass = staticmethod(make)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del torch.Tensor._make_subclass

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch._C._nn._parse_to, torch.device):  # they touch no tensor
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:
            return CUDA if is_marked(args[0]) else func(*args)
        if func == Tensor.is_cuda.__get__:
            return is_marked(args[0])
        if func is Tensor.__deepcopy__:  # its memo holds any tensors
            return _marked(func(*args), is_marked(args[0]), ())
        if func is Tensor.cuda:
            return _marked(args[0].view_as(args[0]), True, ())
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked = [is_marked(tensor) for tensor in tensors]
        if func in _HOST_ONLY and any(marked):
            raise WrongDevice("a tensor on cuda has no numpy array; copy it to the CPU first")
        others = [t for t, mark in zip(tensors, marked, strict=True) if not mark and t.ndim]
        if any(marked) and others and func not in _MAY_MIX:
            shapes = [tuple(t.shape) for t in others]
            raise WrongDevice(f"{func} on cuda and on the CPU, which has {shapes}")
        args, kwargs, asked = _on_cpu(func, args, kwargs)
        result = func(*args, **kwargs)
        if func == Tensor.data.__set__:
            _mark(args[0], is_marked(args[1]))
            return result
        if func in (Tensor.__setitem__, Tensor.copy_, Tensor.index_put_):
            return result
        if asked is None:
            counted = marked[:1] if func is Tensor.__getitem__ else marked
            asked = func not in _TO_HOST and any(counted)
        return _marked(result, asked, args)


def is_marked(tensor: Tensor) -> bool:
    return getattr(tensor, _MARK, False)


def _mark(tensor: Tensor, is_there: bool) -> None:
    setattr(tensor, _MARK, is_there)


def _marked(result: Any, is_there: bool, args: tuple[Any, ...]) -> Any:
    given = {id(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and is_there != is_marked(leaf):
            if id(leaf) in given:  # a copy that was none: a real one is another tensor
                return _marked(result.view_as(result), is_there, ())
            _mark(leaf, is_there)
    return result


def _on_cpu(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool | None]:
    """The arguments with the CPU for every device; whether the result was asked for on cuda."""
    found: list[bool] = []

    def swapped(value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value in DEVICES):
            found.append(torch.device(value).type == "cuda")
            return torch.device("cpu")
        return value

    args = tuple(swapped(value) for value in args)
    kwargs = {key: swapped(value) for key, value in kwargs.items()}
    if func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
        found.append(is_marked(args[1]))
    return args, kwargs, found[-1] if found else None
