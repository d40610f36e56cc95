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
    OUTPUTS_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A tile of output [num_rows, NUM_OUTPUTS]: x times weight transposed, + bias.

    A program sums over all inputs, INPUTS at a time from the first on, in float32.
    OUTPUTS_FIRST: it multiplies weight and rows, not rows and weight. Tensor cores want 64 of what
    comes first, so this leaves less idle where there are few rows.
    """
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first_output = tl.program_id(1).to(tl.int64) * OUTPUTS
    rows, outputs, inputs = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    is_row, is_output = first_row + rows < num_rows, first_output + outputs < NUM_OUTPUTS
    x += first_row * NUM_INPUTS
    weight += first_output * NUM_INPUTS
    if OUTPUTS_FIRST:
        left = weight + outputs[:, None] * NUM_INPUTS + inputs[None, :]
        right = x + rows[None, :] * NUM_INPUTS + inputs[:, None]
        is_left, is_right = is_output[:, None], is_row[None, :]
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        left = x + rows[:, None] * NUM_INPUTS + inputs[None, :]
        right = weight + outputs[None, :] * NUM_INPUTS + inputs[:, None]
        is_left, is_right = is_row[:, None], is_output[None, :]
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, NUM_INPUTS, INPUTS):
        if NUM_INPUTS % INPUTS == 0:
            left_tile = tl.load(left, mask=is_left, other=0.0)
            right_tile = tl.load(right, mask=is_right, other=0.0)
        else:
            is_input = start + inputs < NUM_INPUTS
            left_tile = tl.load(left, mask=is_left & is_input[None, :], other=0.0)
            right_tile = tl.load(right, mask=is_right & is_input[:, None], other=0.0)
        total = dot(left_tile, right_tile, total, INTERPRETED)
        left += INPUTS
        right += INPUTS
    output += first_row * NUM_OUTPUTS + first_output
    if HAS_BIAS:
        added = tl.load(bias + first_output + outputs, mask=is_output, other=0.0).to(tl.float32)
    if OUTPUTS_FIRST:
        if HAS_BIAS:
            total += added[:, None]
        places = rows[None, :] * NUM_OUTPUTS + outputs[:, None]
    else:
        if HAS_BIAS:
            total += added[None, :]
        places = rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    total = rounded(total, output.dtype.element_ty, INTERPRETED)
    tl.store(output + places, total, mask=is_left & is_right)
