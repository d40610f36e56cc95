"""The gated delta rule by kernels; see `kernels.interface.DeltaStep`."""

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from blockdraft.kernels.cpu import library as native
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import IS_BFLOAT16, check_alike, check_contiguous, check_sizes
from blockdraft.kernels.interface import DeltaInputs, DeltaRule, DeltaSpan, DeltaState

MAX_SPARE = 32
"""States of a layer whose room is kept for others: new memory takes longer than a step."""


def knows(kernels: Library, rule: DeltaRule) -> bool:
    """True for sizes that the kernels have room for."""
    key_heads, value_heads = rule.num_heads
    return (
        0 < rule.key_dim <= kernels.delta_key_dim()
        and rule.value_dim > 0
        and 0 < key_heads <= value_heads
        and value_heads % key_heads == 0
        and 0 < rule.convolution.shape[1] <= kernels.delta_taps()
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


class NativeDelta:
    """A rule for rows of `dtype`, with its weights as they are now; see DeltaStep.

    Raises:
        RuntimeError: the parts of the rule do not fit each other.
    """

    def __init__(self, kernels: Library, rule: DeltaRule, dtype: torch.dtype) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._spare: list[DeltaState] = []
        self._key_heads, self._value_heads = rule.num_heads
        self._key_dim, self._value_dim = rule.key_dim, rule.value_dim
        self._num_values = self._value_heads * self._value_dim
        self._num_channels = 2 * self._key_heads * self._key_dim + self._num_values
        panel = kernels.delta_panel()
        self._panels = self._value_heads, -(-self._value_dim // panel), self._key_dim, panel
        self._taps = rule.convolution.shape[1]
        self._num_decays = rule.decay_biases.numel()
        check_sizes(knows(kernels, rule))
        check_sizes(rule.convolution.shape == (self._num_channels, self._taps))
        check_sizes(rule.decay_rates.shape == (self._value_heads,))
        by_head, by_key = (self._value_heads,), (self._value_heads, self._key_dim)
        check_sizes(rule.decay_biases.shape in (by_head, by_key))
        check_sizes(rule.norm.weight.shape == (self._value_dim,))
        bias = rule.convolution_bias
        check_sizes(bias is None or bias.shape == (self._num_channels,))
        self._held = [
            None if part is None else _wide(part)
            for part in (
                rule.convolution.T,
                bias,
                rule.decay_rates,
                rule.decay_biases,
                rule.norm.weight,
            )
        ]
        self._rule = native.DeltaRule(
            self._key_heads,
            self._value_heads,
            self._key_dim,
            self._value_dim,
            self._taps,
            self._num_decays // self._value_heads,
            *(None if part is None else part.data_ptr() for part in self._held),
            rule.write_scale,
            rule.norm.eps,
            rule.norm.rounds_first,
            rule.gate_is_sigmoid,
        )

    def new_state(self) -> DeltaState:
        """See DeltaStep.new_state. The columns of the matrices lie in panels."""
        if self._spare:
            return self._spare.pop()
        return DeltaState(
            torch.empty(self._taps - 1, self._num_channels, dtype=self._dtype, device="cpu"),
            torch.empty(self._panels, dtype=torch.float32, device="cpu"),
        )

    def take_back(self, state: DeltaState) -> None:
        """See DeltaStep.take_back."""
        if len(self._spare) < MAX_SPARE:
            self._spare.append(state)

    def matrices(self, state: DeltaState) -> Tensor:
        """See DeltaStep.matrices."""
        rows = state.matrices.transpose(1, 2).flatten(2)
        return rows[..., : self._value_dim].contiguous()

    def __call__(
        self, inputs: DeltaInputs, spans: Sequence[DeltaSpan], *, reads: bool = True
    ) -> Tensor | None:
        """See DeltaStep.__call__."""
        num_rows = sum(span.num_rows for span in spans)
        self._check(inputs, spans, num_rows)
        qkv, decay, write, gate = (
            part if part.stride(-1) == 1 else part.contiguous()
            for part in (inputs.qkv, inputs.decay, inputs.write, inputs.gate)
        )
        output = qkv.new_empty(qkv.shape[0], self._num_values) if reads else None
        if output is not None:
            output[num_rows:] = 0
        sizes = self._num_channels, self._num_decays, self._value_heads, self._num_values
        scratch = _scratch.addresses(*(num_rows * size for size in sizes))
        call = native.DeltaCall(
            ctypes.addressof(self._rule),
            *(part.data_ptr() for part in (qkv, decay, write, gate)),
            *(part.stride(0) for part in (qkv, decay, write, gate)),
            None if output is None else output.data_ptr(),
            *scratch,
            ctypes.addressof(table := self._table(spans)),
            len(spans),
            num_rows,
        )
        self._kernels.delta(
            IS_BFLOAT16[self._dtype], ctypes.addressof(call), torch.get_num_threads()
        )
        del table  # it must live until here
        return output

    def _table(self, spans: Sequence[DeltaSpan]) -> "ctypes.Array[native.DeltaSpan]":
        table, first = (native.DeltaSpan * len(spans))(), 0
        for entry, span in zip(table, spans, strict=True):
            entry.first, entry.num_rows = first, span.num_rows
            if span.before is not None:
                entry.inputs_before = span.before.inputs.data_ptr()
                entry.before = span.before.matrices.data_ptr()
            entry.inputs_after = span.after.inputs.data_ptr()
            entry.after = span.after.matrices.data_ptr()
            first += span.num_rows
        return table

    def _check(self, inputs: DeltaInputs, spans: Sequence[DeltaSpan], num_rows: int) -> None:
        """Raises RuntimeError for what the kernels would read as other numbers than it is."""
        like = torch.empty(0, dtype=self._dtype, device="cpu")
        check_alike(like, inputs.qkv, inputs.decay, inputs.write, inputs.gate)
        check_sizes(num_rows > 0 and all(span.num_rows > 0 for span in spans))
        num_given, sizes = inputs.qkv.shape[0], (self._num_channels, self._num_decays)
        check_sizes(num_given >= num_rows)
        for part, size in (
            *zip((inputs.qkv, inputs.decay), sizes, strict=True),
            (inputs.write, self._value_heads),
            (inputs.gate, self._num_values),
        ):
            check_sizes(part.shape == (num_given, size))
        written: set[int] = set()
        for span in spans:
            for state in (span.before, span.after):
                if state is not None:
                    self._check_state(like, state)
            # Threads write columns while others may still read.
            address = span.after.matrices.data_ptr()
            check_sizes(address not in written)
            check_sizes(span.before is None or span.before.matrices.data_ptr() != address)
            written.add(address)

    def _check_state(self, like: Tensor, state: DeltaState) -> None:
        check_sizes(state.inputs.shape == (self._taps - 1, self._num_channels))
        check_sizes(state.matrices.shape == self._panels)
        check_alike(like, state.inputs)
        check_alike(torch.empty(0, dtype=torch.float32, device="cpu"), state.matrices)
        check_contiguous(state.inputs, state.matrices)


def _wide(part: Tensor) -> Tensor:
    """A copy in float32, side by side."""
    return part.detach().to("cpu", torch.float32).clone(memory_format=torch.contiguous_format)
