"""What torch's own operations may do on a card, settled before anything is computed there.

A program may have allowed torch to round products, or to try algorithms and take the fastest: then
the bits of an output would be those of its settings, and differ from one start to the next.
"""

import warnings
from typing import Any

import torch

_CUDA: Any = torch.backends.cuda
_CUDNN: Any = torch.backends.cudnn
"""Their newer names are unknown to torch's types."""


def settle_cards() -> None:
    """Products in the precision of their numbers, and algorithms that are not chosen by time.

    For this process. cuDNN's attention is left out: it prepares anew for each shape, and texts
    grow. That took 80 ms each time on an H200. Exact decoding uses attention of its own.
    """
    cuda, cudnn = _CUDA, _CUDNN
    # torch has an old and a new name for each; reading one fails where only the other was set.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        cuda.matmul.allow_tf32 = False
        cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
    for products in (cuda.matmul, cudnn.conv, cudnn.rnn):
        products.fp32_precision = "ieee"
    cuda.matmul.allow_bf16_reduced_precision_reduction = False
    cuda.matmul.allow_fp16_reduced_precision_reduction = False
    cuda.matmul.allow_fp16_accumulation = False
    cudnn.benchmark = False
    cudnn.deterministic = True
    cuda.enable_cudnn_sdp(False)


def products_on_cards() -> dict[str, Any]:
    """How products are computed there now, as plain values for JSON."""
    cuda, cudnn = _CUDA, _CUDNN
    return {
        "float32": [own.fp32_precision for own in (cuda.matmul, cudnn.conv, cudnn.rnn)],
        "reduced_sums": [
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_accumulation,
        ],
        "by_time": [cudnn.benchmark, not cudnn.deterministic],
        "library": str(cuda.preferred_blas_library()),
    }
