"""What torch may do on a card is settled before it computes. No card is needed: they are flags."""

import pytest
import torch

from blockdraft.kernels.torch.cards import products_on_cards, settle_cards
from blockdraft.models.target.loading import settle_device

OLD, NEW = torch.backends.cuda.matmul, torch.backends.cudnn
SETTLED = {"float32": ["ieee"] * 3, "reduced_sums": [False] * 3, "by_time": [False, False]}
ASKED = {
    "an old name": lambda: setattr(OLD, "allow_tf32", True),
    "a precision": lambda: torch.set_float32_matmul_precision("medium"),
    "a new name": lambda: setattr(OLD, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(NEW.conv, "fp32_precision", "tf32"),
    "all of torch": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "reduced sums": lambda: setattr(OLD, "allow_bf16_reduced_precision_reduction", True),
    "the fastest": lambda: setattr(NEW, "benchmark", True),
}


@pytest.fixture(autouse=True)
def flags():
    yield
    torch.backends.fp32_precision = "none"
    settle_cards()


@pytest.mark.parametrize("asked", ASKED)
def test_no_program_makes_products_coarser(asked):
    ASKED[asked]()
    settle_device("cpu")  # nothing of a CPU's concern
    before = products_on_cards()
    settle_device("cuda:1")
    found = products_on_cards()
    assert {name: found[name] for name in SETTLED} == SETTLED
    assert asked == "all of torch" or before != found
    # Both names can still be read, which other packages do.
    assert not OLD.allow_tf32
    assert not NEW.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
