"""Layers with a gated delta rule, by a kernel: what transformers' own steps give, and exact.

What drafting, chunks, neighbors, preemption and shared beginnings must not change is held against
lone plain decoding, as for all recurrent layers; see test_recurrent and test_recurrent_pages.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdraft.cache import states as states_module
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.cache.states import StateLayer
from blockdraft.kernels.cpu.delta import NativeDelta
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.interface import DeltaInputs, DeltaState
from blockdraft.models import delta_rule
from blockdraft.models.delta_rule import DELTA_KINDS, DeltaMixer, delta_mixer
from blockdraft.models.recurrent import StepByStep, copies_states, mixers, new_cache
from blockdraft.models.sequential import SequentialTarget
from tests.parity.test_architectures import RECURRENT, build
from tests.parity.test_recurrent_pages import AMPLE, FEW, alone, together

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

KINDS = ("KimiLinear", "OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
NUM_TOKENS = 40
"""Tokens of a mixer alone."""


def forms(kind: str, dtype: torch.dtype = torch.float32) -> set[type]:
    """How the mixers of a target step."""
    model = build(kind, RECURRENT[kind], dtype)
    found = mixers(model)
    with SequentialTarget(model).released_after():
        return {type(vars(mixer)["forward"]) for mixer in found}


def test_all_kinds_are_tried() -> None:
    names = {type(mixers(build(kind, RECURRENT[kind]))[0]).__name__ for kind in KINDS}
    assert names == {name.rpartition(".")[2] for name in DELTA_KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_mixers_step_by_a_kernel_or_all_in_torch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forms(kind) == {DeltaMixer}
    assert forms(kind, torch.float64) == {StepByStep}
    monkeypatch.setattr("blockdraft.kernels.cpu.backend.library", lambda: None)
    assert forms(kind) == {StepByStep}


def outputs_of(model: Any, mixer: Any, form: Any, hidden: Tensor) -> tuple[Tensor, StateLayer]:
    cache = new_cache(model)
    cache.expect(hidden.shape[1])
    return form(hidden, cache_params=cache), cache.layers[mixer.layer_idx]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_kernel_gives_what_single_steps_give(kind: str, dtype: torch.dtype) -> None:
    model = build(kind, RECURRENT[kind], dtype)
    for mixer in mixers(model):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, NUM_TOKENS, 64, generator=generator).to(dtype)
        by_kernel = delta_mixer(mixer)
        assert by_kernel is not None
        found, layer = outputs_of(model, mixer, by_kernel, hidden)
        with ExitStack() as undo:
            expected, own = outputs_of(model, mixer, StepByStep(mixer, undo), hidden)
        allowed = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            found, expected, rtol=0, atol=allowed * float(expected.abs().max())
        )
        state = layer.value()
        assert state is not None
        matrices, own_matrices = by_kernel.step.matrices(state), own.recurrent_states[0][0]
        assert own_matrices.abs().max() > 0.01
        torch.testing.assert_close(
            matrices, own_matrices, rtol=0, atol=allowed * float(own_matrices.abs().max())
        )


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_five_together_answer_as_alone(kind: str, chunk: int) -> None:
    pages = Pages(AMPLE)
    crowd = together(kind, pages, chunk=chunk)
    assert crowd.answers == alone(kind)
    assert pages.num_reused_tokens >= PAGE_SIZE
    drafted = sum(answer.acceptance.num_drafted for answer in crowd.answers)
    assert 0 < sum(answer.acceptance.num_accepted for answer in crowd.answers) < drafted


@pytest.mark.parametrize("num_pages", [AMPLE, FEW])
def test_nobody_reads_what_was_given_back(num_pages: int) -> None:
    with spoiled_room():
        crowd = together("Qwen3_5", Pages(num_pages), max_tokens=60, chunk=64)
    assert crowd.answers == alone("Qwen3_5", 60)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["KimiLinear", "Qwen3Next", "OlmoHybrid"])
def test_preempted_ones_answer_as_alone(kind: str) -> None:
    crowd = together(kind, Pages(FEW), max_tokens=60, chunk=64)
    assert crowd.engine.scheduler.num_preempted
    assert crowd.answers == alone(kind, 60)


@contextmanager
def gates_of_the_neighbor() -> Iterator[None]:
    """A row decays and writes by the gates of the row before it, where there is one."""
    real = delta_rule._Steps.__init__

    def init(steps: Any, step: Any, inputs: DeltaInputs) -> None:
        turned = replace(inputs, decay=inputs.decay.roll(1, 0), write=inputs.write.roll(1, 0))
        real(steps, step, turned)

    with patch.object(delta_rule._Steps, "__init__", init):
        yield


@contextmanager
def accepted_rows_do_not_step_again() -> Iterator[None]:
    """A rejection goes back to the anchor's state, and counts the accepted tokens all the same."""

    def step_again(layer: StateLayer, length: int) -> None:
        layer._take(layer._copies[layer._sure], length)

    with patch.object(StateLayer, "_step_again", step_again):
        yield


@contextmanager
def other_rows_step_again() -> Iterator[None]:
    """What is kept of the candidates are the inputs of the rows before them."""
    real = DeltaInputs.copied

    def copied(inputs: DeltaInputs, first: int, end: int) -> DeltaInputs:
        return real(inputs, first - 1, end - 1)

    with patch.object(DeltaInputs, "copied", copied):
        yield


