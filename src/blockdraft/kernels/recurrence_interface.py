"""Recurrences of layers that remember a sequence in a state of one size, and what steps them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockdraft.kernels.weights import Norm


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """Causal, of each channel by itself: weight [channels, taps], bias [channels]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """A gated delta rule: a state [key_dim, value_dim] of each head of values, and what is near it.

    A convolution over the last inputs, with silu, gives queries, keys and values; the first two get
    the length 1. Then each token decays the state, writes the difference between its value and
    what its key reads, and reads with its query. The norm of that is multiplied with a gate.

    convolution: of queries, keys and values side by side. num_heads: of keys, and of values.
    decay_rates: [value heads], times softplus(input + bias) what is decayed in log space.
    decay_biases: [value heads] or, where each of the keys' values decays by itself, [value heads,
    key_dim]. write_scale: times sigmoid(input) what is written. norm: of each head, rounds first,
    or nothing before its end. gate_is_sigmoid: or silu.
    """

    convolution: Convolution
    num_heads: tuple[int, int]
    key_dim: int
    value_dim: int
    decay_rates: Tensor
    decay_biases: Tensor
    write_scale: float
    norm: Norm
    gate_is_sigmoid: bool


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveScan:
    """The scan of Mamba 2: a state [head_dim, state_size] of each head, and what is near it.

    A convolution over the last inputs, with silu, gives the inputs of the heads, and what writes
    and reads the states, a row for each group of heads. The time step of a head is softplus(input +
    bias). Each token decays the state by exp(-rate * step), adds step * input * what writes, reads,
    and adds skip * input. The output is normed and multiplied with silu of a gate.

    convolution: of heads' inputs, writers and readers side by side. num_heads: of groups, and of
    heads. decay_rates, step_biases, skips: [heads]. start_limits: the least and the largest step of
    the first token of a sequence; transformers scans that one, and its single steps have no limits.
    norm: its weight is [heads * head_dim]; None for none. norm_groups: so many parts of a row are
    normed by themselves. gates_first: before the norm, or behind it.
    """

    convolution: Convolution
    num_heads: tuple[int, int]
    state_size: int
    head_dim: int
    decay_rates: Tensor
    step_biases: Tensor
    skips: Tensor
    start_limits: tuple[float, float]
    norm: Norm | None
    norm_groups: int
    gates_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution:
    """A convolution over the last inputs, times a gate: its only state are these inputs."""

    convolution: Convolution


Recurrence = DeltaRule | SelectiveScan | ShortConvolution
"""What a layer computes that remembers a sequence in a state of one size."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentInputs:
    """What a layer's products give its recurrence, [rows, ..] each; None where it takes none.

    channels: of the convolution. gate: values of the output. decay: of a delta rule, as many as its
    `decay_biases`; of a scan, its heads' steps. write: of a delta rule, [rows, value heads].
    """

    channels: Tensor
    gate: Tensor
    decay: Tensor | None = None
    write: Tensor | None = None

    def copied(self, first: int, end: int) -> "RecurrentInputs":
        """Of some rows, in memory of their own."""
        decay, write = self.decay, self.write
        return RecurrentInputs(
            self.channels[first:end].clone(),
            self.gate[first:end].clone(),
            None if decay is None else decay[first:end].clone(),
            None if write is None else write[first:end].clone(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """What a recurrence remembers of a sequence. Written once, then nobody changes it.

    inputs: [taps - 1, channels], the last of the convolution, the latest last. matrices: one of
    each head, float32, in the order in which the backend reads them; None of a convolution alone.
    """

    inputs: Tensor
    matrices: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentSpan:
    """Rows of one sequence: the next ones of a call, behind a state, to a new one that is written.

    before: None at the beginning of a sequence; or what another span before this one writes.
    """

    num_rows: int
    before: RecurrentState | None
    after: RecurrentState


class RecurrentStep(Protocol):
    """A recurrence, token by token."""

    def new_state(self) -> RecurrentState:
        """Room for one."""

    def take_back(self, state: RecurrentState) -> None:
        """Nobody holds a state any more, so its room may be that of another one."""

    def matrices(self, state: RecurrentState) -> Tensor | None:
        """Those of a state, [heads, ..] as the recurrence says; None of a convolution alone."""

    def __call__(
        self, inputs: RecurrentInputs, spans: Sequence[RecurrentSpan], *, reads: bool = True
    ) -> Tensor | None:
        """Write the states behind the spans, and return the output of their rows.

        Rows behind those of the spans only fill up. Each row has the bits that it has alone,
        wherever the rows before it were cut into spans and calls.

        reads: False for the states alone. Else [rows, values of the gate], zeros of rows that fill
        up.

        Raises:
            RuntimeError: sizes, types or layouts do not fit each other.
        """
