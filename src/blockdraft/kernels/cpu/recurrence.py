"""Recurrences by kernels; see `kernels.interface.RecurrentStep`."""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from blockdraft.kernels.checks import check_sizes
from blockdraft.kernels.cpu import structs
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import IS_BFLOAT16, check_alike, check_contiguous
from blockdraft.kernels.recurrence_interface import (
    DeltaRule,
    Recurrence,
    RecurrentInputs,
    RecurrentSpan,
    RecurrentState,
    SelectiveScan,
    ShortConvolution,
)
from blockdraft.kernels.weights import Norm

MAX_SPARE = 32
"""States of a layer whose room is kept for others: new memory takes longer than a step."""
_DELTA, _SCAN, _CONVOLUTION = range(3)
"""`Kind` of recurrence.cpp."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a recurrence; see `Recurrence` of recurrence.h. Without matrices there are no heads."""

    channels: int
    taps: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    num_decays: int = 0
    num_writes: int = 0

    @property
    def num_values(self) -> int:
        """Of a row's output."""
        return self.value_heads * self.value_dim or self.channels

    @property
    def has_matrices(self) -> bool:
        """False for a convolution alone."""
        return self.value_heads > 0


def _sizes(rule: Recurrence) -> _Sizes:
    channels, taps = rule.convolution.weight.shape
    if isinstance(rule, ShortConvolution):
        return _Sizes(channels, taps)
    key_heads, value_heads = rule.num_heads
    if isinstance(rule, DeltaRule):
        dims = rule.key_dim, rule.value_dim
        gates = rule.decay_biases.numel(), value_heads
    else:
        dims = rule.state_size, rule.head_dim
        gates = value_heads, 0
    return _Sizes(channels, taps, key_heads, value_heads, *dims, *gates)


def knows(kernels: Library, rule: Recurrence) -> bool:
    """True for sizes that the kernels have room for."""
    sizes = _sizes(rule)
    fits = 0 < sizes.taps <= kernels.recurrence_taps() and sizes.channels > 0
    if isinstance(rule, ShortConvolution):
        return fits
    return (
        fits
        and 0 < sizes.key_dim <= kernels.recurrence_key_dim()
        and sizes.value_dim > 0
        and 0 < sizes.key_heads <= sizes.value_heads
        and sizes.value_heads % sizes.key_heads == 0
    )


class Scratch(threading.local):
    """What lies between the parts of a computation, float32; of each thread by itself.

    Kept from call to call: the first write to memory that is new takes longer than a step.
    """

    def __init__(self) -> None:
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    def addresses(self, *sizes: int) -> list[int]:
        """Of room for so many values each, until the next call."""
        if self._values.numel() < sum(sizes):
            self._values = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
        places = accumulate(sizes[:-1], initial=0)
        return [self._values.data_ptr() + place * self._values.itemsize for place in places]


_scratch = Scratch()


