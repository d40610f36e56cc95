"""Recurrences with random weights, and what they say by their definition in float64."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.recurrence_interface import (
    Convolution,
    DeltaRule,
    Recurrence,
    RecurrentInputs,
    SelectiveScan,
    ShortConvolution,
)
from blockdraft.kernels.weights import Norm
from tests.tensors import draw

NUM_ROWS = 23


class Shape(Protocol):
    """Of a recurrence."""

    taps: int

    @abstractmethod
    def rule(self, dtype: torch.dtype) -> Recurrence:
        """With random weights, the same each time."""

    @abstractmethod
    def inputs(self, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> RecurrentInputs:
        """Of some rows."""

    @abstractmethod
    def by_definition(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Output of the rows, and the matrices behind them, rounded where models round."""


def convolution_of(channels: int, taps: int, has_bias: bool, dtype: torch.dtype) -> Convolution:
    bias = draw(channels, dtype=dtype, seed=2) if has_bias else None
    return Convolution(draw(channels, taps, dtype=dtype, seed=1), bias)


def convolved(convolution: Convolution, rows: Tensor) -> Tensor:
    """[rows, channels], float64 rounded to the type of the rows."""
    taps = convolution.weight.shape[1]
    padded = torch.cat((rows.new_zeros(taps - 1, rows.shape[1]), rows)).double()
    bias = None if convolution.bias is None else convolution.bias.double()
    weight = convolution.weight.double()[:, None]
    sums = F.conv1d(padded.T[None], weight, bias, groups=rows.shape[1])[0].T
    return sums.to(rows.dtype).double()


