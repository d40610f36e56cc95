"""Recurrent mixers by a kernel: what transformers' own steps give, and exact.

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

from blockdraft.cache import state_layer as state_layer_module
from blockdraft.cache.pages import Pages
from blockdraft.cache.state_layer import StateLayer
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.recurrence import NativeRecurrence
from blockdraft.kernels.recurrence_interface import (
    Convolution,
    Recurrence,
    RecurrentInputs,
    RecurrentState,
)
from blockdraft.models.layers import kernel_mixers
from blockdraft.models.layers.kernel_mixers import KernelMixer, kernel_mixer
from blockdraft.models.layers.mixer_kinds import MIXER_KINDS
from blockdraft.models.layers.recurrent import (
    StepByStep,
    cache_argument,
    copies_states,
    mixers,
    new_cache,
)
from blockdraft.models.target.sequential import SequentialTarget
from tests.parity.test_architectures import RECURRENT, build
from tests.parity.test_recurrent_pages import AMPLE, FEW, alone, together
from tests.parity.test_recurrent_pages import KINDS as PAGED_KINDS

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

KINDS = (*PAGED_KINDS, "Mamba2", "Zamba2")
ONE_OF_EACH = ("Qwen3_5", "GraniteMoeHybrid", "Lfm2")
"""A delta rule, a scan, a convolution alone."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "Bamba with groups and limits": (
        "Bamba",
        {"mamba_n_groups": 2, "time_step_limit": (0.05, 0.3), "mamba_conv_bias": False},
    ),
    "NemotronH with limits": ("NemotronH", {"time_step_min": 0.5, "n_groups": 4}),
    "FalconH1 with a norm behind its gate": (
        "FalconH1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
    "FalconH1 with a norm before its gate": (
        "FalconH1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 2},
    ),
    "FalconH1 with multipliers": (
        "FalconH1",
        {"ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9]},
    ),
    "Lfm2 with biases": ("Lfm2", {"conv_bias": True, "conv_L_cache": 4}),
}
"""Other forms that mixers of one class take."""
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
    assert names == {name.rpartition(".")[2] for name in MIXER_KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_mixers_step_by_a_kernel_or_all_in_torch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forms(kind) == forms(kind, torch.bfloat16) == {KernelMixer}
    assert forms(kind, torch.float64) == {StepByStep}
    monkeypatch.setattr("blockdraft.kernels.cpu.backend.library", lambda: None)
    assert forms(kind) == {StepByStep}


def outputs_of(model: Any, mixer: Any, form: Any, hidden: Tensor) -> tuple[Tensor, StateLayer]:
    cache = new_cache(model)
    cache.expect(hidden.shape[1])
    output = form(hidden, **{cache_argument(mixer): cache})
    return output, cache.layers[mixer.layer_idx]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_a_kernel_gives_what_single_steps_give(name: str, dtype: torch.dtype) -> None:
    kind, options = VARIANTS[name]
    model = build(kind, {**RECURRENT[kind], **options}, dtype)
    for mixer in mixers(model):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, NUM_TOKENS, 64, generator=generator).to(dtype)
        by_kernel = kernel_mixer(mixer)
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
        matrices = by_kernel.step.matrices(state)
        assert (matrices is None) == (own.recurrent_states[0] is None)
        if matrices is None:
            kept = own.conv_states[0][0].T[1:]
            torch.testing.assert_close(state.inputs, kept, rtol=0, atol=0)
            continue
        own_matrices = own.recurrent_states[0][0]
        assert own_matrices.abs().max() > 0.01
        torch.testing.assert_close(
            matrices, own_matrices, rtol=0, atol=allowed * float(own_matrices.abs().max())
        )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("num_pages", [AMPLE, FEW])
@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_nobody_reads_what_was_given_back(kind: str, num_pages: int) -> None:
    with spoiled_room():
        batched = together(kind, Pages(num_pages), max_tokens=60, chunk=64)
    assert batched.answers == alone(kind, 60)


def gates_of_the_neighbor() -> AbstractContextManager[object]:
    """Beside other sequences a row decays, writes and opens by the gates of the row before it."""
    real = kernel_mixers._Steps.run

    def turned(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.roll(1, 0)

    def run(steps: Any) -> Tensor:
        if len({id(layer) for layer, _ in steps._reached}) > 1:
            own = steps._inputs
            gates = {name: turned(getattr(own, name)) for name in ("gate", "decay", "write")}
            steps._inputs = replace(own, **gates)
        return real(steps)

    return patch.object(kernel_mixers._Steps, "run", run)


def accepted_rows_do_not_step_again() -> AbstractContextManager[object]:
    """A rejection goes back to the anchor's state, and counts the accepted tokens all the same."""

    def step_again(layer: StateLayer, length: int) -> None:
        layer._take(layer._copies[layer._sure], length)

    return patch.object(StateLayer, "_step_again", step_again)


def other_rows_step_again() -> AbstractContextManager[object]:
    """What is kept of the candidates are the inputs of the rows before them."""
    real = RecurrentInputs.copied

    def copied(inputs: RecurrentInputs, first: int, end: int) -> RecurrentInputs:
        return real(inputs, first - 1, end - 1)

    return patch.object(RecurrentInputs, "copied", copied)


def rejected_rows_step_again_too() -> AbstractContextManager[object]:
    """One token too many steps again."""
    real = StateLayer._step_again

    def step_again(layer: StateLayer, length: int) -> None:
        real(layer, min(length + 1, layer._sure + sum(num for num, _ in layer._again)))
        layer.num_steps = length

    return patch.object(StateLayer, "_step_again", step_again)


def accepted_rows_step_again_from_another_state() -> AbstractContextManager[object]:
    """They step behind the rejected ones instead of behind the anchor."""
    real = StateLayer._step_again

    def step_again(layer: StateLayer, length: int) -> None:
        layer._copies[layer._sure] = layer._present()
        real(layer, length)

    return patch.object(StateLayer, "_step_again", step_again)


def spoiled_room() -> AbstractContextManager[object]:
    """What is given back is no number from then on, so that whoever still reads it is found."""
    real = NativeRecurrence.take_back

    def take_back(step: NativeRecurrence, state: RecurrentState) -> None:
        if state.matrices is not None:
            state.matrices.fill_(torch.nan)
        state.inputs.fill_(torch.nan)
        real(step, state)

    return patch.object(NativeRecurrence, "take_back", take_back)


@contextmanager
def states_of_others_are_written_over() -> Iterator[None]:
    """What others hold behind a page is the very room that a layer gives back."""
    with (
        spoiled_room(),
        patch.object(state_layer_module, "_copied_state", state_layer_module._shared),
    ):
        yield


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "fault",
    [
        gates_of_the_neighbor,
        accepted_rows_do_not_step_again,
        other_rows_step_again,
        rejected_rows_step_again_too,
        accepted_rows_step_again_from_another_state,
        states_of_others_are_written_over,
    ],
)
@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_the_equality_check_finds(
    kind: str,
    fault: Callable[[], AbstractContextManager[object]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where two hold one room, the kernel refuses to write it twice."""
    expected = alone(kind)
    with fault(), pytest.raises((AssertionError, RuntimeError)):
        assert together(kind, Pages(AMPLE)).answers == expected
    assert "keeps torch's steps" not in caplog.text  # which would have other bits too


@pytest.mark.parametrize(
    ("kind", "part", "dtype"),
    [
        ("Qwen3_5", {"write_scale": 1.01}, torch.float32),
        ("Qwen3_5", {"write_scale": 1.01}, torch.bfloat16),
        ("GraniteMoeHybrid", {"gates_first": False}, torch.float32),
        ("GraniteMoeHybrid", {"gates_first": False}, torch.bfloat16),
        ("GraniteMoeHybrid", {"start_limits": (0.9, 1.0)}, torch.float32),
        ("Lfm2", {"convolution": Convolution(torch.ones(64, 3), None)}, torch.float32),
    ],
)
def test_a_kernel_that_computes_something_else_is_left_out(
    kind: str,
    part: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mixer = type(mixers(build(kind, RECURRENT[kind]))[0])
    name = f"{mixer.__module__}.{mixer.__qualname__}"
    own = MIXER_KINDS[name]

    def rule(mixer: Any) -> Recurrence:
        changed: Recurrence = replace(own.rule(mixer), **part)
        return changed

    monkeypatch.setitem(MIXER_KINDS, name, replace(own, rule=rule))
    assert forms(kind, dtype) == {StepByStep}
    assert "it keeps torch's steps" in caplog.text


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("Qwen3_5", "activation", "gelu"),
        ("Qwen3_5", "A_log", None),
        ("Qwen3_5", "num_k_heads", 3),
        ("GraniteMoeHybrid", "activation", "gelu"),
        ("GraniteMoeHybrid", "D", None),
        ("GraniteMoeHybrid", "n_groups", 3),
        ("Lfm2", "conv", None),
    ],
)
def test_other_activations_and_parts_are_left_to_torch(kind: str, name: str, other: Any) -> None:
    mixer: Any = mixers(build(kind, RECURRENT[kind], torch.float32))[0]
    assert kernel_mixer(mixer) is not None
    setattr(mixer, name, other)
    assert kernel_mixer(mixer) is None


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_mixer_with_a_hook_is_left_to_torch(kind: str) -> None:
    mixer: Any = mixers(build(kind, RECURRENT[kind], torch.float32))[0]
    mixer.register_forward_hook(lambda *_: None)
    assert kernel_mixer(mixer) is None


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@torch.inference_mode()
def test_going_back_twice_leaves_the_state_of_the_tokens_that_stay(kind: str) -> None:
    """From tokens of several calls, and after some of them were replaced by others."""
    model = build(kind, RECURRENT[kind], torch.float32)
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
                found, right = (
                    getattr(state, part) for state in (layer.value(), expected[length - 2])
                )
                is_same = right is None if found is None else torch.equal(found, right)
                assert is_same, length
        cache.truncate(0)
        assert layer.value() is None
        cache.may_return(0)
        with pytest.raises(AssertionError, match="no state after 3 tokens was kept"):
            layer.go_back(3)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@torch.inference_mode()
def test_states_keep_no_more_room_than_they_need(kind: str) -> None:
    """A layer gives back what may not return any more, and that goes to its next states."""
    model = build(kind, RECURRENT[kind], torch.float32)
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
            rooms.add(layer.conv_states[0].data_ptr())
        assert len(step._spare) <= 3
        assert len(rooms) <= 4