class NativeRecurrence:
    """A recurrence for rows of `dtype`, with its weights as they are now; see RecurrentStep.

    Raises:
        RuntimeError: the parts of the recurrence do not fit each other.
    """

    def __init__(self, kernels: Library, rule: Recurrence, dtype: torch.dtype) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._spare: list[RecurrentState] = []
        check_sizes(knows(kernels, rule))
        self._sizes = sizes = _sizes(rule)
        panel = kernels.recurrence_panel()
        self._panels = sizes.value_heads, -(-sizes.value_dim // panel), sizes.key_dim, panel
        self._is_scan = isinstance(rule, SelectiveScan)
        # What the struct points to.
        self._held: list[Tensor] = []
        bias = rule.convolution.bias
        check_sizes(bias is None or bias.shape == (sizes.channels,))
        self._rule = structs.Recurrence(
            channels=sizes.channels,
            taps=sizes.taps,
            convolution=self._address(rule.convolution.weight.T),
            convolution_bias=None if bias is None else self._address(bias),
            kind=_CONVOLUTION,
        )
        if not isinstance(rule, ShortConvolution):
            self._set_matrices(rule)

    def _set_matrices(self, rule: DeltaRule | SelectiveScan) -> None:
        sizes, own = self._sizes, self._rule
        num_heads = sizes.value_heads
        check_sizes(sizes.channels == 2 * sizes.key_heads * sizes.key_dim + sizes.num_values)
        check_sizes(rule.decay_rates.shape == (num_heads,))
        own.key_heads, own.value_heads = sizes.key_heads, num_heads
        own.key_dim, own.value_dim = sizes.key_dim, sizes.value_dim
        own.decays = sizes.num_decays // num_heads
        own.decay_rates = self._address(rule.decay_rates)
        if isinstance(rule, DeltaRule):
            check_sizes(rule.decay_biases.shape in ((num_heads,), (num_heads, sizes.key_dim)))
            check_sizes(rule.norm.weight.shape == (sizes.value_dim,))
            own.kind = _DELTA
            own.decay_biases = self._address(rule.decay_biases)
            own.write_scale = rule.write_scale
            own.gate_is_sigmoid = rule.gate_is_sigmoid
            self._set_norm(rule.norm, rule.norm.weight.repeat(num_heads), num_heads)
            return
        check_sizes(rule.step_biases.shape == rule.skips.shape == (num_heads,))
        own.kind = _SCAN
        own.decay_biases = self._address(rule.step_biases)
        own.skips = self._address(rule.skips)
        own.min_start, own.max_start = rule.start_limits
        own.gates_first = rule.gates_first
        if rule.norm is None:
            own.norm_size = sizes.value_dim  # each head by itself, as good as any other size
        else:
            self._set_norm(rule.norm, rule.norm.weight, rule.norm_groups)

    def _set_norm(self, norm: Norm, weight: Tensor, num_groups: int) -> None:
        """weight: of all values of a row."""
        num_values = self._sizes.num_values
        check_sizes(weight.shape == (num_values,))
        check_sizes(num_groups > 0 and num_values % num_groups == 0)
        self._rule.norm_size = num_values // num_groups
        self._rule.norm = self._address(weight)
        self._rule.eps, self._rule.rounds_first = norm.eps, norm.rounds_first

    def _address(self, part: Tensor) -> int:
        """Of a copy in float32, side by side."""
        wide = part.detach().to("cpu", torch.float32)
        self._held.append(wide.clone(memory_format=torch.contiguous_format))
        return self._held[-1].data_ptr()

    def new_state(self) -> RecurrentState:
        """See RecurrentStep.new_state. The columns of the matrices lie in panels."""
        if self._spare:
            return self._spare.pop()
        inputs = self._sizes.taps - 1, self._sizes.channels
        return RecurrentState(
            torch.empty(inputs, dtype=self._dtype, device="cpu"),
            torch.empty(self._panels, dtype=torch.float32, device="cpu")
            if self._sizes.has_matrices
            else None,
        )

    def take_back(self, state: RecurrentState) -> None:
        """See RecurrentStep.take_back."""
        if len(self._spare) < MAX_SPARE:
            self._spare.append(state)

    def matrices(self, state: RecurrentState) -> Tensor | None:
        """See RecurrentStep.matrices."""
        if state.matrices is None:
            return None
        rows = state.matrices.transpose(1, 2).flatten(2)[..., : self._sizes.value_dim]
        return (rows.mT if self._is_scan else rows).contiguous()

    def __call__(
        self, inputs: RecurrentInputs, spans: Sequence[RecurrentSpan], *, reads: bool = True
    ) -> Tensor | None:
        """See RecurrentStep.__call__."""
        sizes = self._sizes
        num_rows = sum(span.num_rows for span in spans)
        self._check(inputs, spans, num_rows)
        # Held until the kernel has read them.
        parts = [
            part if part is None or part.stride(-1) == 1 else part.contiguous()
            for part in (inputs.channels, inputs.decay, inputs.write, inputs.gate)
        ]
        output: Tensor | None = None
        if reads:
            output = inputs.channels.new_empty(inputs.channels.shape[0], sizes.num_values)
            output[num_rows:] = 0
        each = sizes.channels, sizes.num_decays, sizes.value_heads, sizes.num_values
        scratch = _scratch.addresses(*(num_rows * size * sizes.has_matrices for size in each))
        call = structs.RecurrenceCall(
            ctypes.addressof(self._rule),
            *(None if part is None else part.data_ptr() for part in parts),
            *(0 if part is None else part.stride(0) for part in parts),
            None if output is None else output.data_ptr(),
            *scratch,
            ctypes.addressof(table := self._table(spans)),
            len(spans),
            num_rows,
        )
        self._kernels.recurrence(
            IS_BFLOAT16[self._dtype], ctypes.addressof(call), torch.get_num_threads()
        )
        del table  # it must live until here
        return output

    def _table(self, spans: Sequence[RecurrentSpan]) -> "ctypes.Array[structs.StateSpan]":
        table, first = (structs.StateSpan * len(spans))(), 0
        for entry, span in zip(table, spans, strict=True):
            entry.first, entry.num_rows = first, span.num_rows
            if span.before is not None:
                entry.inputs_before, entry.before = _addresses(span.before)
            entry.inputs_after, entry.after = _addresses(span.after)
            first += span.num_rows
        return table

    def _check(
        self, inputs: RecurrentInputs, spans: Sequence[RecurrentSpan], num_rows: int
    ) -> None:
        """Raises RuntimeError for what the kernels would read as other numbers than it is."""
        like = torch.empty(0, dtype=self._dtype, device="cpu")
        check_sizes(num_rows > 0 and all(span.num_rows > 0 for span in spans))
        num_given, sizes = inputs.channels.shape[0], self._sizes
        check_sizes(num_given >= num_rows)
        for part, size in (
            (inputs.channels, sizes.channels),
            (inputs.gate, sizes.num_values),
            (inputs.decay, sizes.num_decays),
            (inputs.write, sizes.num_writes),
        ):
            check_sizes((part is None) == (size == 0))
            if part is not None:
                check_alike(like, part)
                check_sizes(part.shape == (num_given, size))
        written: set[int] = set()
        for span in spans:
            self._check_state(like, span.after)
            after = {address for address in _addresses(span.after) if address}
            # Threads write columns while others may still read.
            check_sizes(not after & written)
            written |= after
            if span.before is not None:
                self._check_state(like, span.before)
                check_sizes(not after.intersection(_addresses(span.before)))

    def _check_state(self, like: Tensor, state: RecurrentState) -> None:
        check_sizes(state.inputs.shape == (self._sizes.taps - 1, self._sizes.channels))
        check_alike(like, state.inputs)
        check_contiguous(state.inputs)
        check_sizes((state.matrices is not None) == self._sizes.has_matrices)
        if state.matrices is not None:
            check_sizes(state.matrices.shape == self._panels)
            check_alike(torch.empty(0, dtype=torch.float32, device="cpu"), state.matrices)
            check_contiguous(state.matrices)


def _addresses(state: RecurrentState) -> tuple[int, int | None]:
    """Of inputs and matrices; 0 or None where there are none."""
    matrices = state.matrices
    return state.inputs.data_ptr(), None if matrices is None else matrices.data_ptr()
