"""Weights rounded to groups of whole numbers.

Eight bits: the largest value of a group at the end of its range, as in llama.cpp's Q8_0. Four bits:
a scale and a minimum, as in Q4_1, chosen as llama.cpp's `make_qkx2_quants` does it: several steps
are tried, each gives whole numbers, these give the scale and the minimum of the least squared
error, and the best of them stay.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from blockdraft.kernels.weights import GROUP, MAX_INT8, GroupWeight

MAX_INT4 = 15
"""The largest number of four bits; the smallest is 0."""
STRETCHES = (0.0, -0.4, -0.8, -1.2, 0.4)
"""What is added to MAX_INT4 for the steps that are tried: a wider step than the range asks for
spends fewer numbers on its ends."""
AT_ONCE = 2**17
"""Weights that are rounded together: they stay in the cache."""


def in_groups(weight: Tensor, num_bits: int) -> GroupWeight:
    """A weight [outputs, inputs] close to this one, in numbers of 4 or 8 bits.

    Raises:
        ValueError: the inputs are no multiple of GROUP, or a value is no number or too large.
    """
    inputs = weight.shape[1]
    if inputs % GROUP:
        raise ValueError(f"{inputs} inputs are not a multiple of {GROUP}")
    rounded = [_in_eight_bits(part) if num_bits == 8 else _in_four_bits(part)
               for part in _parts(weight)]  # fmt: skip
    numbers, scales, minimums = (torch.cat(parts) for parts in zip(*rounded, strict=True))
    if not (scales.isfinite().all() and minimums.isfinite().all()):
        raise ValueError("a value is not a number, or too large for a scale in float16")
    return GroupWeight(numbers, scales, minimums if num_bits == 4 else None, weight.dtype)


def _parts(weight: Tensor) -> Iterator[Tensor]:
    """Some outputs at a time, in groups: [outputs, groups, GROUP], float32."""
    for rows in torch.split(weight.detach(), max(1, AT_ONCE // weight.shape[1])):
        yield rows.float().view(rows.shape[0], -1, GROUP)


def _in_eight_bits(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and no minimums."""
    scales = (values.abs().amax(-1) / MAX_INT8).half()
    numbers = (values / _divisors(scales)).round_().clamp_(-MAX_INT8, MAX_INT8)
    return numbers.to(torch.int8), scales, torch.zeros_like(scales)


def _in_four_bits(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, two a byte, scales and minimums."""
    low, high = values.aminmax(dim=-1)
    scales, minimums = ((high - low) / MAX_INT4).half(), low.half()
    least = _error(values, _numbers(values, scales, minimums), scales, minimums)
    for stretch in STRETCHES:
        step = (high - low) / (MAX_INT4 + stretch)
        fitted = _fitted(values, _numbers(values, step, low))
        error = _error(values, _numbers(values, *fitted), *fitted)
        is_better = error < least
        scales = torch.where(is_better, fitted[0], scales)
        minimums = torch.where(is_better, fitted[1], minimums)
        least = torch.where(is_better, error, least)
    numbers = _numbers(values, scales, minimums).to(torch.uint8)
    first, second = numbers.chunk(2, dim=-1)
    return first | second << 4, scales, minimums


def _numbers(values: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """The nearest numbers of four bits."""
    steps = (values - minimums.float()[..., None]).div_(_divisors(scales))
    return steps.round_().clamp_(0, MAX_INT4)


def _divisors(scales: Tensor) -> Tensor:
    """A group whose scale is 0 has numbers of 0 or at an end; they count nothing."""
    return scales.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]


def _fitted(values: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the least squared error; no numbers where all numbers are the same."""
    sum_n, sum_v = numbers.sum(-1), values.sum(-1)
    sum_nn, sum_nv = numbers.square().sum(-1), (numbers * values).sum(-1)
    divisor = GROUP * sum_nn - sum_n.square()
    scales = (GROUP * sum_nv - sum_v * sum_n) / divisor
    minimums = (sum_nn * sum_v - sum_n * sum_nv) / divisor
    return scales.half(), minimums.half()


def _error(values: Tensor, numbers: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """The sum of squares of each group."""
    found = torch.addcmul(minimums.float()[..., None], numbers, scales.float()[..., None])
    return (found - values).square_().sum(-1)
