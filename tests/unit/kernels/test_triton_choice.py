"""When a card computes with Triton kernels. No card is needed, nor Triton."""

import sys
from types import SimpleNamespace

import pytest
import torch

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ModelError
from blockdraft.engine import load
from blockdraft.kernels import backends
from blockdraft.kernels.cuda import choice
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.measure.identity import describe_setup
from blockdraft.models.target.exact import RowsDepend

FLOAT32 = torch.float32


class Kernels(TorchBackend):
    """Stands for the backend of a card; knows heads of 64 only."""

    known = frozenset({FLOAT32, torch.bfloat16})

    def __init__(self, dtype: torch.dtype, device: object, *, one_tile: bool = False) -> None:
        super().__init__(dtype)
        self.has_many_tiles = dtype == torch.bfloat16 and not one_tile

    def attends_over(self, head_dim: int) -> bool:
        return head_dim == 64


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """A machine that has Triton, and kernels whose check finds what `fault` says."""
    monkeypatch.setattr(choice, "_choices", {})
    monkeypatch.delenv(choice.SWITCH, raising=False)
    own = SimpleNamespace(fault=None, many_fail=False, num_checks=0)

    def first_fault(backend: Kernels, *arguments: object) -> str | None:
        own.num_checks += 1
        if backend.has_many_tiles and own.many_fail:
            raise RuntimeError("OutOfResources: shared memory")
        if isinstance(own.fault, Exception):
            raise own.fault
        return own.fault

    modules = {"backend": {"TritonBackend": Kernels}, "check": {"first_fault": first_fault}}
    for name, members in modules.items():
        fake = SimpleNamespace(**members)
        monkeypatch.setitem(sys.modules, f"blockdraft.kernels.cuda.{name}", fake)
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    return own


def kind(dtype: torch.dtype = FLOAT32, *head_dims: int) -> type:
    return type(backends.backend_for(dtype, "cuda", head_dims))


def test_kernels_that_pass_their_check_are_used(card):
    assert kind() is kind(FLOAT32, 64) is Kernels
    assert kind(FLOAT32, 64, 80) is TorchBackend
    assert kind(torch.float64) is TorchBackend
    assert card.num_checks == 1
    assert backends.card_kernels(FLOAT32, "cuda") == (True, "")
    assert backends.card_kernels(FLOAT32, "cuda", [64]) == (True, "")
    # The whole model computes without them then.
    said = "no attention over heads of 80, see the log"
    assert backends.card_kernels(FLOAT32, "cuda", [80]) == (False, said)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("a norm differs", "a norm differs"), (OSError("no ptxas\nhere"), "OSError: no ptxas")],
)
def test_kernels_that_fail_it_are_not(card, caplog, fault, said):
    card.fault = fault
    assert kind() is TorchBackend
    assert backends.card_kernels(FLOAT32, "cuda") == (False, said)
    assert said in caplog.text
    assert kind() is TorchBackend
    assert card.num_checks == 1


@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16])
def test_a_card_that_is_full_decides_nothing(card, dtype):
    """Another program may have its memory; kernels that were never at fault are used later."""
    card.fault = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
    with pytest.raises(torch.OutOfMemoryError):
        kind(dtype)
    card.fault = None
    backend = backends.backend_for(dtype, "cuda")
    assert type(backend) is Kernels
    assert backend.has_many_tiles == (dtype == torch.bfloat16)


def test_where_many_tiles_fail_there_is_one(card, caplog):
    card.many_fail = True
    backend = backends.backend_for(torch.bfloat16, "cuda")
    assert type(backend) is Kernels
    assert not backend.has_many_tiles
    assert "one tile for any number of rows on cuda: RuntimeError: OutOfResources" in caplog.text
    assert backends.card_kernels(torch.bfloat16, "cuda") == (True, "")
    assert card.num_checks == 2


def test_where_one_tile_fails_too_there_is_none(card):
    card.fault = "a norm differs"
    assert kind(torch.bfloat16) is TorchBackend
    assert backends.card_kernels(torch.bfloat16, "cuda") == (False, "a norm differs")
    assert card.num_checks == 2


def test_without_triton_cards_use_torch(monkeypatch, caplog):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert kind() is TorchBackend
    assert backends.card_kernels(FLOAT32, "cuda") == (False, "triton is not installed")
    assert caplog.messages == ["no Triton kernels on cuda: triton is not installed"]


def test_the_switch_leaves_them_out(monkeypatch):
    assert kind() is Kernels
    monkeypatch.setenv(choice.SWITCH, "off")
    assert kind() is TorchBackend
    assert not backends.failed_load(FLOAT32, "other bits")


def test_they_are_a_part_of_what_a_text_depends_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    loaded = SimpleNamespace(config=LLMConfig(), dtype=FLOAT32, device="cuda", num_threads=1)
    found = describe_setup(loaded)
    monkeypatch.setenv(choice.SWITCH, "off")
    assert describe_setup(loaded) == {**found, "triton": False} != found
    loaded.device = "cpu"
    assert describe_setup(loaded)["triton"] is None


def test_a_model_that_fails_is_loaded_once_more(monkeypatch):
    used = []

    def load_model(*, in_pages):
        used.append(kind())
        if used[-1] is Kernels:
            raise RowsDepend("logits change")
        return "an engine"

    assert load._with_kernels_if_exact(load_model, FLOAT32, in_pages=True) == "an engine"
    assert used == [Kernels, TorchBackend]
    assert backends.card_kernels(FLOAT32, "cuda") == (False, "logits change")


@pytest.mark.parametrize("error", [RowsDepend("logits change"), ModelError("no such folder")])
def test_what_another_backend_would_not_help_is_raised(monkeypatch, error):
    """No other backend is left, or the error is none of the kernels'."""
    if isinstance(error, RowsDepend):
        monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert kind() in (Kernels, TorchBackend)
    calls = []

    def load_model(*, in_pages: bool) -> None:
        calls.append(in_pages)
        raise error

    with pytest.raises(type(error)):
        load._with_kernels_if_exact(load_model, FLOAT32, in_pages=True)
    assert len(calls) == 1


def test_nothing_changes_under_a_model_that_runs():
    assert kind() is Kernels
    backends.passed_load(FLOAT32)
    assert not backends.failed_load(FLOAT32, "another model's logits change")
    assert kind() is Kernels