@contextmanager
def rejected_rows_step_again_too() -> Iterator[None]:
    """One token too many steps again."""
    real = StateLayer._step_again

    def step_again(layer: StateLayer, length: int) -> None:
        real(layer, min(length + 1, layer._sure + sum(num for num, _ in layer._again)))
        layer.num_steps = length

    with patch.object(StateLayer, "_step_again", step_again):
        yield


@contextmanager
def spoiled_room() -> Iterator[None]:
    """What is given back is no number from then on, so that whoever still reads it is found."""
    real = NativeDelta.take_back

    def take_back(step: NativeDelta, state: DeltaState) -> None:
        state.matrices.fill_(torch.nan)
        state.inputs.fill_(torch.nan)
        real(step, state)

    with patch.object(NativeDelta, "take_back", take_back):
        yield


@contextmanager
def states_of_others_are_written_over() -> Iterator[None]:
    """What others hold behind a page is the very room that a layer gives back."""
    with spoiled_room(), patch.object(states_module, "_copied_state", states_module._shared):
        yield


@pytest.mark.parametrize(
    "fault",
    [
        gates_of_the_neighbor,
        accepted_rows_do_not_step_again,
        other_rows_step_again,
        rejected_rows_step_again_too,
        states_of_others_are_written_over,
    ],
)
def test_the_equality_check_finds(fault: Callable[[], AbstractContextManager[object]]) -> None:
    """Where two hold one room, the kernel refuses to write it twice."""
    expected = alone("Qwen3_5")
    with fault(), pytest.raises((AssertionError, RuntimeError)):
        assert together("Qwen3_5", Pages(AMPLE)).answers == expected
    assert together("Qwen3_5", Pages(AMPLE)).answers == expected


def test_a_kernel_that_computes_something_else_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = next(name for name in DELTA_KINDS if name.endswith("Qwen3_5GatedDeltaNet"))
    kind = DELTA_KINDS[name]
    wrong = replace(kind, rule=lambda mixer: replace(kind.rule(mixer), write_scale=1.01))
    monkeypatch.setitem(DELTA_KINDS, name, wrong)
    assert forms("Qwen3_5") == {StepByStep}
    assert "it keeps torch's steps" in caplog.text


def test_other_activations_and_parts_are_left_to_torch() -> None:
    mixer: Any = mixers(build("Qwen3_5", RECURRENT["Qwen3_5"], torch.float32))[0]
    assert delta_mixer(mixer) is not None
    for name, other in (("activation", "gelu"), ("A_log", None), ("num_k_heads", 3)):
        own = getattr(mixer, name)
        with patch.dict(vars(mixer)), patch.dict(mixer._parameters):
            setattr(mixer, name, other)
            assert delta_mixer(mixer) is None
        assert getattr(mixer, name) is own
    mixer.register_forward_hook(lambda *_: None)
    assert delta_mixer(mixer) is None


@torch.inference_mode()
def test_going_back_twice_leaves_the_state_of_the_tokens_that_stay() -> None:
    """From tokens of several calls, and after some of them were replaced by others."""
    model = build("Qwen3_5", RECURRENT["Qwen3_5"], torch.float32)
    mixer: Any = mixers(model)[0]
    with SequentialTarget(model).released_after() as target:
        expected = []
        for token_ids in ([1, 2], [1, 2, 3], [1, 2, 3, 7], [1, 2, 3, 7, 8]):
            cache = new_cache(model)
            target._run(cache, token_ids, 0)
            expected.append(cache.layers[mixer.layer_idx].value())
        cache = new_cache(model)
        layer = cache.layers[mixer.layer_idx]
        cache.may_return(2)
        target._run(cache, [1, 2, 3, 4], 0)
        target._run(cache, [5, 6], 0)
        cache.truncate(5)
        cache.truncate(3)
        target._run(cache, [7, 8, 9], 0)
        for length in (5, 4, 3, 2):
            cache.truncate(length)
            for part in ("inputs", "matrices"):
                found = getattr(layer.value(), part)
                assert torch.equal(found, getattr(expected[length - 2], part)), length
        cache.truncate(0)
        assert layer.value() is None
        cache.may_return(0)
        with pytest.raises(AssertionError, match="no state after 3 tokens was kept"):
            layer.go_back(3)


@torch.inference_mode()
def test_states_keep_no_more_room_than_they_need() -> None:
    """A layer gives back what may not return any more, and that goes to its next states."""
    model = build("Qwen3_5", RECURRENT["Qwen3_5"], torch.float32)
    mixer: Any = mixers(model)[0]
    with SequentialTarget(model).released_after() as target:
        assert not copies_states(model)
        step = vars(mixer)["forward"].step
        cache = new_cache(model)
        layer, rooms = cache.layers[mixer.layer_idx], set()
        for _ in range(8):  # an anchor and five candidates, of which two are kept
            cache.may_return(cache.length + 1)
            target._run(cache, [1, 2, 3, 4, 5, 6], 0)
            cache.truncate(cache.length - 3)
            rooms.add(layer.recurrent_states[0].data_ptr())
        assert len(step._spare) <= 3
        assert len(rooms) <= 4
