"""Recurrences by kernels: what they say, for each row alone, wherever rows are cut."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.cpu.recurrence import NativeRecurrence
from blockdraft.kernels.recurrence_interface import (
    Recurrence,
    RecurrentInputs,
    RecurrentSpan,
    RecurrentState,
)
from tests.recurrences import (
    NUM_ROWS,
    ConvolutionShape,
    DeltaShape,
    ScanShape,
    Shape,
)
from tests.tensors import draw
from tests.torch_threads import threads

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

DTYPES = [torch.float32, torch.bfloat16]
DELTA = DeltaShape((2, 4), 16, 16)
SCAN = ScanShape((2, 4), 16, 16)
CONVOLUTION = ConvolutionShape(64)
DELTAS = [
    DELTA,
    DeltaShape((1, 1), 1, 1, taps=1),
    DeltaShape((2, 6), 13, 7, taps=2, has_bias=True),
    DeltaShape((3, 3), 33, 65, by_key=True, rounds_first=False, gate_is_sigmoid=True),
    DeltaShape((1, 2), 128, 128, write_scale=2.0),
    DeltaShape((4, 4), 64, 40, taps=8, by_key=True, has_bias=True),
    DeltaShape((1, 3), 256, 31, taps=3, gate_is_sigmoid=True),
]
SCANS = [
    SCAN,
    ScanShape((1, 1), 1, 1, taps=1),
    ScanShape((2, 6), 13, 7, taps=2, has_bias=False, start_limits=(0.1, 0.3)),
    ScanShape((1, 3), 33, 65, norm_groups=0),
    ScanShape((1, 2), 128, 64, rounds_first=False, start_limits=(0.01, float("inf"))),
    ScanShape((4, 4), 256, 40, taps=8, norm_groups=4, rounds_first=False, gates_first=False),
    ScanShape((3, 9), 64, 31, norm_groups=3),
]
CONVOLUTIONS = [
    CONVOLUTION,
    ConvolutionShape(1, taps=1),
    ConvolutionShape(277, taps=4, has_bias=True),
    ConvolutionShape(33, taps=8),
]
SHAPES = [*DELTAS, *SCANS, *CONVOLUTIONS]
KINDS = [DELTA, SCAN, CONVOLUTION]


def step_of(shape: Shape, dtype: torch.dtype = torch.float32) -> NativeRecurrence:
    step = backend_for(dtype, "cpu").recurrent_step(shape.rule(dtype))
    assert isinstance(step, NativeRecurrence)
    return step


def run(
    step: NativeRecurrence,
    inputs: RecurrentInputs,
    *lengths: int,
    before: RecurrentState | None = None,
) -> tuple[Tensor, list[RecurrentState]]:
    """Rows of one sequence in spans; what they read, and the state behind each span."""
    spans: list[RecurrentSpan] = []
    for num_rows in lengths:
        spans.append(RecurrentSpan(num_rows, before, step.new_state()))
        before = spans[-1].after
    read = step(inputs, spans)
    assert read is not None
    return read, [span.after for span in spans]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_follows_its_definition(shape: Shape, dtype: torch.dtype) -> None:
    inputs, step = shape.inputs(dtype), step_of(shape, dtype)
    read, (state,) = run(step, inputs, NUM_ROWS)
    expected, expected_matrices = shape.by_definition(dtype)
    # In bfloat16 a value at the middle between two may be rounded to the other one.
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    assert error(read, expected) < allowed
    matrices = step.matrices(state)
    assert (matrices is None) == (expected_matrices is None)
    if matrices is not None and expected_matrices is not None:
        assert error(matrices, expected_matrices) < allowed
    assert torch.equal(state.inputs, inputs.channels[NUM_ROWS - shape.taps + 1 :])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [(1,) * NUM_ROWS, (1, 2, 20), (16, 7)], ids=str)
def test_where_rows_are_cut_changes_no_bit(
    shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    """In spans of one call, in calls of their own, and on several threads."""
    inputs, step = shape.inputs(dtype), step_of(shape, dtype)
    with threads(1):
        expected, (end,) = run(step, inputs, NUM_ROWS)
    with threads(3):
        read, states = run(step, inputs, *lengths)
    assert torch.equal(read, expected)
    check_equal(states[-1], end)
    state: RecurrentState | None = None
    starts = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    for index, (start, stop) in enumerate(pairwise(starts)):
        own = inputs.copied(start, stop)
        read, (state,) = run(step, own, stop - start, before=state)
        assert torch.equal(read, expected[start:stop])
        check_equal(state, states[index])
    assert state is not None


def check_equal(found: RecurrentState, expected: RecurrentState) -> None:
    assert torch.equal(found.inputs, expected.inputs)
    assert (found.matrices is None) == (expected.matrices is None)
    if found.matrices is not None and expected.matrices is not None:
        assert torch.equal(found.matrices, expected.matrices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [DELTAS[2], SCANS[2], CONVOLUTIONS[2]], ids=str)
def test_neighbors_change_no_bit(shape: Shape, dtype: torch.dtype) -> None:
    """Sequences side by side, new and old ones, and rows behind them that only fill up."""
    inputs, step = shape.inputs(dtype), step_of(shape, dtype)
    _, (old,) = run(step, inputs.copied(0, 5), 5)
    lengths, befores = (4, 1, 9), (None, old, None)
    spans = [
        RecurrentSpan(num_rows, before, step.new_state())
        for num_rows, before in zip(lengths, befores, strict=True)
    ]
    read = step(inputs, spans)
    assert read is not None
    first = 0
    for span in spans:
        own = inputs.copied(first, first + span.num_rows)
        alone, (state,) = run(step, own, span.num_rows, before=span.before)
        assert torch.equal(read[first : first + span.num_rows], alone)
        check_equal(span.after, state)
        first += span.num_rows
    assert not read[first:].any()


@pytest.mark.parametrize("shape", [DELTAS[3], SCANS[3], CONVOLUTIONS[3]], ids=str)
def test_rows_that_step_again_leave_the_same_state(shape: Shape) -> None:
    inputs, step = shape.inputs(torch.float32), step_of(shape)
    _, states = run(step, inputs, *(1,) * NUM_ROWS)
    for num_rows in (1, 2, 7):
        after = step.new_state()
        own = inputs.copied(5, 5 + 7)
        assert step(own, [RecurrentSpan(num_rows, states[4], after)], reads=False) is None
        check_equal(after, states[4 + num_rows])


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_what_is_no_number_stays_in_its_sequence(shape: Shape) -> None:
    inputs, step = shape.inputs(torch.float32), step_of(shape)
    expected, _ = run(step, inputs, NUM_ROWS)
    inputs.channels[:3] = torch.nan
    spans = [RecurrentSpan(num, None, step.new_state()) for num in (3, NUM_ROWS - 3)]
    read = step(inputs, spans)
    assert read is not None
    assert read[:3].isnan().all()
    assert not read[3:].isnan().any()
    alone, _ = run(step, inputs.copied(3, NUM_ROWS), NUM_ROWS - 3)
    assert torch.equal(read[3:], alone)
    assert expected.isfinite().all()


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_rows_with_gaps_are_read_where_they_lie(shape: Shape) -> None:
    inputs, step = shape.inputs(torch.float32), step_of(shape)
    expected, _ = run(step, inputs, NUM_ROWS)
    given = inputs.channels, inputs.gate, inputs.decay, inputs.write
    parts = [part for part in given if part is not None]
    sizes = [part.shape[1] for part in parts]
    views = RecurrentInputs(*torch.cat(parts, dim=1).split_with_sizes(sizes, dim=1))
    assert not views.gate.is_contiguous()
    assert torch.equal(run(step, views, NUM_ROWS)[0], expected)
    turned = replace(inputs, gate=inputs.gate.T.contiguous().T)
    assert torch.equal(run(step, turned, NUM_ROWS)[0], expected)


@pytest.mark.parametrize(
    "shape",
    [
        replace(DELTA, key_dim=257),
        replace(DELTA, taps=9),
        replace(DELTA, heads=(3, 4)),
        replace(SCAN, state_size=257),
        replace(SCAN, taps=9),
        replace(SCAN, heads=(3, 4)),
        replace(CONVOLUTION, taps=9),
    ],
    ids=str,
)
def test_other_sizes_are_left_to_torch(shape: Shape) -> None:
    assert backend_for(torch.float32, "cpu").recurrent_step(shape.rule(torch.float32)) is None


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_other_types_and_devices_are_left_to_torch(shape: Shape) -> None:
    rule = shape.rule(torch.float32)
    assert backend_for(torch.float64, "cpu").recurrent_step(rule) is None
    assert backend_for(torch.float32, "meta").recurrent_step(rule) is None


BAD: dict[str, tuple[Shape, dict[str, Any]]] = {
    "rows": (DELTA, {"write": draw(NUM_ROWS - 1, 4)}),
    "channels": (DELTA, {"channels": draw(NUM_ROWS, 127)}),
    "decays": (DELTA, {"decay": draw(NUM_ROWS, 5)}),
    "values": (DELTA, {"gate": draw(NUM_ROWS, 63)}),
    "type": (DELTA, {"gate": draw(NUM_ROWS, 64, dtype=torch.bfloat16)}),
    "dimensions": (DELTA, {"channels": draw(1, NUM_ROWS, 128)}),
    "device": (DELTA, {"channels": torch.empty(NUM_ROWS, 128, device="meta")}),
    "nothing written": (DELTA, {"write": None}),
    "something written": (SCAN, {"write": draw(NUM_ROWS, 4)}),
    "steps": (SCAN, {"decay": draw(NUM_ROWS, 3)}),
    "no steps": (SCAN, {"decay": None}),
    "a scan's channels": (SCAN, {"channels": draw(NUM_ROWS, 129)}),
    "a decay": (CONVOLUTION, {"decay": draw(NUM_ROWS, 1)}),
    "a convolution's gate": (CONVOLUTION, {"gate": draw(NUM_ROWS, 65)}),
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_that_do_not_fit_are_refused(name: str) -> None:
    shape, wrong = BAD[name]
    step, inputs = step_of(shape), shape.inputs(torch.float32)
    with pytest.raises(RuntimeError):
        run(step, replace(inputs, **wrong), NUM_ROWS)


@pytest.mark.parametrize("shape", KINDS, ids=str)
def test_states_and_spans_that_do_not_fit_are_refused(shape: Shape) -> None:
    step, inputs = step_of(shape), shape.inputs(torch.float32)
    good = step.new_state()
    bad = [
        replace(good, inputs=good.inputs[1:]),
        replace(good, inputs=good.inputs.bfloat16()),
        replace(good, inputs=good.inputs.T.contiguous().T),
    ]
    if good.matrices is None:
        bad.append(replace(good, matrices=torch.empty(1)))
    else:
        bad += [
            replace(good, matrices=None),
            replace(good, matrices=good.matrices[1:]),
            replace(good, matrices=good.matrices.double()),
            replace(good, matrices=good.matrices.mT),
        ]
    for state in bad:
        for before, after in ((state, good), (None, state)):
            with pytest.raises(RuntimeError):
                step(inputs, [RecurrentSpan(1, before, after)])
    same_inputs = replace(step.new_state(), inputs=good.inputs)
    for spans in (
        [],
        [RecurrentSpan(0, None, good)],
        [RecurrentSpan(-1, None, good)],
        [RecurrentSpan(NUM_ROWS + 1, None, good)],
        [RecurrentSpan(1, good, good)],
        [RecurrentSpan(1, None, good), RecurrentSpan(1, None, good)],
        [RecurrentSpan(1, None, good), RecurrentSpan(1, None, same_inputs)],
    ):
        with pytest.raises(RuntimeError):
            step(inputs, spans)


def other_parts() -> list[Recurrence]:
    """Recurrences with one part of another size."""
    delta, scan = DELTA.rule(torch.float32), SCAN.rule(torch.float32)
    convolution = CONVOLUTION.rule(torch.float32)
    assert scan.norm is not None
    changed: list[Recurrence] = [
        replace(rule, convolution=other)
        for rule in (delta, scan)
        for other in (
            replace(rule.convolution, weight=rule.convolution.weight[1:]),
            replace(rule.convolution, bias=draw(5)),
        )
    ]
    return [
        *changed,
        replace(convolution, convolution=replace(convolution.convolution, bias=draw(5))),
        replace(delta, decay_rates=delta.decay_rates[1:]),
        replace(delta, decay_biases=delta.decay_biases[1:]),
        replace(delta, norm=replace(delta.norm, weight=draw(3))),
        replace(scan, decay_rates=scan.decay_rates[1:]),
        replace(scan, step_biases=scan.step_biases[1:]),
        replace(scan, skips=scan.skips[1:]),
        replace(scan, norm=replace(scan.norm, weight=draw(3))),
        replace(scan, norm_groups=0),
        replace(scan, norm_groups=3),
    ]


def test_a_rule_whose_parts_do_not_fit_is_refused() -> None:
    kernels = library()
    assert kernels is not None
    for rule in other_parts():
        with pytest.raises(RuntimeError):
            NativeRecurrence(kernels, rule, torch.float32)


def test_only_the_first_step_of_a_sequence_has_limits() -> None:
    shape = replace(SCAN, start_limits=(0.5, 0.6))
    inputs = shape.inputs(torch.float32)
    free, limited = step_of(SCAN), step_of(shape)
    assert not torch.equal(run(free, inputs, 1)[0], run(limited, inputs, 1)[0])
    _, (state,) = run(limited, inputs, 3)
    rest = inputs.copied(3, NUM_ROWS)
    expected, _ = run(free, rest, NUM_ROWS - 3, before=state)
    assert torch.equal(run(limited, rest, NUM_ROWS - 3, before=state)[0], expected)
