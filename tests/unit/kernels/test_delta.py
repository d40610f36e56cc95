"""The gated delta rule by kernels: what it says, for each row alone, wherever rows are cut."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.cpu.delta import NativeDelta
from blockdraft.kernels.cpu.library import library
from blockdraft.kernels.interface import (
    DeltaInputs,
    DeltaRule,
    DeltaSpan,
    DeltaState,
    Norm,
)
from tests.torch_threads import threads

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here")

DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = 23


@dataclass(frozen=True)
class Shape:
    """Of a rule. `by_key`: each of the keys' values decays by itself."""

    heads: tuple[int, int]
    key_dim: int
    value_dim: int
    taps: int = 4
    by_key: bool = False
    has_bias: bool = False
    write_scale: float = 1.0
    rounds_first: bool = True
    gate_is_sigmoid: bool = False


SHAPES = [
    Shape((2, 4), 16, 16),
    Shape((1, 1), 1, 1, taps=1),
    Shape((2, 6), 13, 7, taps=2, has_bias=True),
    Shape((3, 3), 33, 65, by_key=True, rounds_first=False, gate_is_sigmoid=True),
    Shape((1, 2), 128, 128, write_scale=2.0),
    Shape((4, 4), 64, 40, taps=8, by_key=True, has_bias=True),
    Shape((1, 3), 256, 31, taps=3, gate_is_sigmoid=True),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rule_of(shape: Shape, dtype: torch.dtype) -> DeltaRule:
    keys, values = (
        num * dim for num, dim in zip(shape.heads, (shape.key_dim, shape.value_dim), strict=True)
    )
    channels, num_heads = 2 * keys + values, shape.heads[1]
    biases = (num_heads, shape.key_dim) if shape.by_key else (num_heads,)
    return DeltaRule(
        convolution=draw(channels, shape.taps, dtype=dtype, seed=1),
        convolution_bias=draw(channels, dtype=dtype, seed=2) if shape.has_bias else None,
        num_heads=shape.heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        decay_rates=draw(num_heads, seed=3).exp(),
        decay_biases=draw(*biases, dtype=dtype, seed=4) - 2,
        write_scale=shape.write_scale,
        norm=Norm(1 + 0.1 * draw(shape.value_dim, dtype=dtype, seed=5), 1e-6, shape.rounds_first),
        gate_is_sigmoid=shape.gate_is_sigmoid,
    )


def inputs_of(rule: DeltaRule, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> DeltaInputs:
    """One decay is so large that its softplus is the number itself."""
    num_values = rule.num_heads[1] * rule.value_dim
    decay = draw(num_rows, rule.decay_biases.numel(), dtype=dtype, seed=7)
    decay[num_rows // 2, 0] = 30.0
    return DeltaInputs(
        draw(num_rows, rule.convolution.shape[0], dtype=dtype, seed=6),
        decay,
        draw(num_rows, rule.num_heads[1], dtype=dtype, seed=8),
        draw(num_rows, num_values, dtype=dtype, seed=9),
    )


def step_of(rule: DeltaRule, dtype: torch.dtype) -> NativeDelta:
    step = backend_for(dtype, "cpu").delta_step(rule)
    assert isinstance(step, NativeDelta)
    return step


def run(
    step: NativeDelta, inputs: DeltaInputs, *lengths: int, before: DeltaState | None = None
) -> tuple[Tensor, list[DeltaState]]:
    """Rows of one sequence in spans; what they read, and the state behind each span."""
    spans: list[DeltaSpan] = []
    for num_rows in lengths:
        spans.append(DeltaSpan(num_rows, before, step.new_state()))
        before = spans[-1].after
    read = step(inputs, spans)
    assert read is not None
    return read, [span.after for span in spans]


def by_definition(rule: DeltaRule, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """What rows read, and the matrices behind them, in float64, rounded where models round."""
    dtype = inputs.qkv.dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    (key_heads, num_heads), taps = rule.num_heads, rule.convolution.shape[1]
    rows = torch.cat((inputs.qkv.new_zeros(taps - 1, inputs.qkv.shape[1]), inputs.qkv)).double()
    bias = None if rule.convolution_bias is None else rule.convolution_bias.double()
    weight = rule.convolution.double()[:, None]
    sums = F.conv1d(rows.T[None], weight, bias, groups=rows.shape[1])[0].T
    convolved = rounded(F.silu(rounded(sums)))
    keys = key_heads * rule.key_dim
    query, key, value = convolved.split((keys, keys, convolved.shape[1] - 2 * keys), dim=-1)
    query, key = (
        part.unflatten(1, (key_heads, -1)).repeat_interleave(num_heads // key_heads, 1)
        for part in (query, key)
    )
    query, key = (part / (part.pow(2).sum(-1, True) + 1e-6).sqrt() for part in (query, key))
    value = value.unflatten(1, (num_heads, -1))
    raised = F.softplus(inputs.decay.double() + rule.decay_biases.double().flatten())
    rates = rule.decay_rates.double()[:, None]
    decay = (-rates * raised.unflatten(1, (num_heads, -1))).exp()
    write = rounded(inputs.write.double().sigmoid()) * rule.write_scale
    matrices = torch.zeros(num_heads, rule.key_dim, rule.value_dim, dtype=torch.float64)
    reads = []
    for row in range(inputs.qkv.shape[0]):
        matrices = matrices * decay[row, :, :, None]
        difference = value[row] - (matrices * key[row, :, :, None]).sum(1)
        written = difference * write[row, :, None]
        matrices = matrices + key[row, :, :, None] * written[:, None]
        reads.append((matrices * query[row, :, :, None]).sum(1) / rule.key_dim**0.5)
    read = rounded(torch.stack(reads))
    normed = read * (read.pow(2).mean(-1, True) + rule.norm.eps).rsqrt()
    if rule.norm.rounds_first:
        normed = rounded(rounded(normed) * rule.norm.weight.double())
    else:
        normed = normed * rule.norm.weight.double()
    gate = inputs.gate.double().unflatten(1, (num_heads, -1))
    opened = gate.sigmoid() if rule.gate_is_sigmoid else F.silu(gate)
    return rounded(normed * opened).flatten(1), matrices


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_follows_its_definition(shape: Shape, dtype: torch.dtype) -> None:
    rule = rule_of(shape, dtype)
    inputs = inputs_of(rule, dtype)
    step = step_of(rule, dtype)
    read, (state,) = run(step, inputs, NUM_ROWS)
    expected, matrices = by_definition(rule, inputs)
    # In bfloat16 a value at the middle between two may be rounded to the other one.
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    assert error(read, expected) < allowed
    assert error(step.matrices(state), matrices) < allowed
    assert torch.equal(state.inputs, inputs.qkv[NUM_ROWS - shape.taps + 1 :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [(1,) * NUM_ROWS, (1, 2, 20), (16, 7)], ids=str)
def test_where_rows_are_cut_changes_no_bit(
    shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    """In spans of one call, in calls of their own, and on several threads."""
    rule = rule_of(shape, dtype)
    inputs, step = inputs_of(rule, dtype), step_of(rule, dtype)
    with threads(1):
        expected, (end,) = run(step, inputs, NUM_ROWS)
    with threads(3):
        read, states = run(step, inputs, *lengths)
    assert torch.equal(read, expected)
    check_equal(states[-1], end)
    state: DeltaState | None = None
    starts = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    for index, (start, stop) in enumerate(pairwise(starts)):
        own = inputs.copied(start, stop)
        read, (state,) = run(step, own, stop - start, before=state)
        assert torch.equal(read, expected[start:stop])
        check_equal(state, states[index])
    assert state is not None


def check_equal(found: DeltaState, expected: DeltaState) -> None:
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.matrices, expected.matrices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbors_change_no_bit(dtype: torch.dtype) -> None:
    """Sequences side by side, new and old ones, and rows behind them that only fill up."""
    rule = rule_of(SHAPES[2], dtype)
    inputs, step = inputs_of(rule, dtype), step_of(rule, dtype)
    _, (old,) = run(step, inputs.copied(0, 5), 5)
    lengths, befores = (4, 1, 9), (None, old, None)
    spans = [
        DeltaSpan(num_rows, before, step.new_state())
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


def test_rows_that_step_again_leave_the_same_state() -> None:
    rule = rule_of(SHAPES[3], torch.float32)
    inputs, step = inputs_of(rule, torch.float32), step_of(rule, torch.float32)
    _, states = run(step, inputs, *(1,) * NUM_ROWS)
    for num_rows in (1, 2, 7):
        after = step.new_state()
        own = inputs.copied(5, 5 + 7)
        assert step(own, [DeltaSpan(num_rows, states[4], after)], reads=False) is None
        check_equal(after, states[4 + num_rows])


def test_what_is_no_number_stays_in_its_sequence() -> None:
    rule = rule_of(SHAPES[0], torch.float32)
    inputs, step = inputs_of(rule, torch.float32), step_of(rule, torch.float32)
    expected, _ = run(step, inputs, NUM_ROWS)
    inputs.qkv[:3] = torch.nan
    spans = [DeltaSpan(num, None, step.new_state()) for num in (3, NUM_ROWS - 3)]
    read = step(inputs, spans)
    assert read is not None
    assert read[:3].isnan().all()
    assert not read[3:].isnan().any()
    alone, _ = run(step, inputs.copied(3, NUM_ROWS), NUM_ROWS - 3)
    assert torch.equal(read[3:], alone)
    assert expected.isfinite().all()


def test_rows_with_gaps_are_read_where_they_lie() -> None:
    rule = rule_of(SHAPES[0], torch.float32)
    inputs, step = inputs_of(rule, torch.float32), step_of(rule, torch.float32)
    expected, _ = run(step, inputs, NUM_ROWS)
    parts = inputs.qkv, inputs.decay, inputs.write, inputs.gate
    sizes = [part.shape[1] for part in parts]
    views = DeltaInputs(*torch.cat(parts, dim=1).split(sizes, dim=1))
    assert not views.gate.is_contiguous()
    assert torch.equal(run(step, views, NUM_ROWS)[0], expected)
    turned = replace(inputs, gate=inputs.gate.T.contiguous().T)
    assert torch.equal(run(step, turned, NUM_ROWS)[0], expected)


def test_other_sizes_types_and_devices_are_left_to_torch() -> None:
    rule = rule_of(SHAPES[0], torch.float32)
    native = backend_for(torch.float32, "cpu")
    too_large = replace(SHAPES[0], key_dim=257), replace(SHAPES[0], taps=9)
    for shape in (*too_large, replace(SHAPES[0], heads=(3, 4))):
        assert native.delta_step(rule_of(shape, torch.float32)) is None
    assert backend_for(torch.float64, "cpu").delta_step(rule) is None
    assert backend_for(torch.float32, "meta").delta_step(rule) is None


BAD: dict[str, dict[str, Any]] = {
    "rows": {"write": draw(NUM_ROWS - 1, 4)},
    "channels": {"qkv": draw(NUM_ROWS, 127)},
    "decays": {"decay": draw(NUM_ROWS, 5)},
    "values": {"gate": draw(NUM_ROWS, 63)},
    "type": {"gate": draw(NUM_ROWS, 64, dtype=torch.bfloat16)},
    "dimensions": {"qkv": draw(1, NUM_ROWS, 128)},
    "device": {"qkv": torch.empty(NUM_ROWS, 128, device="meta")},
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_that_do_not_fit_are_refused(name: str) -> None:
    rule = rule_of(SHAPES[0], torch.float32)
    step, inputs = step_of(rule, torch.float32), inputs_of(rule, torch.float32)
    assert inputs.qkv.shape[1] == 128
    with pytest.raises(RuntimeError):
        run(step, replace(inputs, **BAD[name]), NUM_ROWS)


def test_states_and_spans_that_do_not_fit_are_refused() -> None:
    rule = rule_of(SHAPES[0], torch.float32)
    step, inputs = step_of(rule, torch.float32), inputs_of(rule, torch.float32)
    good = step.new_state()
    bad = [
        replace(good, matrices=good.matrices[1:]),
        replace(good, matrices=good.matrices.double()),
        replace(good, matrices=good.matrices.mT),
        replace(good, inputs=good.inputs[1:]),
        replace(good, inputs=good.inputs.bfloat16()),
        replace(good, inputs=torch.empty(128, 3).T),
    ]
    for state in bad:
        for before, after in ((state, good), (None, state)):
            with pytest.raises(RuntimeError):
                step(inputs, [DeltaSpan(1, before, after)])
    for spans in (
        [],
        [DeltaSpan(0, None, good)],
        [DeltaSpan(-1, None, good)],
        [DeltaSpan(NUM_ROWS + 1, None, good)],
        [DeltaSpan(1, good, good)],
        [DeltaSpan(1, None, good), DeltaSpan(1, None, good)],
    ):
        with pytest.raises(RuntimeError):
            step(inputs, spans)


def test_a_rule_whose_parts_do_not_fit_is_refused() -> None:
    kernels = library()
    assert kernels is not None
    rule = rule_of(SHAPES[0], torch.float32)
    for other in (
        replace(rule, convolution=rule.convolution[1:]),
        replace(rule, convolution_bias=draw(5)),
        replace(rule, decay_rates=rule.decay_rates[1:]),
        replace(rule, decay_biases=rule.decay_biases[1:]),
        replace(rule, norm=replace(rule.norm, weight=draw(3))),
    ):
        with pytest.raises(RuntimeError):
            NativeDelta(kernels, other, torch.float32)
