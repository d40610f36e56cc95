"""Products of rows with a weight."""

import triton
import triton.language as tl

from blockdraft.kernels.cuda.source.rounding import dot, rounded


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    output,
    x,
    weight,
    bias,
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile [ROWS, OUTPUTS] of output [num_rows, NUM_OUTPUTS]: x times weight transposed, + bias.

    A program sums over all inputs, INPUTS at a time from the first on, in float32.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, NUM_INPUTS, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = inputs < NUM_INPUTS
        row_tile = tl.load(
            x + rows[:, None] * NUM_INPUTS + inputs[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )
        weight_tile = tl.load(
            weight + outputs[None, :] * NUM_INPUTS + inputs[:, None],
            mask=is_output[None, :] & is_input[:, None],
            other=0.0,
        )
        total = dot(row_tile, weight_tile, total, INTERPRETED)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + rows[:, None] * NUM_OUTPUTS + outputs[None, :],
        rounded(total, output.dtype.element_ty, INTERPRETED),
        mask=is_row[:, None] & is_output[None, :],
    )
