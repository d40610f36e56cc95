"""Rotations of positions, looked up instead of computed in every forward."""

from collections.abc import Callable

import torch
from torch import Tensor

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.kernels.interface import Rotation


class RotationTable:
    """The rotations of the first positions, computed once and looked up in every forward.

    rotate: of positions [1, rows] cos and signed sin [1, rows, 1, head_dim], of the type of the
    hidden states before them. varies: its rotation of a position depends on more than the position;
    then it is asked in every forward.
    """

    def __init__(
        self, rotate: Callable[[Tensor, Tensor], Rotation], *, varies: bool = False
    ) -> None:
        self._rotate, self._varies = rotate, varies
        self._rotations: Rotation | None = None

    def __call__(self, hidden: Tensor, positions: Tensor, end: int) -> Rotation:
        """Positions [rows], all before `end` -> cos and signed sin [rows, head_dim]."""
        if self._varies:
            cos, signed_sin = self._rotate(hidden, positions[None])
            return cos.flatten(0, 2), signed_sin.flatten(0, 2)
        rotations = self._rotations
        if rotations is None or rotations[0].shape[0] < end:
            size = max(PAGE_SIZE, 1 << (end - 1).bit_length())
            first = torch.arange(size, device=positions.device)[None]
            cos, signed_sin = self._rotate(hidden, first)
            rotations = self._rotations = cos[0, :, 0], signed_sin[0, :, 0]
        cos, signed_sin = rotations
        return cos.index_select(0, positions), signed_sin.index_select(0, positions)
