"""Timing of what a device works on after the call."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

CALLS = 5
ROUNDS = 5


def wait(device: str) -> None:
    """Until the device has done all that it was asked for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Median seconds of one of several calls that follow each other, after a first one."""
    call()
    rounds = []
    for _ in range(ROUNDS):
        wait(device)
        begin = perf_counter()
        for _ in range(CALLS):
            call()
        wait(device)
        rounds.append((perf_counter() - begin) / CALLS)
    return median(rounds)
