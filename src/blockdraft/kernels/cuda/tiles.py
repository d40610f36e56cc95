"""Which tile a product is computed in: by its weight, and in bfloat16 by the number of rows, too.

In bfloat16 all of these tiles have the same bits: a program sums over all inputs in order, and
tensor cores add them in steps that no tile changes. That is so on the one card that was tried, and
`check` finds out on the card at hand. In float32 nobody tried, so there is one tile.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a product: rows and outputs of a program, inputs that are summed at a time.

    outputs_first: see `linear_kernel`. num_warps, num_stages: of threads, and of tiles that are on
    their way from memory.
    """

    rows: int
    outputs: int
    inputs: int
    outputs_first: bool = False
    num_warps: int = 4
    num_stages: int = 3

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int]:
        """The programs of a product."""
        return -(-num_rows // self.rows), -(-num_outputs // self.outputs)

    def within(self, shared_memory: int, num_bytes: int) -> "Tile":
        """With fewer stages if it would not fit a program's shared memory, in bytes.

        num_bytes: of an input. Cards with tensor cores that read from this memory keep a tile for
        each stage, others for all but one; the former have room for all tiles here.
        """
        size = (self.rows + self.outputs) * self.inputs * num_bytes
        return replace(self, num_stages=min(self.num_stages, max(2, 1 + shared_memory // size)))


ONE = {
    torch.bfloat16: Tile(rows=32, outputs=64, inputs=64),
    torch.float32: Tile(rows=16, outputs=64, inputs=32),
}
"""For any number of rows."""
BY_ROWS = {
    torch.bfloat16: (
        (16, (Tile(16, 128, 128, True, 4, 3), Tile(16, 64, 128, True, 4, 6))),
        (64, (Tile(64, 128, 64, False, 4, 4), Tile(32, 64, 128, True, 4, 4))),
        (
            None,
            (
                Tile(128, 128, 64, False, 8, 4),
                Tile(64, 128, 64, False, 4, 4),
                Tile(64, 64, 64, False, 4, 5),
            ),
        ),
    )
}
"""Up to so many rows these tiles, the largest first: the first one that keeps a card busy."""
BUSY = 96
"""Programs that keep a card of 132 processors busy. With fewer, smaller tiles were faster."""
SHORT = 64
"""Inputs of a tile where a weight's inputs are no multiple of the tile's."""
SMALLEST_SHARED = 99 * 1024
"""Bytes of shared memory that every card since 2020 gives a program."""


class Tiles:
    """The tiles of a precision on a device."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, *, one: bool = False
    ) -> None:
        """one: the same for any number of rows."""
        self._one = ONE[dtype]
        by_rows = () if one else BY_ROWS.get(dtype, ())
        memory = _shared_memory(device) if by_rows else 0
        self._by_rows = tuple(
            (most_rows, tuple(tile.within(memory, dtype.itemsize) for tile in tiles))
            for most_rows, tiles in by_rows
        )

    @property
    def are_many(self) -> bool:
        """Whether the number of rows counts."""
        return bool(self._by_rows)

    def tile(self, num_rows: int, num_outputs: int, num_inputs: int) -> Tile:
        """Of a product of rows with a weight."""
        for most_rows, tiles in self._by_rows:
            if most_rows is None or num_rows <= most_rows:
                grids = ((tile, tile.grid(num_rows, num_outputs)) for tile in tiles)
                own = next((tile for tile, (m, n) in grids if m * n >= BUSY), tiles[-1])
                return own if num_inputs % own.inputs == 0 else replace(own, inputs=SHORT)
        return self._one


def _shared_memory(device: torch.device | str) -> int:
    """Bytes that a program may have."""
    if torch.device(device).type != "cuda":
        return SMALLEST_SHARED
    properties = torch.cuda.get_device_properties(device)
    found: int = getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED)
    return found