def steps_of(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """One is so large that its softplus is the number itself."""
    steps = draw(num_rows, size, dtype=dtype, seed=7)
    steps[num_rows // 2, 0] = 30.0
    return steps


@dataclass(frozen=True)
class DeltaShape(Shape):
    """`by_key`: each of the keys' values decays by itself."""

    heads: tuple[int, int]
    key_dim: int
    value_dim: int
    taps: int = 4
    by_key: bool = False
    has_bias: bool = False
    write_scale: float = 1.0
    rounds_first: bool = True
    gate_is_sigmoid: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Of keys and values of a row."""
        return self.heads[0] * self.key_dim, self.heads[1] * self.value_dim

    def rule(self, dtype: torch.dtype) -> DeltaRule:
        (keys, values), num_heads = self.sizes, self.heads[1]
        biases = (num_heads, self.key_dim) if self.by_key else (num_heads,)
        weight = 1 + 0.1 * draw(self.value_dim, dtype=dtype, seed=5)
        return DeltaRule(
            convolution=convolution_of(2 * keys + values, self.taps, self.has_bias, dtype),
            num_heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            decay_rates=draw(num_heads, seed=3).exp(),
            decay_biases=draw(*biases, dtype=dtype, seed=4) - 2,
            write_scale=self.write_scale,
            norm=Norm(weight, 1e-6, self.rounds_first),
            gate_is_sigmoid=self.gate_is_sigmoid,
        )

    def inputs(self, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> RecurrentInputs:
        (keys, values), num_heads = self.sizes, self.heads[1]
        num_decays = num_heads * self.key_dim if self.by_key else num_heads
        return RecurrentInputs(
            draw(num_rows, 2 * keys + values, dtype=dtype, seed=6),
            draw(num_rows, values, dtype=dtype, seed=9),
            steps_of(num_rows, num_decays, dtype),
            draw(num_rows, num_heads, dtype=dtype, seed=8),
        )

    def by_definition(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rule, inputs = self.rule(dtype), self.inputs(dtype)
        assert inputs.decay is not None
        assert inputs.write is not None

        def rounded(x: Tensor) -> Tensor:
            return x.to(dtype).double()

        (key_heads, num_heads), (keys, values) = self.heads, self.sizes
        channels = rounded(F.silu(convolved(rule.convolution, inputs.channels)))
        query, key, value = channels.split((keys, keys, values), dim=-1)
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
        for row in range(inputs.channels.shape[0]):
            matrices = matrices * decay[row, :, :, None]
            difference = value[row] - (matrices * key[row, :, :, None]).sum(1)
            written = difference * write[row, :, None]
            matrices = matrices + key[row, :, :, None] * written[:, None]
            reads.append((matrices * query[row, :, :, None]).sum(1) / rule.key_dim**0.5)
        normed = rounded(torch.stack(reads))
        normed = normed * (normed.pow(2).mean(-1, True) + rule.norm.eps).rsqrt()
        if rule.norm.rounds_first:
            normed = rounded(rounded(normed) * rule.norm.weight.double())
        else:
            normed = normed * rule.norm.weight.double()
        gate = inputs.gate.double().unflatten(1, (num_heads, -1))
        opened = gate.sigmoid() if rule.gate_is_sigmoid else F.silu(gate)
        return rounded(normed * opened).flatten(1), matrices


@dataclass(frozen=True)
class ScanShape(Shape):
    """heads: of groups, and of heads. norm_groups: 0 for no norm."""

    heads: tuple[int, int]
    state_size: int
    head_dim: int
    taps: int = 4
    has_bias: bool = True
    start_limits: tuple[float, float] = (0.0, float("inf"))
    norm_groups: int = 1
    rounds_first: bool = True
    gates_first: bool = True

    @property
    def sizes(self) -> tuple[int, int]:
        """Of what reads or writes, and of the heads' inputs, of a row."""
        return self.heads[0] * self.state_size, self.heads[1] * self.head_dim

    def rule(self, dtype: torch.dtype) -> SelectiveScan:
        (states, values), num_heads = self.sizes, self.heads[1]
        norm = Norm(1 + 0.1 * draw(values, dtype=dtype, seed=5), 1e-6, self.rounds_first)
        return SelectiveScan(
            convolution=convolution_of(2 * states + values, self.taps, self.has_bias, dtype),
            num_heads=self.heads,
            state_size=self.state_size,
            head_dim=self.head_dim,
            decay_rates=draw(num_heads, seed=3).exp(),
            step_biases=draw(num_heads, dtype=dtype, seed=4) - 2,
            skips=draw(num_heads, dtype=dtype, seed=10),
            start_limits=self.start_limits,
            norm=norm if self.norm_groups else None,
            norm_groups=self.norm_groups,
            gates_first=self.gates_first,
        )

    def inputs(self, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> RecurrentInputs:
        states, values = self.sizes
        return RecurrentInputs(
            draw(num_rows, 2 * states + values, dtype=dtype, seed=6),
            draw(num_rows, values, dtype=dtype, seed=9),
            steps_of(num_rows, self.heads[1], dtype),
        )

    def by_definition(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rule, inputs = self.rule(dtype), self.inputs(dtype)
        assert inputs.decay is not None

        def rounded(x: Tensor) -> Tensor:
            return x.to(dtype).double()

        (groups, num_heads), (states, values) = self.heads, self.sizes
        channels = rounded(F.silu(convolved(rule.convolution, inputs.channels)))
        x, write, read = channels.split((values, states, states), dim=-1)
        x = x.unflatten(1, (num_heads, -1))
        write, read = (
            part.unflatten(1, (groups, -1)).repeat_interleave(num_heads // groups, 1)
            for part in (write, read)
        )
        biased = rounded(inputs.decay.double() + rule.step_biases.double())
        steps = rounded(F.softplus(biased))
        steps[0] = steps[0].clamp(*rule.start_limits)
        decay = (-rule.decay_rates.double() * steps).exp()
        matrices = torch.zeros(num_heads, rule.head_dim, rule.state_size, dtype=torch.float64)
        reads = []
        for row in range(inputs.channels.shape[0]):
            written = rounded(steps[row, :, None] * write[row])
            added = rounded(x[row, :, :, None] * written[:, None])
            matrices = matrices * decay[row, :, None, None] + added
            found = rounded((rounded(matrices) * read[row, :, None]).sum(-1))
            skipped = rounded(x[row] * rule.skips.double()[:, None])
            reads.append(rounded(found + skipped))
        output, opened = torch.stack(reads).flatten(1), F.silu(inputs.gate.double())
        if rule.norm is None:
            return rounded(output * rounded(opened)), matrices
        if rule.gates_first:
            output = output * opened
        parts = output.unflatten(1, (rule.norm_groups, -1))
        normed = (parts * (parts.pow(2).mean(-1, True) + rule.norm.eps).rsqrt()).flatten(1)
        if rule.norm.rounds_first:
            normed = rounded(normed)
        normed = normed * rule.norm.weight.double()
        return rounded(normed if rule.gates_first else normed * opened), matrices


@dataclass(frozen=True)
class ConvolutionShape(Shape):
    channels: int
    taps: int = 3
    has_bias: bool = False

    def rule(self, dtype: torch.dtype) -> ShortConvolution:
        return ShortConvolution(convolution_of(self.channels, self.taps, self.has_bias, dtype))

    def inputs(self, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> RecurrentInputs:
        return RecurrentInputs(
            draw(num_rows, self.channels, dtype=dtype, seed=6),
            draw(num_rows, self.channels, dtype=dtype, seed=9),
        )

    def by_definition(self, dtype: torch.dtype) -> tuple[Tensor, None]:
        inputs = self.inputs(dtype)
        sums = convolved(self.rule(dtype).convolution, inputs.channels)
        return (sums * inputs.gate.double()).to(dtype).double(), None
