"""What Triton's interpreter computes by other means than a card."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 x, rounded to nearest even in DTYPE and back."""
    if tl.float32 == DTYPE:
        result = x
    elif INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # Of what is no number the bits could carry over into the sign.
        result = tl.where(x == x, bits.to(tl.uint32).to(tl.float32, bitcast=True), x)
    else:
        result = x.to(DTYPE).to(tl.float32)
    return result


@triton.jit
def dot(a, b, total, INTERPRETED: tl.constexpr):
    """total + a @ b, of tiles [rows, inputs] and [inputs, outputs], summed in float32.

    The interpreter hands `tl.dot` to numpy, whose library has other code for the last rows of a
    tile on some processors: a row would have other bits at another place. So it sums by itself,
    one input after another, beginning with the total: the size of a tile changes no bit, as on
    the cards that were tried.
    """
    if INTERPRETED:
        products = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        is_first = (tl.arange(0, a.shape[1]) == 0)[None, :, None]
        result = tl.sum(tl.where(is_first, total[:, None, :] + products, products), axis=1)
    else:
        result = tl.dot(a, b, total, input_precision="ieee")
    return result
