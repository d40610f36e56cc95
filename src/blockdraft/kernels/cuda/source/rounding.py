"""Values in the precision of a tensor, held in float32."""

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
def factor(x, INTERPRETED: tl.constexpr):
    """x as `tl.dot` takes it: as it is on a card, in float32 in the interpreter."""
    if INTERPRETED:
        result = x.to(tl.float32)
    else:
        result = x
    return result
