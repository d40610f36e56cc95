"""Triton kernels. Triton is imported here and nowhere else.

Sizes of a layer are constants of a kernel, numbers of rows never are, nor do they specialize it:
another binary might sum in another order. Every load has a mask. Offsets are 64 bits wide, since a
K/V cache has more than 2^31 values.
"""

import triton
from triton import TritonError

__all__ = ["INTERPRETED", "TritonError"]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on a CPU. It multiplies the stored integers of
bfloat16, and cuts its last bits off; so kernels multiply and round themselves there."""
