"""What the Triton kernels are asked on a card has an answer there."""

import torch
from torch import Tensor

from blockdraft.kernels.cuda import check
from blockdraft.kernels.interface import Scoring
from blockdraft.kernels.torch.backend import TorchBackend


def test_each_row_sees_a_key() -> None:
    """On a card torch's attention over no key is no number; on a CPU it is zero."""
    seen = list[Tensor]()

    class Seeing(TorchBackend):
        def attend(
            self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
        ) -> Tensor:
            assert bias is not None
            seen.append((bias > -torch.inf).any(-1))
            return query

    every_row = torch.arange(max(check.NUMS_ROWS))
    for _, compute in check._attentions(torch.float32, "cpu", 24):
        compute(Seeing(torch.float32), every_row)
    assert len(seen) == 4
    assert all(bool(rows.all()) for rows in seen)
