"""When a card computes with Triton kernels. No card is needed, nor Triton."""

import gc
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ModelError
from blockdraft.engine import load
from blockdraft.engine.start_key import start_key
from blockdraft.kernels import backends
from blockdraft.kernels.cuda import choice
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.measure.identity import describe_card, describe_setup
from blockdraft.models.target.exact import RowsDepend
from tests.tiny import tiny_target_folder

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
    monkeypatch.setattr(choice, "version", lambda name: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return own


def properties(device: str) -> SimpleNamespace:
    """Two kinds of cards in one machine."""
    name, processors = ("another", 78) if torch.device(device).index == 1 else ("a card", 132)
    return SimpleNamespace(name=name, major=9, minor=0, multi_processor_count=processors)


def loaded_on(*devices: str, dtype: torch.dtype = FLOAT32, head_dims=(64,)) -> SimpleNamespace:
    """A target whose layers lie there."""
    return SimpleNamespace(
        config=LLMConfig(), dtype=dtype, device=devices[0], devices=devices, head_dims=head_dims,
        num_threads=1,
    )  # fmt: skip


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
    assert "no Triton kernels on cuda: triton is not installed; install it" in caplog.text


def test_the_switch_leaves_them_out(monkeypatch):
    assert kind() is Kernels
    monkeypatch.setenv(choice.SWITCH, "off")
    assert kind() is TorchBackend
    assert not backends.failed_load(FLOAT32, "cuda", "other bits")


def test_they_are_a_part_of_what_a_text_depends_on(monkeypatch):
    loaded = loaded_on("cuda")
    found = describe_setup(loaded)
    assert found["gpu"] == "a card, compute capability 9.0, 132 processors"
    with monkeypatch.context() as patch:
        patch.setenv(choice.SWITCH, "off")
        assert describe_setup(loaded) == {**found, "triton": False} != found
    loaded.devices = ["cpu"]
    assert describe_setup(loaded)["gpu"] is describe_setup(loaded)["triton"] is None
    for changed in (loaded_on("cuda:1"), loaded_on("cuda", head_dims=[80])):
        assert describe_card(changed) != describe_card(loaded_on("cuda"))


def test_which_tiles_run_is_a_part_of_it_too(card):
    loaded = loaded_on("cuda", dtype=torch.bfloat16)
    by_rows = describe_card(loaded)
    choice._choices.clear()
    card.many_fail = True
    assert describe_card(loaded) == {**by_rows, "triton": "3.6.0, one tile"} != by_rows


def test_a_spread_model_names_all_of_its_cards():
    found = describe_card(loaded_on("cuda:0", "cuda:1", "cuda:2"))
    kinds = "a card, compute capability 9.0, 132 processors; another, compute capability 9.0, 78 "
    assert found["gpu"] == kinds + "processors"


@pytest.mark.parametrize("changed", ["kernels", "card", "rounding"])
def test_what_one_card_has_passed_counts_for_its_kernels_alone(
    changed, card, tmp_path, monkeypatch
):
    folder = tiny_target_folder(tmp_path, head_dim=64)

    def key_of(device: str) -> dict[str, object]:
        return start_key(LLMConfig(), folder, None, FLOAT32, device)

    before = key_of("cuda:0")
    assert before == key_of("cuda:0")
    assert before["card"]["triton"]
    if changed == "kernels":  # a compiler that was there is gone
        choice._choices.clear()
        card.fault = RuntimeError("Failed to find C compiler")
    elif changed == "rounding":
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    now = key_of("cuda:1" if changed == "card" else "cuda:0")
    assert now["card"] != before["card"]
    assert key_of("cpu")["card"] is None


def test_a_model_that_fails_is_loaded_once_more(monkeypatch):
    used = []

    def load_model(*, in_pages):
        used.append(kind())
        if used[-1] is Kernels:
            raise RowsDepend("logits change")
        return "an engine"

    assert load._with_kernels_if_exact(load_model, FLOAT32, "cuda", in_pages=True) == "an engine"
    assert used == [Kernels, TorchBackend]
    assert backends.card_kernels(FLOAT32, "cuda") == (False, "logits change")


class Model:
    """Holds itself, as an engine does."""

    def __init__(self) -> None:
        self.itself = self


def test_the_model_that_failed_is_freed_before_the_next_is_loaded(monkeypatch):
    """A card may have no room for two."""
    loaded: list[weakref.ref[Model]] = []
    gc.disable()

    def load_model(*, in_pages):
        assert [model() for model in loaded] == [None] * len(loaded)
        loaded.append(weakref.ref(Model()))
        if kind() is Kernels:
            raise RowsDepend("logits change")
        if in_pages:
            raise load.StatesDepend("states change")
        return "an engine"

    try:
        with_kernels = partial(load._with_kernels_if_exact, load_model, FLOAT32, "cuda")
        assert load._in_pages_if_exact(with_kernels) == "an engine"
    finally:
        gc.enable()
    assert len(loaded) == 3


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
        load._with_kernels_if_exact(load_model, FLOAT32, "cuda", in_pages=True)
    assert len(calls) == 1


def test_nothing_changes_under_a_model_that_runs():
    assert kind() is Kernels
    backends.passed_load(FLOAT32, "cuda")
    assert not backends.failed_load(FLOAT32, "cuda", "another model's logits change")
    assert kind() is Kernels


def test_each_card_of_a_machine_is_checked(card):
    """Two kinds of them may have other tiles, and one may fail where the other passes."""
    assert [type(backends.backend_for(FLOAT32, f"cuda:{n}")) for n in (0, 0)] == [Kernels] * 2
    card.fault = "a norm differs"
    assert type(backends.backend_for(FLOAT32, "cuda:1")) is TorchBackend
    assert card.num_checks == 2
    assert type(backends.backend_for(FLOAT32, "cuda:0")) is Kernels
    assert backends.card_kernels(FLOAT32, "cuda:1") == (False, "a norm differs")


def test_a_model_that_fails_changes_its_own_card_only():
    for device in ("cuda:0", "cuda:1"):
        backends.backend_for(FLOAT32, device)
    assert backends.failed_load(FLOAT32, "cuda:1", "logits change")
    assert backends.card_kernels(FLOAT32, "cuda:0") == (True, "")
    assert not backends.failed_load(FLOAT32, "cuda:1", "logits change")
    # A model on several cards: those that others rely on stay.
    backends.passed_load(FLOAT32, "cuda:0")
    backends.backend_for(FLOAT32, "cuda:2")
    assert backends.failed_load(FLOAT32, None, "logits change")
    assert [backends.card_kernels(FLOAT32, f"cuda:{n}")[0] for n in range(3)] == [
        True,
        False,
        False,
    ]
