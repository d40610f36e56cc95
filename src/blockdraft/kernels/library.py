"""The compiled kernels as functions of C, loaded once a process."""

import ctypes
import logging
import os
from functools import lru_cache

from blockdraft.kernels.build import build

SWITCH = "BLOCKDRAFT_KERNELS"
"""Environment variable: "off" leaves everything to torch."""

_ADDRESS, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

_SIGNATURES: dict[str, list[type]] = {
    "norm": [_FLAG, *[_ADDRESS] * 5, *[_COUNT] * 2, ctypes.c_float, _FLAG, _FLAG],
    "rotate": [_FLAG, _ADDRESS, _COUNT, *[_ADDRESS] * 4, *[_COUNT] * 4, ctypes.c_float, _FLAG,
               _FLAG],
    "gate": [_FLAG, *[_ADDRESS] * 2, *[_COUNT] * 2, _FLAG],
    "attend": [_FLAG, *[_ADDRESS] * 3, *[_ADDRESS, _COUNT, _COUNT] * 3, *[_ADDRESS] * 2],
}  # fmt: skip
"""As declared in the sources."""

logger = logging.getLogger(__name__)


class Library:
    """The functions of the sources, without their prefix."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        self.norm = _function(loaded, "norm")
        self.rotate = _function(loaded, "rotate")
        self.gate = _function(loaded, "gate")
        self.attend = _function(loaded, "attend")


class Plan(ctypes.Structure):
    """`Plan` of attention.cpp."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_spans", ctypes.c_int64),
        ("spans", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64),
        ("num_keys", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    """`Layer` of attention.cpp."""

    _fields_ = (
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


@lru_cache
def library() -> Library | None:
    """The kernels, or None where they are off or cannot be had; the log says why, once."""
    if os.environ.get(SWITCH, "").lower() == "off":
        logger.info("%s=off: torch's operations instead of kernels", SWITCH)
        return None
    try:
        return Library(str(build()))
    # Whatever keeps a machine from compiling, from a home folder that is missing to a compiler that
    # is another program: models run without kernels.
    except Exception as reason:
        logger.warning("no kernels for this CPU, steps take longer: %s", reason)
        return None


def _function(loaded: ctypes.CDLL, name: str) -> "ctypes._NamedFuncPointer":
    function = loaded[f"blockdraft_{name}"]
    function.argtypes = _SIGNATURES[name]
    function.restype = None
    return function
