"""Other rules of exactness than the library's, put in force to try them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from blockdraft.kernels.cuda.choice import SWITCH
from blockdraft.kernels.interface import RowRule
from blockdraft.kernels.torch.rules import ROW_RULES

OWN = "the library's"
TRITON = "Triton kernels"
"""The rule that they come with; all others are tried with torch's operations."""


def _always(num_rows: int) -> RowRule:
    """Every forward has as many rows, and every product over keys a page of them."""
    return RowRule(row_multiple=num_rows, max_rows=num_rows, key_tile=64)


CANDIDATES: Mapping[str, RowRule | None] = {
    TRITON: None,
    OWN: None,
    "multiples of 8, keys by 64": RowRule(row_multiple=8, max_rows=512, key_tile=64),
    "always 64 rows": _always(64),
    "always 128 rows": _always(128),
}
"""In the order in which they are tried: the first that holds is taken. The check of a load runs
forwards of up to 37 rows whatever the rule says, so no constant number below can be tried."""


def candidates_on(device: str) -> list[str]:
    """Those that can be tried on a device."""
    return [name for name in CANDIDATES if name != TRITON or device == "cuda"]


@contextmanager
def candidate(dtype: torch.dtype, name: str) -> Iterator[None]:
    """Put one of the CANDIDATES in force, and kernels or torch's operations with it."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "on" if name == TRITON else "off"
    try:
        with ruled(dtype, CANDIDATES[name]):
            yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


@contextmanager
def ruled(dtype: torch.dtype, rule: RowRule | None) -> Iterator[None]:
    """Put a rule in force for a precision; None leaves the library's."""
    before = ROW_RULES.get(dtype)
    if rule is not None:
        ROW_RULES[dtype] = rule
    try:
        yield
    finally:
        ROW_RULES.pop(dtype, None)
        if before is not None:
            ROW_RULES[dtype] = before


def key_tile(dtype: torch.dtype, keys: int) -> RowRule:
    """The library's rule of a precision, or one without multiples, with another tile of keys."""
    return replace(ROW_RULES.get(dtype, RowRule(1, 512, keys)), key_tile=keys)
